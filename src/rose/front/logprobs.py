"""Log-probabilities in the shape each route has for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

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

LOGPROB_MIN = -9999.0  # JSON has no infinity; OpenAI and vLLM write this for "never"


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOGPROB_MIN


def _all_finite(logprobs: Sequence[float]) -> Sequence[float]:
    """Nearly always they all are, which one sum shows."""
    return logprobs if math.isfinite(sum(logprobs)) else [finite(logprob) for logprob in logprobs]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token by itself; the part of a character that is no text is shown as the replacement character."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def completion_logprobs(tokenizer: Tokenizer, pieces: Iterable[Piece], top: int, offset: int = 0) -> CompletionLogprobs:
    """`offset` is where the first token's text starts; with `top` 0 only the sampled tokens are listed."""
    found = CompletionLogprobs([], [], [] if top else None, [])
    for token_id, logprob, alternatives in _tokens(pieces):
        text = token_text(tokenizer, token_id)
        found.tokens.append(text)
        found.token_logprobs.append(finite(logprob))
        found.text_offset.append(offset)
        offset += len(text)
        if found.top_logprobs is not None:
            best: dict[str, float] = {}
            for other, value in (*alternatives[:top], (token_id, logprob)):
                best.setdefault(token_text(tokenizer, other), finite(value))  # two halves of characters look alike
            found.top_logprobs.append(best)
    return found


def chat_logprobs(tokenizer: Tokenizer, pieces: Iterable[Piece], top: int) -> ChatLogprobs:
    def shown(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(token_text(tokenizer, token_id), finite(logprob), list(tokenizer.token_bytes(token_id)))

    content = []
    for token_id, logprob, alternatives in _tokens(pieces):
        sampled = shown(token_id, logprob)
        best = [shown(other, value) for other, value in alternatives[:top]]
        content.append(TokenLogprob(sampled.token, sampled.logprob, sampled.bytes, best))
    return ChatLogprobs(content)


def generate_logprobs(pieces: Iterable[Piece], top: int) -> GenerateLogprobs:
    """`top` 0 or 1 means the sampled token only, as trainers ask for every token there is."""
    if top <= 1:
        return GenerateLogprobs(
            [
                GenerateLogprob(f"token_id:{token_id}", token_id, logprob)
                for piece in pieces
                for token_id, logprob in zip(piece.token_ids, _all_finite(piece.logprobs))
            ]
        )
    content = []
    for token_id, logprob, alternatives in _tokens(pieces):
        best = [GenerateTopLogprob(f"token_id:{other}", other, finite(value)) for other, value in alternatives[:top]]
        content.append(GenerateLogprob(f"token_id:{token_id}", token_id, finite(logprob), best))
    return GenerateLogprobs(content)


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
