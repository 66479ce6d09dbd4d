"""Response bodies, in OpenAI's shapes with vLLM's additions.

A field that is UNSET is left out of the JSON. `weight_versions` are the spans of output tokens that were sampled under
the same version of the weights.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from rose.api.requests import FinishReason, VersionSpan

ChatFinish = FinishReason | Literal["tool_calls"]


class PlacementInfo(msgspec.Struct, omit_defaults=True):
    """What a gateway adds: the workers that ran it and, of a trajectory, the turn and whether it began a new branch."""

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


class PromptTokenLogprob(msgspec.Struct):
    """A token at one place of a prompt. `decoded_token` is null on the token route, which does not decode."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptTokenLogprob] | None]
"""For each place of a prompt the token that is there, then the best ones; null for the first place."""


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    weight_versions: list[VersionSpan] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    rose: PlacementInfo | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ToolCallDelta(msgspec.Struct):
    index: int
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[VersionSpan] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[VersionSpan] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    rose: PlacementInfo | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    rose: PlacementInfo | UnsetType = UNSET


class GenerateTopLogprob(msgspec.Struct):
    """A token and its log-probability. `token` is `token_id:N`: the token route does not decode."""

    token: str
    token_id: int
    logprob: float


class GenerateLogprob(GenerateTopLogprob):
    top_logprobs: list[GenerateTopLogprob] | UnsetType = UNSET


class GenerateLogprobs(msgspec.Struct):
    content: list[GenerateLogprob]


class GenerateChoice(msgspec.Struct, kw_only=True):
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: GenerateLogprobs | None = None
    weight_versions: list[VersionSpan] | None = None


class Generated(msgspec.Struct, kw_only=True):
    request_id: str
    model: str
    created: int
    choices: list[GenerateChoice]
    weight_version: str
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    rose: PlacementInfo | UnsetType = UNSET


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


class Tokenized(msgspec.Struct):
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
