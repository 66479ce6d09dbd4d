"""`POST /v1/chat/completions`: a conversation, rendered by the model's own template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from rose.front.answering import (
    ARRIVAL,
    answer,
    check_stream,
    new_id,
    now_unix_s,
    piece_versions,
    placed_of,
    usage_of,
    versions_of,
    wants_usage,
)
from rose.front.bodies import BodyReader
from rose.front.context import Front
from rose.front.failures import bad_request
from rose.front.generation import Choice, Piece
from rose.front.logprobs import chat_logprobs
from rose.front.neutral import NEUTRAL_CHAT
from rose.front.prompts import check_prompt, choices_of
from rose.front.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    Placed,
    Usage,
)
from rose.front.requests import ChatBody
from rose.front.tools import CallFinder, Said, are_parsed, check_tools, said_in, shown, shown_in_stream

READER = BodyReader(ChatBody, NEUTRAL_CHAT)


class ChatForm:
    """Answers to one chat request. Calls of tools get their ids from `calls_key`, the same for the same answer."""

    def __init__(
        self, front: Front, body: ChatBody, reply_id: str, *, calls_key: str = "", place: Placed | None = None
    ) -> None:
        self._front = front
        self._body = body
        self._id = reply_id
        self._place = place
        self._created = now_unix_s()
        self._calls_key = calls_key or reply_id
        self._finders: dict[int, CallFinder] = {}
        self._is_parsed = are_parsed(body, front.settings.tool_parser)

    def whole(self, choices: Sequence[Choice]) -> ChatCompletion:
        reply = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._front.model_name,
            choices=[self._whole_choice(choice) for choice in choices],
            usage=usage_of(choices, len(choices)),
            rose=placed_of(choices, self._place),
        )
        if self._body.return_token_ids:
            reply.prompt_token_ids = list(choices[0].request.prompt_ids)
        return reply

    def opening(self, choices: Sequence[Choice]) -> Iterable[msgspec.Struct]:
        for choice in choices:
            chunk = self._chunk([ChatChunkChoice(index=choice.index, delta=Delta("assistant", ""))])
            if self._body.return_token_ids:
                chunk.prompt_token_ids = list(choice.request.prompt_ids)
            yield chunk

    def chunk(self, choice: Choice, piece: Piece) -> ChatChunk | None:
        body = self._body
        delta, finish_reason = self._delta(choice, piece)
        is_empty = not delta.content and not delta.tool_calls and finish_reason is None
        if is_empty and not body.logprobs and not body.return_token_ids:
            return None
        shown = ChatChunkChoice(
            index=choice.index,
            delta=delta,
            logprobs=self._logprobs([piece]),
            finish_reason=finish_reason,  # type: ignore[arg-type]
        )
        if body.return_token_ids:
            shown.token_ids = list(piece.token_ids)
            shown.weight_versions = piece_versions(piece)
        chunk = self._chunk([shown])
        if finish_reason is not None:
            shown.stop_reason = choice.stop_reason
            chunk.rose = placed_of([choice], self._place)
        return chunk

    def closing(self, choices: Sequence[Choice]) -> Iterable[msgspec.Struct]:
        if wants_usage(self._body.stream_options):
            yield self._chunk([], usage_of(choices, len(choices)))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        shown: Usage | UnsetType | None = usage if wants_usage(self._body.stream_options) else UNSET
        return ChatChunk(id=self._id, created=self._created, model=self._front.model_name, choices=choices, usage=shown)

    def _delta(self, choice: Choice, piece: Piece) -> tuple[Delta, str | None]:
        """What a piece adds, and how the choice ended if it did."""
        if not self._is_parsed:
            return Delta(content=piece.text or None), piece.finish_reason
        finder = self._finders.setdefault(choice.index, CallFinder())
        said = finder.push(piece.text)
        if piece.finish_reason is not None:
            said += finder.finish()
        calls = [shown_in_stream(call, self._key(choice)) for call in said.calls]
        ended = _ended(piece.finish_reason, finder.has_called)
        return Delta(content=said.text or None, tool_calls=calls or None), ended

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        said = said_in(choice.text) if self._is_parsed else Said(choice.text)
        shown_choice = ChatChoice(
            index=choice.index,
            message=AssistantMessage(content=said.text or None if said.calls else said.text),
            logprobs=self._logprobs(choice.pieces),
            finish_reason=_ended(choice.finish_reason, bool(said.calls)),  # type: ignore[arg-type]
            stop_reason=choice.stop_reason,
        )
        if said.calls:
            shown_choice.message.tool_calls = [shown(call, self._key(choice)) for call in said.calls]
        if self._body.return_token_ids:
            shown_choice.token_ids = choice.token_ids
            shown_choice.weight_versions = versions_of(choice.spans)
        return shown_choice

    def _key(self, choice: Choice) -> str:
        return f"{self._calls_key}/{choice.index}"

    def _logprobs(self, pieces: Sequence[Piece]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._front.tokenizer, pieces, self._body.top_logprobs or 0)


def _ended(finish_reason: str | None, has_called: bool) -> str | None:
    return "tool_calls" if finish_reason == "stop" and has_called else finish_reason


def check_chat(front: Front, body: ChatBody) -> None:
    """What its types do not say."""
    front.check_model(body.model)
    check_stream(body.stream, body.stream_options)
    check_tools(body)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")


async def chat_completions(front: Front, request: web.Request) -> web.StreamResponse:
    return await respond(front, request, READER.read(await front.read(request)))


async def respond(front: Front, request: web.Request, body: ChatBody) -> web.StreamResponse:
    check_chat(front, body)
    text = await front.render_apart(body)
    prompt = await front.encode(text, add_special_tokens=False)
    check_prompt(front, prompt, "messages")
    reply_id = new_id("chatcmpl", body.request_id)
    choices = choices_of(
        front,
        body,
        [prompt],
        reply_id=reply_id,
        arrival_s=request[ARRIVAL],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        default_max_tokens=None,
        top_logprobs=body.top_logprobs or 0,
    )
    return await answer(front, request, choices, ChatForm(front, body, reply_id), stream=bool(body.stream))
