"""How a response is made, the same for every route that generates: whole, or as a stream of events.

A route gives its `ResponseRenderer`: the shape of the whole response and of a chunk. A stream starts with its first
delta, so that a request that is refused still gets a status of its own; after that an error is an event. Long lists of
log-probabilities are encoded in batches as they are made: in one go, encoding would hold Python's lock for too long,
and so would the garbage collector with millions of objects.
"""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, ClassVar, Generic, TypeVar, cast

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from rose.api.requests import VersionSpan
from rose.errors import RoseError
from rose.models.tokenizer import Tokenizer
from rose.openai.generation import Alternatives, Choice, ChoiceDelta, Generation, TokenSource
from rose.openai.http_context import HttpContext
from rose.openai.http_errors import bad_request, failure_of
from rose.openai.loops import offload_surely
from rose.openai.request_schemas import GenerateBody, GeneratingBody
from rose.openai.response_schemas import (
    ChatLogprobs,
    CompletionLogprobs,
    GenerateLogprob,
    GenerateLogprobs,
    GenerateTopLogprob,
    PlacementInfo,
    PromptLogprobs,
    PromptTokenLogprob,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from rose.openai.response_writing import (
    EncodedList,
    EventStream,
    ReaderGone,
    encode_parts,
    json_response,
    send_parts,
)

ARRIVAL = web.RequestKey("arrival_s", float)
INLINE_ENTRIES = 8192  # rendered in some 10 ms; more is done in a thread
BATCH = 32  # tokens, of up to 21 entries each, that are encoded at once
BATCH_WITHOUT_TOP = 512  # tokens of one entry each: no more work than a batch of the others
LOGPROB_MIN = -9999.0  # JSON has no infinity; OpenAI and vLLM write this for "never"

Body = TypeVar("Body", bound=GeneratingBody)
Item = TypeVar("Item")
_encoder = msgspec.json.Encoder()


class ResponseRenderer(ABC, Generic[Body]):
    """The shape of one route's responses to one request. `place` is what a gateway adds about a turn."""

    EVENTS: ClassVar[type[EventStream]] = EventStream
    HAS_LAST_EVENT: ClassVar[bool] = False  # whether a stream ends with `usage_chunk` whether it was asked for or not

    def __init__(self, context: HttpContext, body: Body, reply_id: str, place: PlacementInfo | None = None) -> None:
        self.context, self.body, self.reply_id = context, body, reply_id
        self.created = int(time.time())
        self._place = place
        options = body.stream_options
        self.wants_usage = self.HAS_LAST_EVENT or (options is not None and bool(options.include_usage))

    @abstractmethod
    def whole(self, choices: Sequence[Choice]) -> msgspec.Struct:
        """Return the response when all choices have ended."""

    def opening(self, choices: Sequence[Choice]) -> Iterable[msgspec.Struct]:
        """Return the chunks before the first delta."""
        return ()

    @abstractmethod
    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Iterable[msgspec.Struct]:
        """Return the chunks for a delta; none if there is nothing to show yet."""

    @abstractmethod
    def usage_chunk(self, choices: Sequence[Choice]) -> msgspec.Struct:
        """Return the last chunk of a stream whose client asked for the usage."""

    def versions_of(self, choice: Choice, output: Choice | ChoiceDelta) -> list[VersionSpan] | UnsetType:
        """Return the version spans of an output, if the client asked for them.

        With `return_weight_versions` the last chunk of a choice has all its spans, as in vLLM. With `return_token_ids`
        alone each chunk has those of its own tokens.
        """
        assert not isinstance(self.body, GenerateBody)
        if self.body.return_weight_versions:
            return choice.spans if output.finish_reason is not None else UNSET
        return output.spans if self.body.return_token_ids else UNSET

    def placement_of(self, choices: Sequence[Choice]) -> PlacementInfo | UnsetType:
        """Return where choices ran. A device leaves it out: it is the only place."""
        workers = list(dict.fromkeys(worker for choice in choices for worker in choice.workers))
        if self._place is None:
            return PlacementInfo(workers) if workers else UNSET
        return msgspec.structs.replace(self._place, workers=workers)


async def answer(
    context: HttpContext,
    request: web.Request,
    choices: Sequence[Choice],
    form: ResponseRenderer[Any],
    source: TokenSource | None = None,
) -> web.StreamResponse:
    """Run the choices, by the context's engine unless another source is given, and send their output."""
    with Generation(source or context.engine, context.metrics, choices) as generation:
        if form.body.stream:
            return await _stream(request, generation, form)
        await generation.finish()
    for choice in choices:
        check_prompt_logprobs(choice)
    # Tokens and alternatives that the response may list.
    if sum(_entries(choice) for choice in choices) <= INLINE_ENTRIES:
        return json_response(form.whole(choices))
    return await send_parts(request, await offload_surely(lambda: encode_parts(form.whole(choices))))


def check_prompt_logprobs(choice: Choice) -> None:
    """Raise Failure if the engine did not compute the log-probabilities of the prompt that were asked for."""
    wanted = choice.request.sampling.prompt_logprobs is not None and choice.finish_reason != "abort"
    if wanted and len(choice.prompt_logprobs) != len(choice.request.prompt_ids) - 1:
        message = "this engine does not compute `prompt_logprobs`; leave it out"
        raise bad_request(message, param="prompt_logprobs", code="unsupported_parameter")


def _entries(choice: Choice) -> int:
    sampling = choice.request.sampling
    listed = len(choice.token_ids) * (1 + sampling.top_logprobs)
    return listed + len(choice.prompt_logprobs) * (1 + (sampling.prompt_logprobs or 0))


async def _stream(request: web.Request, generation: Generation, form: ResponseRenderer[Any]) -> web.StreamResponse:
    deltas = await generation.next()
    stream = form.EVENTS(request)
    # Without a reader there is no response; leaving the generation cancels the rest of it.
    with contextlib.suppress(ReaderGone):
        await stream.open()
        try:
            chunks = list(form.opening(generation.choices))
            while deltas:
                chunks += [chunk for choice, delta in deltas for chunk in form.chunks(choice, delta)]
                await stream.send(chunks)
                chunks, deltas = [], await generation.next()
            if form.wants_usage:
                await stream.send([form.usage_chunk(generation.choices)])
        except RoseError as error:
            await stream.fail(failure_of(error))
        await stream.close()
    return stream.response


def new_id(prefix: str, wanted: str | None = None) -> str:
    """Return an id by which the engine knows a request, unique even when clients send the same `wanted`."""
    return f"{prefix}-{wanted}-{uuid.uuid4().hex[:8]}" if wanted else f"{prefix}-{uuid.uuid4().hex}"


def check_stream(body: GeneratingBody) -> None:
    """Raise Failure for stream options without a stream, or that are not implemented."""
    if body.stream_options is None:
        return
    if not body.stream:
        raise bad_request("`stream_options` needs `stream` to be true", param="stream_options")
    for name in ("continuous_usage_stats", "include_obfuscation"):
        if getattr(body.stream_options, name):
            param = f"stream_options.{name}"
            raise bad_request(f"`{param}` is not implemented", param=param, code="unsupported_parameter")


def usage_of(choices: Sequence[Choice], prompt_choices: int = 1) -> Usage:
    """Return the token counts. Prompts count once however many choices they have; so do their cached tokens."""
    firsts = choices[::prompt_choices]
    prompt = sum(len(choice.request.prompt_ids) for choice in firsts)
    completion = sum(len(choice.token_ids) for choice in choices)
    cached = PromptTokensDetails(sum(choice.cached_tokens for choice in firsts))
    return Usage(prompt, completion, prompt + completion, cached)


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOGPROB_MIN


def in_batches(items: Iterable[Item]) -> list[Item]:
    """Return the items as a list for an encoder; if they are many, encode each batch as it comes."""
    remaining = iter(items)
    batch, encoded = list(islice(remaining, BATCH)), list[bytes]()
    while more := list(islice(remaining, BATCH)):
        encoded.append(_encoder.encode(batch)[1:-1])
        batch = more
    if not encoded:
        return batch
    encoded.append(_encoder.encode(batch)[1:-1])
    return cast(list[Item], EncodedList(encoded))


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of one token; a part of a character is shown as the replacement character."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def token_name(tokenizer: Tokenizer, token_id: int, as_id: bool) -> str:
    """Return the text of one token, or `token_id:N` if the client asked for that: two tokens may have one text."""
    return f"token_id:{token_id}" if as_id else token_text(tokenizer, token_id)


def completion_logprobs(
    tokenizer: Tokenizer, deltas: Iterable[ChoiceDelta], top: int, offset: int = 0, *, as_ids: bool = False
) -> CompletionLogprobs:
    """Return them with text offsets from `offset` on; with `top` 0 only the sampled tokens are listed."""
    logprobs = CompletionLogprobs([], [], None, [])

    def best_of_each() -> Iterator[dict[str, float]]:
        place = offset
        for token_id, logprob, alternatives in _tokens(deltas):
            logprobs.tokens.append(token_name(tokenizer, token_id, as_ids))
            logprobs.token_logprobs.append(finite(logprob))
            logprobs.text_offset.append(place)
            place += len(token_text(tokenizer, token_id))
            best: dict[str, float] = {}
            for other, value in (*alternatives[:top], (token_id, logprob)):
                name = token_name(tokenizer, other, as_ids)
                best.setdefault(name, finite(value))  # two halves of characters look alike
            yield best

    best = in_batches(best_of_each())
    logprobs.top_logprobs = best if top else None
    return logprobs


def chat_logprobs(
    tokenizer: Tokenizer, deltas: Iterable[ChoiceDelta], top: int, *, as_ids: bool = False
) -> ChatLogprobs:
    def entry(token_id: int, logprob: float) -> TopLogprob:
        name = token_name(tokenizer, token_id, as_ids)
        return TopLogprob(name, finite(logprob), list(tokenizer.token_bytes(token_id)))

    def content() -> Iterator[TokenLogprob]:
        for token_id, logprob, alternatives in _tokens(deltas):
            sampled = entry(token_id, logprob)
            best = [entry(other, value) for other, value in alternatives[:top]]
            yield TokenLogprob(sampled.token, sampled.logprob, sampled.bytes, best)

    return ChatLogprobs(in_batches(content()))


def generate_logprobs(deltas: Sequence[ChoiceDelta], top: int) -> GenerateLogprobs:
    """Return them by token id; `top` 0 or 1 means the sampled token only, as trainers ask for every token there is."""
    if top <= 1:
        pairs = chain.from_iterable(zip(delta.token_ids, _all_finite(delta.logprobs)) for delta in deltas)
        if sum(len(delta.token_ids) for delta in deltas) <= BATCH_WITHOUT_TOP:
            return GenerateLogprobs([GenerateLogprob(f"token_id:{token}", token, logprob) for token, logprob in pairs])
        sampled = (GenerateLogprob(f"token_id:{token}", token, logprob) for token, logprob in pairs)
        return GenerateLogprobs(in_batches(sampled))

    def content() -> Iterator[GenerateLogprob]:
        for token_id, logprob, alternatives in _tokens(deltas):
            kept = alternatives[:top]
            best = [GenerateTopLogprob(f"token_id:{other}", other, finite(value)) for other, value in kept]
            yield GenerateLogprob(f"token_id:{token_id}", token_id, finite(logprob), best)

    return GenerateLogprobs(in_batches(content()))


def prompt_logprobs(choice: Choice, tokenizer: Tokenizer | None = None) -> PromptLogprobs | UnsetType:
    """Return the log-probabilities of a prompt if they were asked for; with their texts if there is a tokenizer."""
    if choice.request.sampling.prompt_logprobs is None:
        return UNSET

    def entry(token_id: int, logprob: float, rank: int) -> PromptTokenLogprob:
        text = token_text(tokenizer, token_id) if tokenizer is not None else None
        return PromptTokenLogprob(finite(logprob), rank, text)

    def places() -> Iterator[dict[int, PromptTokenLogprob] | None]:
        yield None
        for token_id, (logprob, rank, best) in zip(choice.request.prompt_ids[1:], choice.prompt_logprobs, strict=True):
            listed = {token_id: entry(token_id, logprob, rank)}
            for place, (other, value) in enumerate(best, start=1):
                if other != token_id:
                    listed[other] = entry(other, value, place)
            yield listed

    return in_batches(places())


def _all_finite(logprobs: Sequence[float]) -> Sequence[float]:
    """Replace what is not finite. Nearly always all are, which one sum shows."""
    return logprobs if math.isfinite(sum(logprobs)) else [finite(logprob) for logprob in logprobs]


def _tokens(deltas: Iterable[ChoiceDelta]) -> Iterator[tuple[int, float, Alternatives]]:
    for delta in deltas:
        for position, token_id in enumerate(delta.token_ids):
            logprob = delta.logprobs[position]
            top = delta.top_logprobs[position] if position < len(delta.top_logprobs) else ()
            # The sampled token may be among its alternatives: one number for it, not two roundings of one.
            yield token_id, logprob, tuple((other, logprob if other == token_id else value) for other, value in top)
