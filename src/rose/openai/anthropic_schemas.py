"""Requests, responses and events of Anthropic's Messages API, as far as command-line agents use them.

Bounds are part of the types, as in request_schemas.py. What concerns a provider's caching or accounting is accepted and
not used. Blocks that are not text (images, documents) have types of their own so that they can be refused by name;
their content is not decoded.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from rose.bounds import Label
from rose.openai.request_parsing import FreeJson, FreeObject
from rose.openai.request_schemas import (
    PARTS_MAX,
    TOOLS_MAX,
    IgnoredParameters,
    MaxTokens,
    PromptText,
    StopText,
    ToolName,
)
from rose.openai.response_schemas import PlacementInfo

MESSAGES_MAX = 4096


class CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    """A place where a provider should cache the prompt; here prompts are cached without it."""

    type: Label
    ttl: Label | None = None
    scope: Label | None = None


class AnthropicText(FreeJson, tag="text", forbid_unknown_fields=True):
    FREE: ClassVar[tuple[str, ...]] = ("citations",)
    text: PromptText
    cache_control: CacheControl | None = None
    citations: Annotated[list[FreeObject], Meta(max_length=PARTS_MAX)] | None = None


class ToolUse(FreeJson, tag="tool_use", forbid_unknown_fields=True):
    FREE: ClassVar[tuple[str, ...]] = ("input", "caller")
    id: Label
    name: ToolName
    input: FreeObject
    cache_control: CacheControl | None = None
    caller: FreeObject | None = None


class AnthropicImage(msgspec.Struct, tag="image"):
    """An image, which is refused."""


class AnthropicDocument(msgspec.Struct, tag="document"):
    """A document, which is refused."""


class ToolReference(msgspec.Struct, tag="tool_reference", forbid_unknown_fields=True):
    """The name of a tool that a search found."""

    tool_name: ToolName
    cache_control: CacheControl | None = None


ResultBlock = AnthropicText | ToolReference | AnthropicImage | AnthropicDocument


class ToolResult(msgspec.Struct, tag="tool_result", forbid_unknown_fields=True):
    tool_use_id: Label
    content: PromptText | Annotated[list[ResultBlock], Meta(max_length=PARTS_MAX)] | None = None
    is_error: bool | None = None  # the content says so too, and chat templates have no place for it
    cache_control: CacheControl | None = None


class Thinking(msgspec.Struct, tag="thinking", forbid_unknown_fields=True):
    """Reasoning that another model returned beside its answer; it is left out."""

    thinking: PromptText
    signature: PromptText | None = None


class RedactedThinking(msgspec.Struct, tag="redacted_thinking", forbid_unknown_fields=True):
    data: PromptText


Block = AnthropicText | ToolUse | ToolResult | Thinking | RedactedThinking | AnthropicImage | AnthropicDocument


class AnthropicMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: PromptText | Annotated[list[Block], Meta(max_length=PARTS_MAX)]


class AnthropicTool(FreeJson, forbid_unknown_fields=True):
    """A tool that the client runs. One that a provider runs has another `type`, and is refused."""

    FREE: ClassVar[tuple[str, ...]] = ("input_schema", "input_examples")
    name: ToolName
    type: Label | None = None
    description: PromptText | None = None
    input_schema: FreeObject | None = None
    # Accepted and not used: every tool is in the prompt, and the output is not constrained.
    cache_control: CacheControl | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: Annotated[list[FreeObject], Meta(max_length=TOOLS_MAX)] | None = None
    allowed_callers: Annotated[list[Label], Meta(max_length=TOOLS_MAX)] | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "none", "any", "tool"]  # the last two are refused: `check_tools`
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensBody(FreeJson, kw_only=True):
    """The prompt of a request."""

    FREE: ClassVar[tuple[str, ...]] = ("thinking", "output_config", "context_management")
    model: Label
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    system: PromptText | Annotated[list[AnthropicText], Meta(max_length=PARTS_MAX)] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: FreeObject | None = None  # `format` is refused; the rest is not used
    # Accepted and not used: they concern a provider's models, caching and accounting.
    thinking: FreeObject | None = None
    context_management: FreeObject | None = None
    cache_control: CacheControl | None = None
    betas: Annotated[list[Label], Meta(max_length=256)] | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    FREE: ClassVar[tuple[str, ...]] = (*CountTokensBody.FREE, "metadata")
    max_tokens: MaxTokens
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=4)] | None = None
    metadata: FreeObject | None = None


IGNORED_COUNT: IgnoredParameters = {"mcp_servers": ([],), "speed": ("standard",)}
IGNORED_MESSAGES: IgnoredParameters = IGNORED_COUNT | {
    "service_tier": ("auto", "standard_only"),
    "container": (),
    "inference_geo": (),
}

StopReason = Literal["end_turn", "max_tokens", "tool_use", "stop_sequence"]


class TextOutput(msgspec.Struct, tag="text"):
    text: str


class ToolUseOutput(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, object]


ContentOutput = TextOutput | ToolUseOutput


class TokenUsage(msgspec.Struct):
    """`input_tokens` is the whole prompt, with what was cached."""

    input_tokens: int
    output_tokens: int


class MessageReply(msgspec.Struct, tag="message", kw_only=True):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentOutput]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: TokenUsage
    rose: PlacementInfo | UnsetType = UNSET


class TokenCount(msgspec.Struct):
    input_tokens: int


class MessageStart(msgspec.Struct, tag="message_start"):
    message: MessageReply


class ContentBlockStart(msgspec.Struct, tag="content_block_start"):
    index: int
    content_block: ContentOutput


class TextDelta(msgspec.Struct, tag="text_delta"):
    text: str


class InputJsonDelta(msgspec.Struct, tag="input_json_delta"):
    partial_json: str


class ContentBlockDelta(msgspec.Struct, tag="content_block_delta"):
    index: int
    delta: TextDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, tag="content_block_stop"):
    index: int


class StopInfo(msgspec.Struct):
    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageDelta(msgspec.Struct, tag="message_delta"):
    delta: StopInfo
    usage: TokenUsage
    rose: PlacementInfo | UnsetType = UNSET


class MessageStop(msgspec.Struct, tag="message_stop"):
    pass


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct, tag="error"):
    error: AnthropicErrorDetail
