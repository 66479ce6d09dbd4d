"""The HTTP protocol of a rollout engine on SGLang: request bodies, token streams and errors, in ROSE's types and back.

Two habits of SGLang show here. An abort names all requests whose name begins with the given text, so names have one
length. A stream's last message may repeat a token that was sent before, so only what the counter adds is taken.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta

from rose.bounds import ITEMS_MAX, TOKENS_MAX, Count, Label, LogProbability, TokenId, TokenIds
from rose.engines.base import FinishReason, Request
from rose.errors import ContextTooLong, RequestRefused, Unavailable
from rose.vllm.vllm_client import REASONS, Chunk

_Message = Annotated[str, Meta(max_length=TOKENS_MAX)]
_Scored = tuple[LogProbability, TokenId, _Message | None]  # of a token; its text is never asked for
_TopScored = Annotated[tuple[_Scored, ...], Meta(max_length=ITEMS_MAX)]


class _Finish(msgspec.Struct, frozen=True):
    type: Label
    message: _Message = ""


class _SglangFacts(msgspec.Struct, frozen=True):
    """What SGLang says of a request, with counts of the whole answer so far."""

    completion_tokens: Count = 0
    cached_tokens: Count | None = None
    finish_reason: _Finish | None = None
    output_token_logprobs: Annotated[tuple[_Scored, ...], Meta(max_length=TOKENS_MAX)] = ()
    output_top_logprobs: Annotated[tuple[_TopScored | None, ...], Meta(max_length=TOKENS_MAX)] = ()


class _SglangError(msgspec.Struct):
    message: _Message = "(no message)"
    type: Label = ""


class _SglangMessage(msgspec.Struct):
    output_ids: TokenIds = ()
    meta_info: _SglangFacts = _SglangFacts()
    error: _SglangError | None = None


_decoder = msgspec.json.Decoder(_SglangMessage)


@dataclass(frozen=True, slots=True)
class SglangChunk:
    """One message of a stream, without what was sent before."""

    chunk: Chunk
    cached_tokens: int | None


def generate_body(request: Request, name: str) -> dict[str, Any]:
    """Return the request body; tokens produced elsewhere follow the prompt, as SGLang knows no partial answers.

    Without a seed: SGLang has seeds only in its deterministic mode.
    """
    sampling, done = request.sampling, len(request.partial.token_ids)
    params = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "max_new_tokens": sampling.max_tokens - done,
        "min_new_tokens": max(0, sampling.min_tokens - done),
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    body = {
        "rid": name,
        "input_ids": [*request.prompt_ids, *request.partial.token_ids],
        "sampling_params": params,
        "return_logprob": True,
        "top_logprobs_num": sampling.top_logprobs,
        "stream": True,
        "priority": request.priority,
    }
    return {**body, "extra_key": request.tenant} if request.tenant else body


async def sglang_chunks(response: aiohttp.ClientResponse) -> AsyncIterator[SglangChunk]:
    """Yield the messages of a stream to its end. Raises the error that a message in it stands for."""
    received = 0
    async for line in response.content:
        if line.startswith(b"data: {"):
            message = _decoder.decode(line[6:])
            if message.error is not None:
                raise error_of(message.error.message, is_refusal=message.error.type == "invalid_request_error")
            yield _chunk_of(message, received)
            received = max(received, message.meta_info.completion_tokens)


def _chunk_of(message: _SglangMessage, received: int) -> SglangChunk:
    facts = message.meta_info
    new = max(0, facts.completion_tokens - received)
    if new > min(len(message.output_ids), len(facts.output_token_logprobs)):
        raise Unavailable(f"the rollout engine left out {new - len(message.output_ids)} tokens of a request")
    tops = facts.output_top_logprobs[len(facts.output_top_logprobs) - new :]
    chunk = Chunk(
        message.output_ids[len(message.output_ids) - new :],
        tuple(scored[0] for scored in facts.output_token_logprobs[len(facts.output_token_logprobs) - new :]),
        tuple(tuple((token, logprob) for logprob, token, _ in top or ()) for top in tops),
        _reason_of(facts.finish_reason),
    )
    return SglangChunk(chunk, facts.cached_tokens)


def _reason_of(finish: _Finish | None) -> FinishReason | None:
    if finish is None:
        return None
    if finish.type not in REASONS:
        raise Unavailable(f"the rollout engine ended a request with `{finish.type}`: {finish.message}")
    return REASONS[finish.type]


def error_of(what: str, *, is_refusal: bool) -> RequestRefused | Unavailable:
    """Return the error that a message of SGLang stands for."""
    if not is_refusal:
        return Unavailable(f"the rollout engine failed: {what[:500]}")
    is_long = "context length" in what or "maximum allowed length" in what
    return (ContextTooLong if is_long else RequestRefused)(what[:500])
