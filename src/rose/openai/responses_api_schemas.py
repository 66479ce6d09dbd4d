"""Requests, responses and events of OpenAI's Responses API, as far as agents use it.

Bounds are part of the types, as in request_schemas.py. The items of a conversation come back as programs keep them,
with fields of their own, so unknown fields of items, parts and tools are not used; those of a request are refused. One
struct holds every type of item, and one every type of part, so that a type that is not known is refused by its name.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from rose.bounds import INT64_MAX, Label, Text, VersionName
from rose.openai.http_errors import ErrorDetail
from rose.openai.request_parsing import FreeJson, FreeObject
from rose.openai.request_schemas import (
    ARGUMENTS_CHARACTERS_MAX,
    PARTS_MAX,
    TOOLS_MAX,
    CacheSalt,
    IgnoredParameters,
    MaxTokens,
    Priority,
    PromptText,
    SessionName,
    ToolName,
)
from rose.openai.response_schemas import PlacementInfo

ITEMS_MAX = 4096
INCLUDES_MAX = 64


class ContentPart(msgspec.Struct):
    """A part of a message or of a tool's output."""

    type: Label
    text: PromptText | None = None
    refusal: PromptText | None = None


Content = PromptText | Annotated[list[ContentPart], Meta(max_length=PARTS_MAX)]


class InputItem(msgspec.Struct):
    """One item of a conversation; `type` says which fields it has."""

    type: Label = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    call_id: Label | None = None
    name: ToolName | None = None
    arguments: Annotated[str, Meta(max_length=ARGUMENTS_CHARACTERS_MAX)] | None = None
    output: Content | None = None


class OfferedTool(FreeJson):
    """A tool that the client runs if its type is `function`. `strict` has no effect."""

    FREE: ClassVar[tuple[str, ...]] = ("parameters",)
    type: Label
    name: ToolName | None = None
    description: PromptText | None = None
    parameters: FreeObject | None = None


class ResponsesBody(FreeJson, kw_only=True):
    """A request. The fields of the last two groups are ROSE's: on chat completions they are the same."""

    FREE: ClassVar[tuple[str, ...]] = ("reasoning", "text", "tool_choice", "metadata", "client_metadata")
    input: PromptText | Annotated[list[InputItem], Meta(min_length=1, max_length=ITEMS_MAX)]
    model: Label | None = None
    instructions: PromptText | None = None
    tools: Annotated[list[OfferedTool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FreeObject | None = None  # only the first two do not force
    max_output_tokens: MaxTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stream: bool | None = None
    text: FreeObject | None = None  # a `format` other than text is refused; the rest has no effect
    include: Annotated[list[Label], Meta(max_length=INCLUDES_MAX)] | None = None  # log-probabilities are refused
    previous_response_id: Label | None = None  # refused: responses are not kept
    # Accepted without effect: they concern a provider's models, caching and accounting.
    reasoning: FreeObject | None = None
    metadata: FreeObject | None = None
    client_metadata: FreeObject | None = None
    prompt_cache_key: Text | None = None
    safety_identifier: Text | None = None
    user: Text | None = None
    # Which trajectory and which weights.
    trajectory: SessionName | None = None
    weight_version: VersionName | None = None
    min_weight_version: VersionName | None = None
    # How the engine runs it.
    seed: Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)] | None = None
    ignore_eos: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None


IGNORED_RESPONSES: IgnoredParameters = {
    "store": (False,),
    "background": (False,),
    "parallel_tool_calls": (True, False),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "prompt_cache_retention": ("in_memory", "24h"),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
}


NoItems = Annotated[list[None], Meta(max_length=0)]  # of lists that clients read and that are always empty here


class OutputText(msgspec.Struct, tag="output_text"):
    text: str
    annotations: NoItems = msgspec.field(default_factory=list)
    logprobs: NoItems = msgspec.field(default_factory=list)


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(msgspec.Struct, tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText] = msgspec.field(default_factory=list)
    role: Literal["assistant"] = "assistant"


class OutputCall(msgspec.Struct, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | OutputCall


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """`input_tokens` is the whole prompt, with what was cached."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response. It does not repeat the instructions and the tools of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputItem] = msgspec.field(default_factory=list)
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    tools: NoItems = msgspec.field(default_factory=list)
    store: bool = False
    rose: PlacementInfo | UnsetType = UNSET


class StreamedEvent(msgspec.Struct, kw_only=True):
    """An event; the stream gives it its number."""

    sequence_number: int = 0


class ResponseCreated(StreamedEvent, tag="response.created", kw_only=True):
    response: ResponseObject


class ResponseInProgress(StreamedEvent, tag="response.in_progress", kw_only=True):
    response: ResponseObject


class ItemEvent(StreamedEvent, kw_only=True):
    """An event about one item of the output."""

    output_index: int


class OutputItemAdded(ItemEvent, tag="response.output_item.added", kw_only=True):
    item: OutputItem


class OutputItemDone(ItemEvent, tag="response.output_item.done", kw_only=True):
    item: OutputItem


class PartEvent(ItemEvent, kw_only=True):
    """An event about the only part of a message."""

    item_id: str
    content_index: int = 0


class ContentPartAdded(PartEvent, tag="response.content_part.added", kw_only=True):
    part: OutputText


class ContentPartDone(PartEvent, tag="response.content_part.done", kw_only=True):
    part: OutputText


class OutputTextDelta(PartEvent, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: NoItems = msgspec.field(default_factory=list)


class OutputTextDone(PartEvent, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: NoItems = msgspec.field(default_factory=list)


class ArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta", kw_only=True):
    item_id: str
    delta: str


class ArgumentsDone(ItemEvent, tag="response.function_call_arguments.done", kw_only=True):
    item_id: str
    name: str
    arguments: str


class ResponseCompleted(StreamedEvent, tag="response.completed", kw_only=True):
    response: ResponseObject


class ResponseIncomplete(StreamedEvent, tag="response.incomplete", kw_only=True):
    response: ResponseObject


class ResponseFailed(StreamedEvent, tag="response.failed", kw_only=True):
    response: ResponseObject


class ErrorEvent(StreamedEvent, tag="error", kw_only=True):
    """An error in a stream. Clients read it from the event itself, or from `error`."""

    code: str | None
    message: str
    param: str | None
    error: ErrorDetail


EVENTS: tuple[type[StreamedEvent], ...] = (
    ResponseCreated, ResponseInProgress, OutputItemAdded, ContentPartAdded, OutputTextDelta, OutputTextDone,
    ContentPartDone, ArgumentsDelta, ArgumentsDone, OutputItemDone, ResponseCompleted, ResponseIncomplete,
    ResponseFailed, ErrorEvent,
)  # fmt: skip
