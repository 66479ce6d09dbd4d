"""The bodies that clients get, in OpenAI's shapes with vLLM's additions. A field that is UNSET is left out."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

Finish = Literal["stop", "length", "abort"]
ChatFinish = Literal["stop", "length", "abort", "tool_calls"]


class WeightVersion(msgspec.Struct):
    """Output tokens [start, end) were drawn under this version of the weights."""

    version: str
    start: int
    end: int


class Placed(msgspec.Struct, omit_defaults=True):
    """What a gateway adds: where it ran and, of a trajectory, which turn it is and whether it began a new branch."""

    workers: list[str]
    trajectory: str | None = None
    turn: int | None = None
    is_fork: bool | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightVersion] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    rose: Placed | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class SaidFunction(msgspec.Struct):
    name: str
    arguments: str


class SaidCall(msgspec.Struct):
    id: str
    function: SaidFunction
    type: Literal["function"] = "function"


class SaidCallDelta(msgspec.Struct):
    index: int
    id: str
    function: SaidFunction
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[SaidCall] | UnsetType = UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[SaidCallDelta] | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightVersion] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightVersion] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    rose: Placed | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    rose: Placed | UnsetType = UNSET


class GenerateTopLogprob(msgspec.Struct):
    token: str
    token_id: int
    logprob: float


class GenerateLogprob(msgspec.Struct):
    """`token` is `token_id:N`: the token route does not decode."""

    token: str
    token_id: int
    logprob: float
    top_logprobs: list[GenerateTopLogprob] | UnsetType = UNSET


class GenerateLogprobs(msgspec.Struct):
    content: list[GenerateLogprob]


class GenerateChoice(msgspec.Struct, kw_only=True):
    index: int
    token_ids: list[int]
    finish_reason: Finish | None = None
    logprobs: GenerateLogprobs | None = None
    weight_versions: list[WeightVersion] | None = None


class Generated(msgspec.Struct, kw_only=True):
    request_id: str
    model: str
    created: int
    choices: list[GenerateChoice]
    weight_version: str
    usage: Usage | UnsetType | None = UNSET
    rose: Placed | UnsetType = UNSET


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rose"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(msgspec.Struct, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str


class Health(msgspec.Struct):
    status: Literal["ok"] = "ok"


class Version(msgspec.Struct):
    version: str
