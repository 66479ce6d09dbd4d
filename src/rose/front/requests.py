"""The bodies that clients send.

Field names and meanings are those of OpenAI and, beyond them, of vLLM. Bounds are part of the types, so the check, the
error message and the OpenAPI document cannot disagree. The default of every field is what OpenAI documents.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from rose.bounds import INT32_MAX, INT64_MAX, SESSION_CHARACTERS_MAX, TOKENS_MAX, Count, Label, Text, TokenId
from rose.front.structure import CHECKED_BY, FreeJson, FreeObject

CHOICES_MAX = 128
TEMPERATURE_MIN = 0.01  # below it, logits divided by the temperature leave the range of a float; 0 is greedy
PROMPT_CHARACTERS_MAX = 64 << 20  # the longest context, with tokens of 64 characters; `max_body_bytes` is less
ARGUMENTS_CHARACTERS_MAX = 1 << 20  # of one call: a file that a model writes
PARTS_MAX = 1 << 12  # of one message

PromptText = Annotated[str, Meta(max_length=PROMPT_CHARACTERS_MAX)]
Choices = Annotated[int, Meta(ge=1, le=CHOICES_MAX)]
MaxTokens = Annotated[int, Meta(ge=1, le=INT32_MAX)]
MinTokens = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=INT32_MAX)]
MinP = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=10)]
Seed = Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)]
Priority = Annotated[int, Meta(ge=-INT32_MAX, le=INT32_MAX)]
PromptIds = Annotated[list[TokenId], Meta(max_length=TOKENS_MAX)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
StopText = Annotated[str, Meta(min_length=1, max_length=1000)]
StopTexts = Annotated[list[StopText], Meta(max_length=4)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=256)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
SessionName = Annotated[str, Meta(min_length=1, max_length=SESSION_CHARACTERS_MAX)]
ToolName = Annotated[str, Meta(min_length=1, max_length=256)]
TOOLS_MAX = 512


Off = Annotated[bool, Meta(extra_json_schema={"enum": [False]})]  # not implemented; `check_stream` refuses true


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: Off | None = None
    include_obfuscation: Off | None = None


class SamplingBody(msgspec.Struct, kw_only=True):
    """What completions and chat share."""

    model: Label | None = None
    n: Choices | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    request_id: Label | None = None
    # Accepted and not used: they concern a provider's books, not the answer.
    user: Text | None = None
    session_id: Text | None = None
    # Which trajectory this is a turn of: ours and ThunderAgent's word for it. A gateway reads them, a device does not.
    trajectory: SessionName | None = None
    program_id: SessionName | None = None


# A text, token ids, or a list of either. msgspec cannot tell two kinds of list apart: `prompts_of` does.
Prompt = PromptText | Annotated[list[PromptText | TokenId | PromptIds], Meta(min_length=1, max_length=TOKENS_MAX)]


class CompletionBody(SamplingBody, kw_only=True):
    prompt: Prompt
    logprobs: TopLogprobs | None = None
    best_of: Literal[1] | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: PromptText


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """`arguments` is a JSON object, as text."""

    name: ToolName
    arguments: Annotated[str, Meta(max_length=ARGUMENTS_CHARACTERS_MAX)] = ""


class CalledTool(msgspec.Struct, forbid_unknown_fields=True):
    """A call that an assistant's message made; `index` is left over from a stream."""

    function: CalledFunction
    id: Label | None = None
    type: Literal["function"] = "function"
    index: Count | None = None


class Function(FreeJson, forbid_unknown_fields=True, omit_defaults=True):
    """`strict` is accepted, as the official client insists on it; a call is what the model said, strict or not."""

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


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message as clients send it back, with the empty fields that an assistant's message has."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: PromptText | Annotated[list[TextPart], Meta(max_length=PARTS_MAX)] | None = None
    name: Label | None = None
    tool_call_id: Label | None = None
    tool_calls: Annotated[list[CalledTool], Meta(max_length=TOOLS_MAX)] | None = None
    annotations: Annotated[list[None], Meta(max_length=0)] | None = None
    refusal: PromptText | None = None
    reasoning: PromptText | None = None
    reasoning_content: PromptText | None = None
    function_call: None = None
    audio: None = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]


class ChatBody(SamplingBody, FreeJson, kw_only=True):
    FREE: ClassVar = ("chat_template_kwargs",)
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


class GenerateSampling(msgspec.Struct, kw_only=True):
    """`sampling_params` of the token route; `logprobs` 0 or 1 means the sampled token only."""

    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    logprobs: TopLogprobs | None = None


RawSampling = Annotated[msgspec.Raw, Meta(extra={CHECKED_BY: "rose.front.generate.SAMPLING_READER"})]


class GenerateBody(msgspec.Struct, kw_only=True):
    """Token ids in, token ids out. `sampling_params` is read by itself, so that its keys are as strict."""

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


class TokenizeBody(FreeJson, kw_only=True):
    """Either a prompt or messages."""

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
