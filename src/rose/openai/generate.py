"""`POST /inference/v1/generate`: token ids in, token ids out, with the weight version of every token.

This is vLLM's route for trainers. `finish_reason` "abort" means evicted: the output so far is valid, and the turn can
be continued elsewhere from it. The header X-Session-ID (the trajectory) is accepted; a single device has no use for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from msgspec import UNSET, UnsetType

from rose.api.requests import Sampling
from rose.openai.generation import Choice, ChoiceDelta
from rose.openai.http_context import HttpContext
from rose.openai.prompts import request_of, sampling_of, with_versions
from rose.openai.request_parsing import BodyReader
from rose.openai.request_schemas import (
    IGNORED_GENERATE,
    IGNORED_GENERATE_SAMPLING,
    GenerateBody,
    GenerateSampling,
    logprobs_of,
)
from rose.openai.response_rendering import (
    ARRIVAL,
    ResponseRenderer,
    answer,
    check_stream,
    generate_logprobs,
    new_id,
    prompt_logprobs,
    usage_of,
)
from rose.openai.response_schemas import GenerateChoice, Generated, PlacementInfo, Usage

READER = BodyReader(GenerateBody, IGNORED_GENERATE)
SAMPLING_READER = BodyReader(GenerateSampling, IGNORED_GENERATE_SAMPLING, prefix="sampling_params.")


class GenerateRenderer(ResponseRenderer[GenerateBody]):
    """Responses to one request of the token route. A chunk carries the version spans of its own tokens."""

    def __init__(
        self,
        context: HttpContext,
        body: GenerateBody,
        logprobs: int | None,
        reply_id: str,
        place: PlacementInfo | None = None,
    ) -> None:
        super().__init__(context, body, body.request_id or reply_id, place)
        self._logprobs = logprobs

    def whole(self, choices: Sequence[Choice]) -> Generated:
        choice = choices[0]
        reply = self._reply([self._choice(choice, choice, choice.deltas)], choice, usage_of(choices))
        reply.prompt_logprobs = prompt_logprobs(choice)
        return reply

    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Sequence[Generated]:
        return (self._reply([self._choice(choice, delta, [delta])], choice, UNSET),)

    def usage_chunk(self, choices: Sequence[Choice]) -> Generated:
        return self._reply([], choices[0], usage_of(choices))

    def _reply(self, parts: list[GenerateChoice], choice: Choice, usage: Usage | UnsetType) -> Generated:
        version = choice.spans[-1].version if choice.spans else self.context.engine.facts.version
        is_last = any(part.finish_reason is not None for part in parts)
        return Generated(
            request_id=self.reply_id,
            model=self.context.model_name,
            created=self.created,
            choices=parts,
            weight_version=version,
            usage=usage,
            rose=self.placement_of([choice]) if is_last else UNSET,
        )

    def _choice(self, choice: Choice, output: Choice | ChoiceDelta, deltas: Sequence[ChoiceDelta]) -> GenerateChoice:
        return GenerateChoice(
            index=choice.index,
            token_ids=list(output.token_ids),
            finish_reason=output.finish_reason,
            logprobs=generate_logprobs(deltas, self._logprobs) if self._logprobs is not None else None,
            weight_versions=output.spans,
        )


def checked_sampling(context: HttpContext, body: GenerateBody) -> tuple[GenerateSampling, Sampling]:
    """Return `sampling_params` as sent and as the engine gets them. Raise Failure for a body that is refused."""
    wanted = SAMPLING_READER.read(body.sampling_params)
    context.check_model(body.model)
    check_stream(body)
    context.check_prompt(body.token_ids, "token_ids")
    return wanted, with_versions(context, body, sampling_of(context, wanted, len(body.token_ids)))


async def generate(context: HttpContext, request: web.Request) -> web.StreamResponse:
    return await respond(context, request, READER.read(await context.read(request)))


async def respond(context: HttpContext, request: web.Request, body: GenerateBody) -> web.StreamResponse:
    wanted, sampling = checked_sampling(context, body)
    reply_id, arrival_s = new_id("generate"), request[ARRIVAL]
    engine_request = request_of(
        context, body, body.token_ids, sampling, wanted.seed, request_id=reply_id, arrival_s=arrival_s
    )
    form = GenerateRenderer(context, body, logprobs_of(wanted.logprobs), reply_id)
    return await answer(context, request, [Choice(0, engine_request, None)], form)
