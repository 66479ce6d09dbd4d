"""`POST /v1/completions`: one or several prompts, as text or token ids."""

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
from rose.front.generation import Choice, Piece
from rose.front.logprobs import completion_logprobs
from rose.front.neutral import NEUTRAL_COMPLETION
from rose.front.prompts import choices_of, encode_prompts
from rose.front.replies import Completion, CompletionChoice, CompletionLogprobs, Placed, Usage, WeightVersion
from rose.front.requests import CompletionBody

DEFAULT_MAX_TOKENS = 16  # OpenAI's

READER = BodyReader(CompletionBody, NEUTRAL_COMPLETION)


class CompletionForm:
    """Answers to one completion request."""

    def __init__(self, front: Front, body: CompletionBody, reply_id: str, place: Placed | None = None) -> None:
        self._front = front
        self._body = body
        self._place = place
        self._id = reply_id
        self._created = now_unix_s()
        self._offsets: dict[int, int] = {}

    def whole(self, choices: Sequence[Choice]) -> Completion:
        shown = [
            self._choice(choice, choice.pieces, choice.text, choice.finish_reason, versions_of(choice.spans))
            for choice in choices
        ]
        reply = self._reply(shown, usage_of(choices, self._body.n or 1))
        reply.rose = placed_of(choices, self._place)
        return reply

    def opening(self, choices: Sequence[Choice]) -> Iterable[msgspec.Struct]:
        return ()

    def chunk(self, choice: Choice, piece: Piece) -> Completion | None:
        body = self._body
        if not piece.text and piece.finish_reason is None and body.logprobs is None and not body.return_token_ids:
            return None
        shown = self._choice(choice, [piece], piece.text, piece.finish_reason, piece_versions(piece))
        reply = self._reply([shown], None if wants_usage(body.stream_options) else UNSET)
        if piece.finish_reason is not None:
            reply.rose = placed_of([choice], self._place)
        return reply

    def closing(self, choices: Sequence[Choice]) -> Iterable[msgspec.Struct]:
        if wants_usage(self._body.stream_options):
            yield self._reply([], usage_of(choices, self._body.n or 1))

    def _reply(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(
            id=self._id, created=self._created, model=self._front.model_name, choices=choices, usage=usage
        )

    def _choice(
        self,
        choice: Choice,
        pieces: Sequence[Piece],
        text: str,
        finish_reason: str | None,
        versions: list[WeightVersion],
    ) -> CompletionChoice:
        shown = CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=self._logprobs(choice, pieces),
            finish_reason=finish_reason,  # type: ignore[arg-type]
            stop_reason=choice.stop_reason,
        )
        if self._body.return_token_ids:
            shown.token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
            shown.weight_versions = versions
            if pieces and pieces[0] is choice.pieces[0]:
                shown.prompt_token_ids = list(choice.request.prompt_ids)
        return shown

    def _logprobs(self, choice: Choice, pieces: Sequence[Piece]) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        offset = self._offsets.get(choice.index, 0)
        found = completion_logprobs(self._front.tokenizer, pieces, self._body.logprobs, offset)
        self._offsets[choice.index] = offset + sum(map(len, found.tokens))
        return found


async def completions(front: Front, request: web.Request) -> web.StreamResponse:
    return await respond(front, request, READER.read(await front.read(request)))


async def respond(front: Front, request: web.Request, body: CompletionBody) -> web.StreamResponse:
    front.check_model(body.model)
    check_stream(body.stream, body.stream_options)
    reply_id = new_id("cmpl", body.request_id)
    choices = choices_of(
        front,
        body,
        await encode_prompts(front, body),
        reply_id=reply_id,
        arrival_s=request[ARRIVAL],
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        top_logprobs=body.logprobs or 0,
    )
    return await answer(front, request, choices, CompletionForm(front, body, reply_id), stream=bool(body.stream))
