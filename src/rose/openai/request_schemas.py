"""Request bodies.

Field names and meanings are those of OpenAI and, beyond them, of vLLM. Bounds are part of the types, so the check, the
error message and the OpenAPI document cannot disagree. The default of every field is what OpenAI documents.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from rose.bounds import (
    INT32_MAX,
    INT64_MAX,
    SESSION_CHARACTERS_MAX,
    TOKENS_MAX,
    Count,
    Finite,
    Label,
    Serial,
    Text,
    TokenId,
    VersionName,
)
from rose.openai.request_parsing import CHECKED_BY, FreeJson, FreeObject

IgnoredParameters = dict[str, tuple[Any, ...]]

CHOICES_MAX = 128
TEMPERATURE_MIN = 0.01  # below it, logits divided by the temperature leave the range of a float; 0 is greedy
PROMPT_CHARACTERS_MAX = 64 << 20  # the longest context, with tokens of 64 characters; `max_body_bytes` is less
ARGUMENTS_CHARACTERS_MAX = 1 << 20  # of one call: a file that a model writes
PARTS_MAX = 1 << 12  # of one message

PromptText = Annotated[str, Meta(max_length=PROMPT_CHARACTERS_MAX)]
MaxTokens = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Priority = Annotated[int, Meta(ge=-INT32_MAX, le=INT32_MAX)]
PromptIds = Annotated[list[TokenId], Meta(max_length=TOKENS_MAX)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
StopText = Annotated[str, Meta(min_length=1, max_length=1000)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
SessionName = Annotated[str, Meta(min_length=1, max_length=SESSION_CHARACTERS_MAX)]
ToolName = Annotated[str, Meta(min_length=1, max_length=256)]
TOOLS_MAX = 512
WantedLogprobs = TopLogprobs | bool | None
Off = Annotated[bool, Meta(extra_json_schema={"enum": [False]})]  # not implemented; `check_stream` refuses true


def logprobs_of(wanted: WantedLogprobs) -> int | None:
    """Return how many alternatives are asked for, None without log-probabilities. True means one, as in vLLM."""
    return (1 if wanted else None) if isinstance(wanted, bool) else wanted


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: Off | None = None
    include_obfuscation: Off | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """The sampling parameters of every route that generates."""

    # What OpenAI documents for completions, and vLLM for its token route; None is all the context that is left.
    DEFAULT_MAX_TOKENS: ClassVar[int | None] = 16

    max_tokens: MaxTokens | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    seed: Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: TopLogprobs | None = None
    include_stop_str_in_output: bool | None = None  # changes text only
    routed_experts_prompt_start: Serial | None = None  # where routed experts begin, which no response has

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int:
        """Return how many alternatives are listed beside each sampled token."""
        return 0


class SamplingBody(SamplingFields, FreeJson, kw_only=True):
    """The fields that completions and chat share.

    `trajectory` and `program_id`, which is ThunderAgent's name, say which trajectory this is a turn of. A gateway reads
    them, a device does not. `weight_version` and `min_weight_version` say which weights may sample the answer.
    """

    FREE: ClassVar[tuple[str, ...]] = ("nvext",)
    model: Label | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    request_id: Label | None = None
    trajectory: SessionName | None = None
    program_id: SessionName | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=4)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    weight_version: VersionName | None = None
    min_weight_version: VersionName | None = None
    # Accepted and not used: they concern a provider's accounting, or the routing inside Dynamo, not the response.
    user: Text | None = None
    session_id: Text | None = None
    nvext: FreeObject | None = None


# A text, token ids, or a list of either. msgspec cannot tell two kinds of list apart: `prompts_of` does.
Prompt = PromptText | Annotated[list[PromptText | TokenId | PromptIds], Meta(min_length=1, max_length=TOKENS_MAX)]


class CompletionBody(SamplingBody, kw_only=True):
    prompt: Prompt
    logprobs: WantedLogprobs = None
    best_of: Literal[1] | None = None

    @property
    def alternatives(self) -> int:
        return logprobs_of(self.logprobs) or 0


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: PromptText


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function of a call; `arguments` is a JSON object, as text."""

    name: ToolName
    arguments: Annotated[str, Meta(max_length=ARGUMENTS_CHARACTERS_MAX)] = ""


class CalledTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call in an assistant's message; `index` is left over from a stream."""

    function: CalledFunction
    id: Label | None = None
    type: Literal["function"] = "function"
    index: Count | None = None


class Function(FreeJson, forbid_unknown_fields=True, omit_defaults=True):
    """A function of a tool. `strict` is accepted, as the official client sends it, and changes nothing."""

    FREE: ClassVar = ("parameters",)
    name: ToolName
    description: PromptText | None = None
    parameters: FreeObject | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    function: Function
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: ToolName


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    function: NamedFunction
    type: Literal["function"] = "function"


Tools = Annotated[list[Tool], Meta(max_length=TOOLS_MAX)]


