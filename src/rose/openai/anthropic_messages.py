"""`POST /v1/messages`: Anthropic's Messages API as a translation of chat completions.

A request becomes a chat request, so that sessions, templates and tool calls work as they do there. The answer's text
becomes one text block, and its calls follow as tool_use blocks, whole or in a stream. Text blocks of an answer that
comes back are joined without a separator, so that it equals the text that the model generated.

Claude Code begins its system prompt with a block that holds a hash of the request. It is left out: with it no
conversation would continue from its stored tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import msgspec
from aiohttp import web

from rose.openai.anthropic_schemas import (
    IGNORED_COUNT,
    IGNORED_MESSAGES,
    AnthropicDocument,
    AnthropicError,
    AnthropicErrorDetail,
    AnthropicImage,
    AnthropicMessage,
    AnthropicText,
    AnthropicTool,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    ContentOutput,
    CountTokensBody,
    InputJsonDelta,
    MessageDelta,
    MessageReply,
    MessagesBody,
    MessageStart,
    MessageStop,
    ResultBlock,
    StopInfo,
    TextDelta,
    TextOutput,
    TokenCount,
    TokenUsage,
    ToolReference,
    ToolResult,
    ToolUse,
    ToolUseOutput,
)
from rose.openai.conversation_answering import ConversationRenderer, answer_single, is_cut, prompt_ids_of
from rose.openai.generation import Choice, ChoiceDelta
from rose.openai.http_context import HttpContext
from rose.openai.http_errors import Failure, bad_request
from rose.openai.request_parsing import BodyReader
from rose.openai.request_schemas import CalledFunction, CalledTool, ChatBody, ChatMessage, Function, TextPart, Tool
from rose.openai.response_rendering import new_id
from rose.openai.response_writing import NamedEvents, json_response

MESSAGES_PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"
READER = BodyReader(MessagesBody, IGNORED_MESSAGES)
COUNT_READER = BodyReader(CountTokensBody, IGNORED_COUNT)
BILLING_MARK = "x-anthropic-billing-header:"
NO_PARAMETERS = {"type": "object", "properties": {}}
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def chat_of(body: CountTokensBody) -> ChatBody:
    """Return the chat request that means the same. Raise Failure for what chat does not have."""
    if body.output_config and body.output_config.get("format") is not None:
        what = "`output_config.format` is not implemented: the output of the model is not forced into a form"
        raise bad_request(what, param="output_config.format", code="unsupported_parameter")
    if body.messages[-1].role == "assistant":
        what = "the last message is the assistant's: answers that a client has begun are not continued"
        raise bad_request(what, param="messages", code="unsupported_parameter")
    messages = _system_of(body.system)
    for number, message in enumerate(body.messages):
        messages += _assistant(message, number) if message.role == "assistant" else _input(message, number)
    chat = ChatBody(
        model=body.model,
        messages=messages,
        tools=[_tool(tool, number) for number, tool in enumerate(body.tools)] if body.tools else None,
    )
    if body.tool_choice is not None:
        kind = body.tool_choice.type
        chat.tool_choice = kind if kind in ("auto", "none") else "required"
    if isinstance(body, MessagesBody):
        chat.max_tokens, chat.stream, chat.stop = body.max_tokens, body.stream, body.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    return chat


def _system_of(system: str | list[AnthropicText] | None) -> list[ChatMessage]:
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    parts = [TextPart("text", text) for text in texts if not text.startswith(BILLING_MARK)]
    return [ChatMessage(role="system", content=parts)] if parts else []


def _input(message: AnthropicMessage, number: int) -> Iterator[ChatMessage]:
    """Yield a user's message: one message of the role `tool` per result, and one per run of texts."""
    if isinstance(message.content, str):
        yield ChatMessage(role=message.role, content=message.content)
        return
    parts: list[TextPart] = []
    for place, block in enumerate(message.content):
        where = f"messages[{number}].content[{place}]"
        if isinstance(block, AnthropicText):
            parts.append(TextPart("text", block.text))
        elif isinstance(block, ToolResult):
            if parts:
                yield ChatMessage(role=message.role, content=parts)
            parts = []
            yield ChatMessage(role="tool", content=_result(block, where), tool_call_id=block.tool_use_id)
        else:
            _refuse(block, where, message.role)
    if parts or not message.content:
        yield ChatMessage(role=message.role, content=parts)


def _assistant(message: AnthropicMessage, number: int) -> Iterator[ChatMessage]:
    if isinstance(message.content, str):
        yield ChatMessage(role="assistant", content=message.content)
        return
    text, calls = "", []
    for place, block in enumerate(message.content):
        if isinstance(block, AnthropicText):
            text += block.text
        elif isinstance(block, ToolUse):
            arguments = json.dumps(block.input, ensure_ascii=False)
            calls.append(CalledTool(CalledFunction(block.name, arguments), id=block.id))
        elif isinstance(block, (ToolResult, AnthropicImage, AnthropicDocument)):
            _refuse(block, f"messages[{number}].content[{place}]", "assistant")
    yield ChatMessage(role="assistant", content=text, tool_calls=calls or None)


def _result(result: ToolResult, where: str) -> str | list[TextPart]:
    if result.content is None or isinstance(result.content, str):
        return result.content or ""
    return [TextPart("text", _text_of(block, f"{where}.content[{n}]")) for n, block in enumerate(result.content)]


