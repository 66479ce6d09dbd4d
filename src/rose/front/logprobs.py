"""Log-probabilities in the shape each route has for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar, cast

import msgspec

from rose.front.encoding import EncodedList
from rose.front.generation import Alternatives, Piece
from rose.front.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    GenerateLogprob,
    GenerateLogprobs,
    GenerateTopLogprob,
    TokenLogprob,
    TopLogprob,
)
from rose.models.tokenizer import Tokenizer

BATCH = 32  # tokens, of up to 21 entries each, that are encoded at once
BATCH_WITHOUT_TOP = 512  # tokens of one entry each: no more work than a batch of the others
LOGPROB_MIN = -9999.0  # JSON has no infinity; OpenAI and vLLM write this for "never"

Item = TypeVar("Item")
_encoder = msgspec.json.Encoder()


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOGPROB_MIN


def in_batches(items: Iterable[Item]) -> list[Item]:
    """The items as a list for an encoder; of many, each batch is encoded here as it comes.

    In one go, encoding would hold Python's lock for too long, and so would the collector with millions of objects.
    """
    remaining = iter(items)
    batch, encoded = list(islice(remaining, BATCH)), list[bytes]()
    while more := list(islice(remaining, BATCH)):
        encoded.append(_encoder.encode(batch)[1:-1])
        batch = more
    if not encoded:
        return batch
    encoded.append(_encoder.encode(batch)[1:-1])
    return cast(list[Item], EncodedList(encoded))


def _all_finite(logprobs: Sequence[float]) -> Sequence[float]:
    """Nearly always they all are, which one sum shows."""
    return logprobs if math.isfinite(sum(logprobs)) else [finite(logprob) for logprob in logprobs]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token by itself; the part of a character that is no text is shown as the replacement character."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def completion_logprobs(tokenizer: Tokenizer, pieces: Iterable[Piece], top: int, offset: int = 0) -> CompletionLogprobs:
    """`offset` is where the first token's text starts; with `top` 0 only the sampled tokens are listed."""
    found = CompletionLogprobs([], [], None, [])

    def best_of_each() -> Iterator[dict[str, float]]:
        place = offset
        for token_id, logprob, alternatives in _tokens(pieces):
            text = token_text(tokenizer, token_id)
            found.tokens.append(text)
            found.token_logprobs.append(finite(logprob))
            found.text_offset.append(place)
            place += len(text)
            best: dict[str, float] = {}
            for other, value in (*alternatives[:top], (token_id, logprob)):
                best.setdefault(token_text(tokenizer, other), finite(value))  # two halves of characters look alike
            yield best

    best = in_batches(best_of_each())
    found.top_logprobs = best if top else None
    return found


def chat_logprobs(tokenizer: Tokenizer, pieces: Iterable[Piece], top: int) -> ChatLogprobs:
    def shown(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(token_text(tokenizer, token_id), finite(logprob), list(tokenizer.token_bytes(token_id)))

    def content() -> Iterator[TokenLogprob]:
        for token_id, logprob, alternatives in _tokens(pieces):
            sampled = shown(token_id, logprob)
            best = [shown(other, value) for other, value in alternatives[:top]]
            yield TokenLogprob(sampled.token, sampled.logprob, sampled.bytes, best)

    return ChatLogprobs(in_batches(content()))


def generate_logprobs(pieces: Iterable[Piece], top: int) -> GenerateLogprobs:
    """`top` 0 or 1 means the sampled token only, as trainers ask for every token there is."""
    if top <= 1:
        held = list(pieces)
        pairs = chain.from_iterable(zip(piece.token_ids, _all_finite(piece.logprobs)) for piece in held)
        if sum(len(piece.token_ids) for piece in held) <= BATCH_WITHOUT_TOP:
            return GenerateLogprobs([GenerateLogprob(f"token_id:{token}", token, logprob) for token, logprob in pairs])
        sampled = (GenerateLogprob(f"token_id:{token}", token, logprob) for token, logprob in pairs)
        return GenerateLogprobs(in_batches(sampled))

    def content() -> Iterator[GenerateLogprob]:
        for token_id, logprob, alternatives in _tokens(pieces):
            kept = alternatives[:top]
            best = [GenerateTopLogprob(f"token_id:{other}", other, finite(value)) for other, value in kept]
            yield GenerateLogprob(f"token_id:{token_id}", token_id, finite(logprob), best)

    return GenerateLogprobs(in_batches(content()))


def _tokens(pieces: Iterable[Piece]) -> Iterator[tuple[int, float, Alternatives]]:
    for piece in pieces:
        for position, token_id in enumerate(piece.token_ids):
            logprob = piece.logprobs[position]
            alternatives = piece.top_logprobs[position] if position < len(piece.top_logprobs) else ()
            # The sampled token may be among its alternatives: one number for it, not two roundings of one.
            yield (
                token_id,
                logprob,
                tuple((other, logprob if other == token_id else value) for other, value in alternatives),
            )
