"""`POST /v1/responses`: OpenAI's Responses API as a translation of chat completions.

A request becomes a chat request, so that sessions, templates and tool calls work as they do there. No response is
kept: a client sends the whole conversation again. The text and the calls of one answer come back as items that follow
each other, and become one message of the assistant, so that the conversation continues from its stored tokens.

Tools of other types than `function` are left out of the prompt. Programs offer them with every request, and their
provider runs them: the model cannot call what it does not know of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from aiohttp import web

from rose.openai.conversation_answering import ConversationRenderer, answer_single, is_cut
from rose.openai.generation import Choice, ChoiceDelta
from rose.openai.http_context import HttpContext
from rose.openai.http_errors import Failure, bad_request
from rose.openai.request_parsing import BodyReader
from rose.openai.request_schemas import CalledFunction, CalledTool, ChatBody, ChatMessage, Function, TextPart, Tool
from rose.openai.response_rendering import new_id
from rose.openai.response_writing import NamedEvents
from rose.openai.responses_api_schemas import (
    IGNORED_RESPONSES,
    ArgumentsDelta,
    ArgumentsDone,
    Content,
    ContentPartAdded,
    ContentPartDone,
    ErrorEvent,
    IncompleteDetails,
    InputItem,
    InputTokensDetails,
    ItemStatus,
    OfferedTool,
    OutputCall,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    OutputTokensDetails,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseObject,
    ResponsesBody,
    ResponseUsage,
    StreamedEvent,
)
from rose.openai.tools import ParsedCall

RESPONSES_PATH = "/v1/responses"
READER = BodyReader(ResponsesBody, IGNORED_RESPONSES)
TEXT_PARTS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"


def chat_of(body: ResponsesBody) -> ChatBody:
    """Return the chat request that means the same. Raise Failure for what chat does not have."""
    _check(body)
    messages = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        messages.append(ChatMessage(role="user", content=body.input))
    else:
        messages += _messages_of(body.input)
    tools = [_tool(tool, number) for number, tool in enumerate(body.tools or ()) if tool.type == "function"]
    choice = body.tool_choice
    return ChatBody(
        messages=messages,
        tools=tools or None,
        tool_choice="required" if isinstance(choice, dict) else choice,
        max_tokens=body.max_output_tokens,
        **{name: getattr(body, name) for name in SHARED},
    )


SHARED = (
    "model", "stream", "temperature", "top_p", "trajectory", "weight_version", "min_weight_version", "seed",
    "ignore_eos", "cache_salt", "priority",
)  # fmt: skip
"""The fields that have the same name and meaning in a chat request."""


def _check(body: ResponsesBody) -> None:
    if body.previous_response_id is not None:
        what = "`previous_response_id`: responses are not kept; send the whole conversation as `input`"
        raise bad_request(what, param="previous_response_id", code="unsupported_parameter")
    form = (body.text or {}).get("format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        what = '`text.format` may be {"type": "text"}: the output of the model is not forced into a form'
        raise bad_request(what, param="text.format", code="unsupported_parameter")
    if LOGPROBS in (body.include or ()):
        what = f"`include` has `{LOGPROBS}`: this route has no log-probabilities; /v1/chat/completions has them"
        raise bad_request(what, param="include", code="unsupported_parameter")


def _messages_of(items: Sequence[InputItem]) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    for number, item in enumerate(items):
        where = f"input[{number}]"
        match item.type:
            case "message":
                messages.append(_message(item, where))
            case "function_call":
                if not messages or messages[-1].role != "assistant":
                    messages.append(ChatMessage(role="assistant", content=""))
                calls = messages[-1].tool_calls = messages[-1].tool_calls or []
                calls.append(_call(item, where))
            case "function_call_output":
                content = _parts(item.output, f"{where}.output")
                messages.append(ChatMessage(role="tool", content=content, tool_call_id=item.call_id))
            case "reasoning":
                pass  # of another model: chat templates leave it out of earlier turns
            case other:
                what = f"`{where}` has the type `{other[:80]}`; send messages, function calls and their outputs"
                raise bad_request(what, param=f"{where}.type", code="unsupported_parameter")
    if not messages:
        raise bad_request("`input` has no message", param="input")
    return messages


def _message(item: InputItem, where: str) -> ChatMessage:
    if item.role is None:
        raise _missing(f"{where}.role")
    content = _parts(item.content, f"{where}.content")
    if item.role == "assistant" and not isinstance(content, str):
        content = "".join(part.text for part in content)  # as the model generated it
    return ChatMessage(role=item.role, content=content)


def _call(item: InputItem, where: str) -> CalledTool:
    if item.name is None:
        raise _missing(f"{where}.name")
    return CalledTool(CalledFunction(item.name, item.arguments or ""), id=item.call_id)


def _parts(content: Content | None, where: str) -> str | list[TextPart]:
    if content is None:
        raise _missing(where)
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*TEXT_PARTS, "refusal") or text is None:
            what = f"`{where}[{number}]` is a part of the type `{part.type[:80]}`: the model reads text only"
            raise bad_request(what, param=f"{where}[{number}]")
        texts.append(TextPart("text", text))
    return texts


def _tool(tool: OfferedTool, number: int) -> Tool:
    if tool.name is None:
        raise _missing(f"tools[{number}].name")
    return Tool(Function(tool.name, tool.description, tool.parameters))


def _missing(where: str) -> Failure:
    return bad_request(f"`{where}` is missing", param=where)


class ItemEvents(NamedEvents):
    """A stream whose events are numbered."""

    def __init__(self, request: web.Request) -> None:
        super().__init__(request)
        self._sent = 0
        self._response: ResponseObject | None = None

    async def send(self, chunks: Iterable[msgspec.Struct]) -> None:
        chunks = list(chunks)
        for number, chunk in enumerate(chunks, start=self._sent):
            assert isinstance(chunk, StreamedEvent)
            chunk.sequence_number = number
            if isinstance(chunk, ResponseCreated):
                self._response = chunk.response
        self._sent += len(chunks)
        await super().send(chunks)

    def errors(self, failure: Failure) -> Iterator[StreamedEvent]:
        """Yield the error for clients that raise it, and the failed response for those that wait for an end."""
        error = failure.body.error
        yield ErrorEvent(code=error.code, message=error.message, param=error.param, error=error)
        if self._response is not None:
            failed = ResponseError(error.code or "server_error", error.message)
            yield ResponseFailed(response=msgspec.structs.replace(self._response, status="failed", error=failed))


class ItemRenderer(ConversationRenderer):
    """Responses to one request: the text is one message, its calls follow."""

    EVENTS, HAS_LAST_EVENT = ItemEvents, True

    def whole(self, choices: Sequence[Choice]) -> ResponseObject:
        [choice] = choices
        parsed = self.parsed(choice)
        return self._ended(choice, parsed.text, parsed.calls)

    def opening(self, choices: Sequence[Choice]) -> Iterator[StreamedEvent]:
        yield ResponseCreated(response=self._response())
        yield ResponseInProgress(response=self._response())

    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Iterator[StreamedEvent]:
        """Yield text as it comes. Calls come when the answer has ended, so that its text is one message."""
        had_text = bool(self.texts)
        parsed = self.added(choice, delta)
        if self.texts and not had_text:
            yield from self._begin_message()
        if parsed.text:
            yield OutputTextDelta(output_index=0, item_id=self._message_id, delta=parsed.text)
        if delta.finish_reason is not None:
            response = self._ended(choice, "".join(self.texts), self.calls)
            if not self.texts and not self.calls:
                yield from self._begin_message()
            for index, item in enumerate(response.output):
                yield from _end_of(index, item)

    def usage_chunk(self, choices: Sequence[Choice]) -> StreamedEvent:
        [choice] = choices
        response = self._ended(choice, "".join(self.texts), self.calls)
        if response.status == "incomplete":
            return ResponseIncomplete(response=response)
        return ResponseCompleted(response=response)

    @property
    def _message_id(self) -> str:
        return f"msg_{self.reply_id}"

    def _begin_message(self) -> Iterator[StreamedEvent]:
        yield OutputItemAdded(output_index=0, item=OutputMessage(self._message_id, "in_progress"))
        yield ContentPartAdded(output_index=0, item_id=self._message_id, part=OutputText(""))

    def _response(self) -> ResponseObject:
        return ResponseObject(
            id=self.reply_id,
            created_at=self.created,
            status="in_progress",
            model=self.context.model_name,
            max_output_tokens=self.body.max_tokens,
            temperature=self.body.temperature,
            top_p=self.body.top_p,
            tool_choice="none" if self.body.tool_choice == "none" else "auto",
        )

    def _ended(self, choice: Choice, text: str, calls: Sequence[ParsedCall]) -> ResponseObject:
        """Return the response of an answer that has ended. An empty answer is an empty message."""
        status: ItemStatus = "incomplete" if is_cut(choice) else "completed"
        output: list[OutputItem] = []
        if text or not calls:
            output.append(OutputMessage(self._message_id, status, [OutputText(text)]))
        for call in calls:
            whole = self.call_of(choice, call)
            item_id = whole.id.replace("call_", "fc_", 1)
            output.append(OutputCall(item_id, whole.id, call.name, whole.function.arguments, "completed"))
        response = self._response()
        response.status, response.output, response.usage = status, output, _usage_of(choice)
        response.incomplete_details = IncompleteDetails() if status == "incomplete" else None
        response.rose = self.placement_of([choice])
        return response


def _end_of(index: int, item: OutputItem) -> Iterator[StreamedEvent]:
    """Yield the last events of a message, or all events of a call."""
    if isinstance(item, OutputMessage):
        [part] = item.content
        yield OutputTextDone(output_index=index, item_id=item.id, text=part.text)
        yield ContentPartDone(output_index=index, item_id=item.id, part=part)
    else:
        begun = msgspec.structs.replace(item, arguments="", status="in_progress")
        yield OutputItemAdded(output_index=index, item=begun)
        yield ArgumentsDelta(output_index=index, item_id=item.id, delta=item.arguments)
        yield ArgumentsDone(output_index=index, item_id=item.id, name=item.name, arguments=item.arguments)
    yield OutputItemDone(output_index=index, item=item)


def _usage_of(choice: Choice) -> ResponseUsage:
    prompt, sampled = len(choice.request.prompt_ids), len(choice.token_ids)
    cached = InputTokensDetails(choice.cached_tokens)
    return ResponseUsage(prompt, cached, sampled, OutputTokensDetails(), prompt + sampled)


def read(data: bytes) -> ChatBody:
    """Return the chat request that a body means. Raise Failure."""
    return chat_of(READER.read(data))


async def responses(context: HttpContext, request: web.Request) -> web.StreamResponse:
    return await respond(context, request, read(await context.read(request)))


async def respond(context: HttpContext, request: web.Request, body: ChatBody) -> web.StreamResponse:
    """Answer a single turn."""
    return await answer_single(context, request, body, new_id("resp"), ItemRenderer)
