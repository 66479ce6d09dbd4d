"""`POST /inference/v1/generate`: token ids in, token ids out, with the weight version of every token.

This is vLLM's route for trainers. `finish_reason` "abort" means evicted: what came is valid, and the turn can go on
elsewhere from it. The header X-Session-ID (the trajectory) is accepted; a single device has no use for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from rose.engines.base import Request
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
from rose.front.logprobs import generate_logprobs
from rose.front.neutral import NEUTRAL_GENERATE, NEUTRAL_GENERATE_SAMPLING
from rose.front.prompts import check_prompt, max_tokens_of, sampling_of, with_seed
from rose.front.replies import GenerateChoice, Generated, Placed, Usage, WeightVersion
from rose.front.requests import GenerateBody, GenerateSampling

DEFAULT_MAX_TOKENS = 16  # vLLM's

READER = BodyReader(GenerateBody, NEUTRAL_GENERATE)
SAMPLING_READER = BodyReader(GenerateSampling, NEUTRAL_GENERATE_SAMPLING, prefix="sampling_params.")


class GenerateForm:
    """Answers to one request of the token route. A chunk carries the version spans of its own tokens."""

    def __init__(
        self, front: Front, body: GenerateBody, logprobs: int | None, reply_id: str, place: Placed | None = None
    ) -> None:
        self._front = front
        self._body = body
        self._place = place
        self._logprobs = logprobs
        self._id = body.request_id or reply_id
        self._created = now_unix_s()

    def whole(self, choices: Sequence[Choice]) -> Generated:
        choice = choices[0]
        shown = self._choice(choice, choice.pieces, choice.finish_reason, versions_of(choice.spans))
        return self._reply([shown], choice, usage_of(choices))

    def opening(self, choices: Sequence[Choice]) -> Iterable[msgspec.Struct]:
        return ()

    def chunk(self, choice: Choice, piece: Piece) -> Generated:
        shown = self._choice(choice, [piece], piece.finish_reason, piece_versions(piece))
        return self._reply([shown], choice, UNSET)

    def closing(self, choices: Sequence[Choice]) -> Iterable[msgspec.Struct]:
        if wants_usage(self._body.stream_options):
            yield self._reply([], choices[0], usage_of(choices))

    def _reply(self, shown: list[GenerateChoice], choice: Choice, usage: Usage | UnsetType) -> Generated:
        version = choice.spans[-1].version if choice.spans else self._front.engine.facts.version
        is_last = any(one.finish_reason is not None for one in shown)
        return Generated(
            request_id=self._id,
            model=self._front.model_name,
            created=self._created,
            choices=shown,
            weight_version=version,
            usage=usage,
            rose=placed_of([choice], self._place) if is_last else UNSET,
        )

    def _choice(
        self, choice: Choice, pieces: Sequence[Piece], finish_reason: str | None, versions: list[WeightVersion]
    ) -> GenerateChoice:
        return GenerateChoice(
            index=choice.index,
            token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
            finish_reason=finish_reason,  # type: ignore[arg-type]
            logprobs=generate_logprobs(pieces, self._logprobs) if self._logprobs is not None else None,
            weight_versions=versions,
        )


async def generate(front: Front, request: web.Request) -> web.StreamResponse:
    return await respond(front, request, READER.read(await front.read(request)))


async def respond(front: Front, request: web.Request, body: GenerateBody) -> web.StreamResponse:
    wanted = SAMPLING_READER.read(body.sampling_params)
    front.check_model(body.model)
    check_stream(body.stream, body.stream_options)
    check_prompt(front, body.token_ids, "token_ids")
    max_tokens = max_tokens_of(front, len(body.token_ids), wanted.max_tokens, DEFAULT_MAX_TOKENS)
    top = wanted.logprobs or 0
    sampling = sampling_of(front, wanted, max_tokens=max_tokens, top_logprobs=top if top > 1 else 0)
    reply_id = new_id("generate")
    engine_request = Request(
        request_id=reply_id,
        prompt_ids=tuple(body.token_ids),
        sampling=with_seed(sampling, wanted.seed, 0),
        tenant=body.cache_salt or "",
        priority=front.priority_of(body.priority),
        arrival_s=request[ARRIVAL],
    )
    form = GenerateForm(front, body, wanted.logprobs, reply_id)
    return await answer(front, request, [Choice(0, engine_request, None)], form, stream=bool(body.stream))
