"""HTTP with a rollout engine over its Unix socket: requests in the words of vLLM, its stream of tokens in ours."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta

from rose.bounds import ITEMS_MAX, TOKENS_MAX, Label, LogProbability, TokenId, TokenIds
from rose.engines.base import FinishReason, Request
from rose.errors import ContextTooLong, RequestRefused, Unavailable

URL = "http://rollout-engine"  # HTTP wants a name; the connection goes to the socket
GENERATE = "/inference/v1/generate"
NAMED = "generate-tokens-"  # what vLLM puts before a request's name, inside
SEED_STRIDE = 1_000_003  # a turn that goes on elsewhere must not draw its first random numbers again
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


class _Choice(msgspec.Struct):
    token_ids: TokenIds
    logprobs: _Logprobs | None = None
    finish_reason: Label | None = None


class _Error(msgspec.Struct):
    message: Annotated[str, Meta(max_length=TOKENS_MAX)] = "(no message)"


class _Message(msgspec.Struct):
    choices: Annotated[tuple[_Choice, ...], Meta(max_length=ITEMS_MAX)] = ()
    error: _Error | None = None


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
    """vLLM knows no partial answers: what was produced elsewhere goes behind the prompt.

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


async def chunks(response: aiohttp.ClientResponse) -> AsyncIterator[Chunk]:
    """Until the end of the stream. Raises what an error inside it stands for."""
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
            yield _chunk(choice)


def _chunk(choice: _Choice) -> Chunk:
    reason = choice.finish_reason
    if reason is not None and reason not in REASONS:
        raise Unavailable(f"the rollout engine ended a request with `{reason}`")
    content = choice.logprobs.content or () if choice.logprobs is not None else ()
    return Chunk(
        choice.token_ids,
        tuple(entry.logprob for entry in content),
        tuple(tuple((top.token_id, top.logprob) for top in entry.top_logprobs or ()) for entry in content),
        REASONS[reason] if reason is not None else None,
    )


async def refusal(response: aiohttp.ClientResponse) -> RequestRefused | Unavailable:
    """Why it was not taken, as one of our errors."""
    text = await response.text()
    try:
        found = json.loads(text)
        what = str(found.get("error", {}).get("message") or found.get("detail") or text)
    except (ValueError, AttributeError):
        what = text
    if response.status >= 500:
        return Unavailable(f"the rollout engine answered {response.status}: {what[:500]}")
    is_long = "context length" in what or "max_model_len" in what or "maximum model length" in what
    return (ContextTooLong if is_long else RequestRefused)(what[:500])
