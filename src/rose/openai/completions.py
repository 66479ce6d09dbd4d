"""`POST /v1/completions`: one or several prompts, as text or token ids."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from msgspec import UNSET, UnsetType

from rose.openai.generation import Choice, ChoiceDelta
from rose.openai.http_context import HttpContext
from rose.openai.prompts import choices_of, encode_prompts
from rose.openai.request_parsing import BodyReader
from rose.openai.request_schemas import IGNORED_COMPLETION, CompletionBody, logprobs_of
from rose.openai.response_rendering import (
    ARRIVAL,
    ResponseRenderer,
    answer,
    check_stream,
    completion_logprobs,
    new_id,
    prompt_logprobs,
    token_text,
    usage_of,
)
from rose.openai.response_schemas import Completion, CompletionChoice, CompletionLogprobs, PlacementInfo, Usage

READER = BodyReader(CompletionBody, IGNORED_COMPLETION)


class CompletionRenderer(ResponseRenderer[CompletionBody]):
    """Responses to one completion request."""

    def __init__(
        self, context: HttpContext, body: CompletionBody, reply_id: str, place: PlacementInfo | None = None
    ) -> None:
        super().__init__(context, body, reply_id, place)
        self._top = logprobs_of(body.logprobs)
        self._offsets: dict[int, int] = {}  # of each choice's text, for the next chunk

    def whole(self, choices: Sequence[Choice]) -> Completion:
        reply = self._reply(
            [self._choice(choice, choice, choice.deltas) for choice in choices], usage_of(choices, self.body.n or 1)
        )
        for choice, part in zip(choices, reply.choices, strict=True):
            part.prompt_logprobs = prompt_logprobs(choice, self.context.tokenizer)
        reply.rose = self.placement_of(choices)
        return reply

    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Sequence[Completion]:
        body = self.body
        if not delta.text and delta.finish_reason is None and self._top is None and not body.return_token_ids:
            return ()
        reply = self._reply([self._choice(choice, delta, [delta])], None if self.wants_usage else UNSET)
        if delta.finish_reason is not None:
            reply.rose = self.placement_of([choice])
        return (reply,)

    def usage_chunk(self, choices: Sequence[Choice]) -> Completion:
        return self._reply([], usage_of(choices, self.body.n or 1))

    def _reply(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        model = self.context.model_name
        return Completion(id=self.reply_id, created=self.created, model=model, choices=choices, usage=usage)

    def _choice(self, choice: Choice, output: Choice | ChoiceDelta, deltas: Sequence[ChoiceDelta]) -> CompletionChoice:
        """Return the output of a choice or of one delta of it."""
        part = CompletionChoice(
            index=choice.index,
            text=output.text,
            logprobs=self._logprobs(choice, deltas),
            finish_reason=output.finish_reason,
            stop_reason=choice.stop_reason,
        )
        part.weight_versions = self.versions_of(choice, output)
        if self.body.return_token_ids:
            part.token_ids = list(output.token_ids)
            if deltas and deltas[0] is choice.deltas[0]:
                part.prompt_token_ids = list(choice.request.prompt_ids)
        return part

    def _logprobs(self, choice: Choice, deltas: Sequence[ChoiceDelta]) -> CompletionLogprobs | None:
        if self._top is None:
            return None
        offset, tokenizer = self._offsets.get(choice.index, 0), self.context.tokenizer
        as_ids = bool(self.body.return_tokens_as_token_ids)
        logprobs = completion_logprobs(tokenizer, deltas, self._top, offset, as_ids=as_ids)
        if logprobs.tokens:
            last = token_text(tokenizer, deltas[-1].token_ids[-1])
            self._offsets[choice.index] = logprobs.text_offset[-1] + len(last)
        return logprobs


async def completions(context: HttpContext, request: web.Request) -> web.StreamResponse:
    return await respond(context, request, READER.read(await context.read(request)))


async def respond(context: HttpContext, request: web.Request, body: CompletionBody) -> web.StreamResponse:
    context.check_model(body.model)
    check_stream(body)
    prompts = await encode_prompts(context, body)
    reply_id = new_id("cmpl", body.request_id)
    choices = choices_of(context, body, prompts, reply_id=reply_id, arrival_s=request[ARRIVAL])
    return await answer(context, request, choices, CompletionRenderer(context, body, reply_id))