def _text_of(block: ResultBlock, where: str) -> str:
    if isinstance(block, AnthropicText):
        return block.text
    if not isinstance(block, ToolReference):
        _refuse(block, where, "tool")
    return block.tool_name


def _refuse(block: msgspec.Struct, where: str, role: str) -> NoReturn:
    kind = block.__struct_config__.tag
    if isinstance(block, (AnthropicImage, AnthropicDocument)):
        message = f"`{where}` is a block of the type `{kind}`: the model reads text only"
    else:
        message = f"`{where}`: a message of the role `{role}` has no blocks of the type `{kind}`"
    raise bad_request(message, param=where)


def _tool(tool: AnthropicTool, number: int) -> Tool:
    if tool.type not in (None, "custom"):
        message = f"`tools[{number}]` has the type `{tool.type}`, which its provider runs: send tools that you run"
        raise bad_request(message, param=f"tools[{number}].type", code="unsupported_parameter")
    return Tool(Function(tool.name, tool.description, tool.input_schema or dict(NO_PARAMETERS)))


class MessageEvents(NamedEvents):
    """A stream whose errors are Anthropic's."""

    def errors(self, failure: Failure) -> Iterable[msgspec.Struct]:
        return (error_of(failure),)


class MessageRenderer(ConversationRenderer):
    """Responses to one request."""

    EVENTS, HAS_LAST_EVENT = MessageEvents, True

    def whole(self, choices: Sequence[Choice]) -> MessageReply:
        [choice] = choices
        parsed = self.parsed(choice)
        content: list[ContentOutput] = [TextOutput(parsed.text)] if parsed.text else []
        for call in parsed.calls:
            content.append(ToolUseOutput(self.call_of(choice, call).id, call.name, call.arguments))
        reply = self._reply(choice, content)
        stop = _stop_of(choice, bool(parsed.calls))
        reply.stop_reason, reply.stop_sequence = stop.stop_reason, stop.stop_sequence
        reply.rose = self.placement_of(choices)
        return reply

    def opening(self, choices: Sequence[Choice]) -> Iterable[msgspec.Struct]:
        [choice] = choices
        reply = self._reply(choice, [])
        reply.usage.output_tokens = 0
        yield MessageStart(reply)

    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Iterator[msgspec.Struct]:
        """Yield text as it comes. Calls come when the answer has ended, so that its text is one block."""
        had_text = bool(self.texts)
        parsed = self.added(choice, delta)
        if self.texts and not had_text:
            yield ContentBlockStart(0, TextOutput(""))
        if parsed.text:
            yield ContentBlockDelta(0, TextDelta(parsed.text))
        if delta.finish_reason is not None:
            yield from self._end(choice)

    def usage_chunk(self, choices: Sequence[Choice]) -> MessageStop:
        return MessageStop()

    def _end(self, choice: Choice) -> Iterator[msgspec.Struct]:
        stop = _stop_of(choice, bool(self.calls))
        if self.texts:
            yield ContentBlockStop(0)
        for index, call in enumerate(self.calls, start=int(bool(self.texts))):
            yield ContentBlockStart(index, ToolUseOutput(self.call_of(choice, call).id, call.name, {}))
            yield ContentBlockDelta(index, InputJsonDelta(json.dumps(call.arguments, ensure_ascii=False)))
            yield ContentBlockStop(index)
        yield MessageDelta(stop, _usage_of(choice), self.placement_of([choice]))

    def _reply(self, choice: Choice, content: list[ContentOutput]) -> MessageReply:
        return MessageReply(id=self.reply_id, model=self.context.model_name, content=content, usage=_usage_of(choice))


def _usage_of(choice: Choice) -> TokenUsage:
    return TokenUsage(len(choice.request.prompt_ids), len(choice.token_ids))


def _stop_of(choice: Choice, has_called: bool) -> StopInfo:
    """Return how an answer ended. Raise Unavailable for one that was given up, which this API has no word for."""
    if is_cut(choice):
        return StopInfo("max_tokens")
    if has_called:
        return StopInfo("tool_use")
    if isinstance(choice.stop_reason, str):
        return StopInfo("stop_sequence", choice.stop_reason)
    return StopInfo("end_turn")


def error_of(failure: Failure) -> AnthropicError:
    kind = KINDS.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    message = failure.body.error.message.encode(errors="replace").decode()  # it may quote bytes that are no text
    return AnthropicError(AnthropicErrorDetail(kind, message))


def error_response(failure: Failure) -> web.Response:
    """Return the response that Anthropic's clients read: the same status and headers, and another body."""
    response = failure.response()
    response.body = msgspec.json.encode(error_of(failure))
    return response


def is_message_path(path: str) -> bool:
    return path.endswith((MESSAGES_PATH, COUNT_PATH))


async def respond(context: HttpContext, request: web.Request, body: ChatBody) -> web.StreamResponse:
    """Answer a single turn."""
    return await answer_single(context, request, body, new_id("msg"), MessageRenderer)


async def count_tokens(context: HttpContext, request: web.Request) -> web.Response:
    body = chat_of(COUNT_READER.read(await context.read(request)))
    return json_response(TokenCount(len(await prompt_ids_of(context, body))))