class ChatMessage(FreeJson, forbid_unknown_fields=True):
    """A message as clients send it back, with the empty fields that an assistant's message has."""

    FREE: ClassVar[tuple[str, ...]] = ("provider_specific_fields",)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: PromptText | Annotated[list[TextPart], Meta(max_length=PARTS_MAX)] | None = None
    name: Label | None = None
    tool_call_id: Label | None = None
    tool_calls: Annotated[list[CalledTool], Meta(max_length=TOOLS_MAX)] | None = None
    annotations: Annotated[list[None], Meta(max_length=0)] | None = None
    refusal: PromptText | None = None
    reasoning: PromptText | None = None
    reasoning_content: PromptText | None = None
    # NeMo-Gym sends back what it was told of an answer; a session has the same tokens, whatever these say.
    prompt_token_ids: PromptIds | None = None
    generation_token_ids: PromptIds | None = None
    generation_log_probs: Annotated[list[Finite], Meta(max_length=TOKENS_MAX)] | None = None
    function_call: None = None
    audio: None = None
    provider_specific_fields: FreeObject | None = None  # LiteLLM's own; not used

    @property
    def text(self) -> str:
        content = self.content
        return "\n".join(part.text for part in content) if isinstance(content, list) else content or ""


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]


class ChatBody(SamplingBody, kw_only=True):
    FREE: ClassVar[tuple[str, ...]] = ("nvext", "chat_template_kwargs")
    DEFAULT_MAX_TOKENS: ClassVar[int | None] = None

    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: FreeObject | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None  # `check_tools` refuses the last two
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int:
        return self.top_logprobs or 0


class GenerateSampling(SamplingFields, kw_only=True):
    """`sampling_params` of the token route; `logprobs` 0, 1 or true means the sampled token only."""

    logprobs: WantedLogprobs = None

    @property
    def alternatives(self) -> int:
        wanted = logprobs_of(self.logprobs) or 0
        return wanted if wanted > 1 else 0


RawSampling = Annotated[msgspec.Raw, Meta(extra={CHECKED_BY: "rose.openai.generate.SAMPLING_READER"})]


class GenerateBody(msgspec.Struct, kw_only=True):
    """A request of the token route. `sampling_params` is decoded by itself, so that its keys are as strict."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=TOKENS_MAX)]
    sampling_params: RawSampling = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))
    model: Label | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    request_id: Label | None = None
    trajectory: SessionName | None = None
    program_id: SessionName | None = None
    weight_version: VersionName | None = None
    min_weight_version: VersionName | None = None


GeneratingBody = SamplingBody | GenerateBody


class TokenizeBody(FreeJson, kw_only=True):
    """A request to tokenise either a prompt or messages."""

    FREE: ClassVar = ("chat_template_kwargs",)
    prompt: PromptText | None = None
    messages: Messages | None = None
    model: Label | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: FreeObject | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: PromptIds
    model: Label | None = None


# Parameters that OpenAI or vLLM know and this server does not implement, with the values that change nothing. A client
# may send them at such a value, or null; any other value is refused by name. `()` means null only.


def _null_only(names: str) -> IgnoredParameters:
    return dict.fromkeys(names.split(), ())


_EVERYWHERE: IgnoredParameters = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "stream_interval": (1,),
    "watermarking": (False,),
} | _null_only(
    "truncate_prompt_tokens allowed_token_ids logprob_token_ids structured_outputs repetition_detection "
    "thinking_token_budget"
)
IGNORED_SAMPLING: IgnoredParameters = (
    _EVERYWHERE
    | {
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "early_stopping": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "response_format": ({"type": "text"},),
        "return_token_offsets": (False,),
        "vllm_xargs": ({},),
        "echo": (False,),
        "return_mm_kwargs": (False,),
    }
    | _null_only("truncation_side kv_transfer_params ec_transfer_params mm_payload")
)
IGNORED_COMPLETION: IgnoredParameters = IGNORED_SAMPLING | {
    "suffix": ("",),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
}
IGNORED_TOKENIZE: IgnoredParameters = {"continue_final_message": (False,)} | _null_only(
    "chat_template media_io_kwargs mm_processor_kwargs"
)
IGNORED_CHAT: IgnoredParameters = (
    IGNORED_SAMPLING
    | IGNORED_TOKENIZE
    | {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "include_reasoning": (True,),
        "modalities": (["text"],),
        "store": (False,),
        "metadata": ({},),
        "service_tier": ("auto", "default"),
        "add_special_tokens": (False,),
        "documents": ([],),
        "return_prompt_text": (False,),
    }
    | _null_only("reasoning_effort audio prediction web_search_options verbosity prompt_cache_retention")
)
IGNORED_GENERATE: IgnoredParameters = {
    "return_token_ids": (True,),
    "return_weight_versions": (True, False),  # they always come
    "output_mode": ("tokens",),
} | _null_only(
    "features token_offsets content_parts reasoning_ended reasoning_parser_kwargs kv_transfer_params ec_transfer_params"
)
IGNORED_GENERATE_SAMPLING: IgnoredParameters = (
    _EVERYWHERE
    | {
        "n": (1,),
        "stop": ([], ""),
        "detokenize": (True, False),
        "skip_special_tokens": (True, False),
        "spaces_between_special_tokens": (True, False),
        "extra_args": ({},),
        "output_kind": (0, 1, 2),
        "flat_logprobs": (False,),
        "skip_reading_prefix_cache": (False,),
    }
    | _null_only("prompt_logprob_token_ids prompt_logprob_start")
)
