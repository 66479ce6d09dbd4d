"""What every API for conversations shares: the checks of a chat request, its tool calls, and its answer.

Chat completions, Anthropic's messages and OpenAI's Responses differ in how a request is written and in how an answer
is shown. Each of them translates its request to a `ChatBody`, and shows the answer by a `ConversationRenderer`.
"""

from __future__ import annotations

from aiohttp import web

from rose.errors import Unavailable
from rose.openai.generation import Choice, ChoiceDelta
from rose.openai.http_context import HttpContext
from rose.openai.http_errors import bad_request
from rose.openai.prompts import choices_of
from rose.openai.request_schemas import ChatBody
from rose.openai.response_rendering import ARRIVAL, ResponseRenderer, answer, check_stream
from rose.openai.response_schemas import PlacementInfo, ToolCall
from rose.openai.tools import CallFinder, ParsedCall, ParsedText, are_parsed, check_tools, parse_text, tool_call_of


class ConversationRenderer(ResponseRenderer[ChatBody]):
    """Responses to one chat request. Tool calls get their ids from `calls_key`, the same for the same answer."""

    def __init__(
        self,
        context: HttpContext,
        body: ChatBody,
        reply_id: str,
        place: PlacementInfo | None = None,
        *,
        calls_key: str = "",
    ) -> None:
        super().__init__(context, body, reply_id, place)
        self._calls_key = calls_key or reply_id
        self.texts: list[str] = []  # of a stream: all pieces of text so far, of every choice
        self.calls: list[ParsedCall] = []  # the same of calls
        self._finders: dict[int, CallFinder] = {}
        self._is_parsed = are_parsed(body, context.settings.tool_parser)

    def parsed(self, choice: Choice) -> ParsedText:
        """Return the text and the calls of an answer that has ended."""
        return parse_text(choice.text) if self._is_parsed else ParsedText(choice.text)

    def added(self, choice: Choice, delta: ChoiceDelta) -> ParsedText:
        """Return what a delta adds to the text and to the calls."""
        parsed = ParsedText(delta.text)
        if self._is_parsed:
            finder = self._finders.setdefault(choice.index, CallFinder())
            parsed = finder.push(delta.text)
            if delta.finish_reason is not None:
                parsed += finder.finish()
        if parsed.text:
            self.texts.append(parsed.text)
        self.calls += parsed.calls
        return parsed

    def has_called(self, choice: Choice) -> bool:
        """Return whether a stream has shown a call of this choice."""
        finder = self._finders.get(choice.index)
        return finder is not None and finder.has_called

    def call_of(self, choice: Choice, call: ParsedCall) -> ToolCall:
        return tool_call_of(call, f"{self._calls_key}/{choice.index}")


def is_cut(choice: Choice) -> bool:
    """Return whether an answer ended at its greatest length. Raise Unavailable for one that was given up."""
    if choice.finish_reason not in ("stop", "length"):
        raise Unavailable("the turn was given up before its end", hint="send the request again")
    return choice.finish_reason == "length"


def check_chat(context: HttpContext, body: ChatBody) -> None:
    """Raise Failure for what the types do not exclude."""
    context.check_model(body.model)
    check_stream(body)
    check_tools(body)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")


async def prompt_ids_of(context: HttpContext, body: ChatBody) -> list[int]:
    """Return the prompt of a chat request as the model's own template renders it. Raise Failure, ContextTooLong."""
    check_chat(context, body)
    return await context.encode(await context.render(body), add_special_tokens=False)


async def answer_single(
    context: HttpContext, request: web.Request, body: ChatBody, reply_id: str, renderer: type[ConversationRenderer]
) -> web.StreamResponse:
    """Answer a chat request that belongs to no session, in the form of one API."""
    prompt = await prompt_ids_of(context, body)
    context.check_prompt(prompt, "messages")
    choices = choices_of(context, body, [prompt], reply_id=reply_id, arrival_s=request[ARRIVAL])
    return await answer(context, request, choices, renderer(context, body, reply_id))
