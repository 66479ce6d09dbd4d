"""The HTTP protocol of a rollout engine: request bodies, token streams and errors, in ROSE's types and back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta

from rose.api.requests import PromptLogprob
from rose.bounds import ITEMS_MAX, TOKENS_MAX, Count, Label, LogProbability, TokenId, TokenIds
from rose.engines.base import FinishReason, Request
from rose.errors import ContextTooLong, RequestRefused, Unavailable

URL = "http://rollout-engine"  # HTTP wants a name; the connection goes to the socket
GENERATE = "/inference/v1/generate"
REQUEST_PREFIX = "generate-tokens-"  # what vLLM puts before a request's name, inside
SCORING_SUFFIX = "-prompt"  # to the id of a request, for the one that computes the log-probabilities of its prompt
SEED_STRIDE = 1_000_003  # a turn that continues elsewhere must not draw its first random numbers again
SEED_MAX = (1 << 63) - 1
REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class _Top(msgspec.Struct, gc=False):
    token_id: TokenId
    logprob: LogProbability


class _Token(msgspec.Struct):
    logprob: LogProbability
    top_logprobs: Annotated[tuple[_Top, ...], Meta(max_length=ITEMS_MAX)] | None = None


class _Logprobs(msgspec.Struct):
    content: Annotated[tuple[_Token, ...], Meta(max_length=TOKENS_MAX)] | None = None


class _VllmChoice(msgspec.Struct):
    token_ids: TokenIds
    logprobs: _Logprobs | None = None
    finish_reason: Label | None = None


class _PromptToken(msgspec.Struct):
    logprob: LogProbability
    rank: Count | None = None


_PromptPlace = Annotated[dict[TokenId, _PromptToken], Meta(max_length=ITEMS_MAX)]


class _VllmError(msgspec.Struct):
    message: Annotated[str, Meta(max_length=TOKENS_MAX)] = "(no message)"


class _Message(msgspec.Struct):
    choices: Annotated[tuple[_VllmChoice, ...], Meta(max_length=ITEMS_MAX)] = ()
    error: _VllmError | None = None
    prompt_logprobs: Annotated[tuple[_PromptPlace | None, ...], Meta(max_length=TOKENS_MAX)] | None = None


_decoder = msgspec.json.Decoder(_Message)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message of a stream."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    finish_reason: FinishReason | None


def connector(socket: Path) -> aiohttp.BaseConnector:
    """Return a connector that opens a connection per request: vLLM closes idle ones, and a request on one is lost."""
    return aiohttp.UnixConnector(str(socket), limit=0, force_close=True)


def body_of(request: Request, *, salt: str, is_seeded: bool = True) -> dict[str, Any]:
    """Return the request body; tokens produced elsewhere follow the prompt, as vLLM knows no partial answers.

    Without a seed on a CPU: there vLLM 0.32 dies of a seeded request whose prompt is computed in more than one step.
    """
    sampling, done = request.sampling, len(request.partial.token_ids)
    params = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": sampling.max_tokens - done,
        "min_tokens": max(0, sampling.min_tokens - done),
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
        "seed": (sampling.seed + SEED_STRIDE * done) % SEED_MAX if is_seeded else None,
        "logprobs": sampling.top_logprobs,
        "detokenize": False,
    }
    body = {
        "request_id": request.request_id,
        "token_ids": [*request.prompt_ids, *request.partial.token_ids],
        "sampling_params": params,
        "stream": True,
        "priority": request.priority,
    }
    return {**body, "cache_salt": salt} if salt else body


def scoring_body_of(request: Request, *, salt: str) -> dict[str, Any]:
    """Return the body of a request that only computes the log-probabilities of the prompt.

    It is a request of its own because vLLM does not send them in a stream.
    """
    body = body_of(request, salt=salt, is_seeded=False)
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1, "detokenize": False}
    params["prompt_logprobs"] = request.sampling.prompt_logprobs
    name = request.request_id + SCORING_SUFFIX
    return {**body, "request_id": name, "sampling_params": params, "stream": False}


def prompt_logprobs(data: bytes, request: Request) -> tuple[PromptLogprob, ...] | None:
    """Return the log-probabilities of the prompt in a response; None if it was aborted.

    Raises Unavailable if it has none.
    """
    message, ids, top = _decoder.decode(data), request.prompt_ids, request.sampling.prompt_logprobs
    if any(choice.finish_reason == "abort" for choice in message.choices):
        return None
    places = message.prompt_logprobs or ()
    scores: list[PromptLogprob] = []
    for token_id, place in zip(ids[1:], places[1:]):
        own = place.get(token_id) if place is not None else None
        if place is None or own is None:
            break
        ranked = sorted((token.rank or 0, other, token.logprob) for other, token in place.items())
        best = tuple((other, logprob) for rank, other, logprob in ranked if 0 < rank <= (top or 0))
        scores.append((own.logprob, own.rank or 1, best))
    if len(scores) < len(ids) - 1:
        raise Unavailable("the rollout engine returned no log-probabilities of the prompt")
    return tuple(scores)


async def chunks(response: aiohttp.ClientResponse) -> AsyncIterator[Chunk]:
    """Yield the messages of a stream to its end. Raises the error that a message in it stands for."""
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        message = _decoder.decode(line[6:])
        if message.error is not None:
            what = message.error.message
            if "out of vocabulary" in what:  # the only fault of a request that is found so late
                raise RequestRefused(what)
            raise Unavailable(f"the rollout engine failed: {what}")
        for choice in message.choices:
            reason = choice.finish_reason
            if reason is not None and reason not in REASONS:
                raise Unavailable(f"the rollout engine ended a request with `{reason}`")
            content = choice.logprobs.content or () if choice.logprobs is not None else ()
            yield Chunk(
                choice.token_ids,
                tuple(entry.logprob for entry in content),
                tuple(tuple((top.token_id, top.logprob) for top in entry.top_logprobs or ()) for entry in content),
                REASONS[reason] if reason is not None else None,
            )


async def refusal(response: aiohttp.ClientResponse) -> RequestRefused | Unavailable:
    """Return the error that a refused request stands for."""
    text = await response.text()
    try:
        body = json.loads(text)
        what = str(body.get("error", {}).get("message") or body.get("detail") or text)
    except (ValueError, AttributeError):
        what = text
    if response.status >= 500:
        return Unavailable(f"the rollout engine answered {response.status}: {what[:500]}")
    is_long = "context length" in what or "max_model_len" in what or "maximum model length" in what
    return (ContextTooLong if is_long else RequestRefused)(what[:500])
