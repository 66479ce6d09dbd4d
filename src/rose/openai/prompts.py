"""From a request's body to engine requests: which prompts, how many tokens, sampled how, under which seeds.

Choice i of a request with a seed uses seed + i, so that the choices of one request differ and each can be had again by
itself. Without a seed every choice gets a random one.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import cast

import msgspec

from rose.api.requests import PROMPT_LOGPROBS_MAX, Request, Sampling
from rose.errors import ContextTooLong
from rose.openai.generation import Choice, ChoiceText
from rose.openai.http_context import HttpContext
from rose.openai.http_errors import bad_request
from rose.openai.request_schemas import (
    CHOICES_MAX,
    TEMPERATURE_MIN,
    CompletionBody,
    GeneratingBody,
    Prompt,
    SamplingBody,
    SamplingFields,
)

SEED_MASK = 2**63 - 1


def prompts_of(prompt: Prompt) -> list[str | list[int]]:
    """Return the prompts of a request: a text, token ids, or a list of either; never a mixture."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt[0], int):
        _check_choices(len(prompt), 1)
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise bad_request("`prompt` mixes texts and token ids", param="prompt", code="invalid_type")
    return [cast(list[int], prompt)] if kinds == {int} else cast(list[str | list[int]], prompt)


async def encode_prompts(context: HttpContext, body: CompletionBody) -> list[list[int]]:
    """Return the token ids of every prompt of a completion request."""
    prompts = prompts_of(body.prompt)
    _check_choices(len(prompts), body.n or 1)
    if all(isinstance(prompt, str) for prompt in prompts):
        encoded = await context.encode_many(cast(list[str], prompts), add_special_tokens=True)
    else:
        encoded = cast(list[list[int]], prompts)
    for ids in encoded:
        context.check_prompt(ids, "prompt")
    return encoded


def _check_choices(prompts: int, count: int) -> None:
    """Raise Failure if a request asks for too many choices. Comes before any work on the prompts."""
    if count * prompts > CHOICES_MAX:
        raise bad_request(f"{prompts} prompts with n = {count} are more than {CHOICES_MAX} choices", param="n")


def sampling_of(context: HttpContext, body: SamplingFields, prompt_tokens: int) -> Sampling:
    """Return the sampling, with seed 0: every choice gets its own. Raise Failure, ContextTooLong."""
    left, max_tokens = context.context_tokens - prompt_tokens, body.wanted_tokens
    if max_tokens is None:
        max_tokens = left if body.DEFAULT_MAX_TOKENS is None else min(body.DEFAULT_MAX_TOKENS, left)
    if max_tokens > left:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, together more than the context of "
            f"{context.context_tokens}",
            hint="shorten the prompt or lower max_tokens",
        )
    stop_token_ids = tuple(body.stop_token_ids or ())
    context.check_token_ids(stop_token_ids, "stop_token_ids")
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"`min_tokens` {min_tokens} is more than max_tokens {max_tokens}", param="min_tokens")
    temperature = 1.0 if body.temperature is None else body.temperature
    top_k = max(0, body.top_k or 0)
    _check_prompt_logprobs(body, prompt_tokens)
    return Sampling(
        temperature=max(temperature, TEMPERATURE_MIN) if temperature > 0 else 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=top_k if top_k < context.vocabulary else 0,
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=stop_token_ids,
        top_logprobs=body.alternatives,
        prompt_logprobs=body.prompt_logprobs,
    )


def _check_prompt_logprobs(body: SamplingFields, prompt_tokens: int) -> None:
    """Raise Failure if the response would list more entries of prompts than one response may."""
    if body.prompt_logprobs is None:
        return
    entries = prompt_tokens * (1 + body.prompt_logprobs)
    if entries > PROMPT_LOGPROBS_MAX:
        message = (
            f"`prompt_logprobs` would list {entries} tokens, more than {PROMPT_LOGPROBS_MAX}: send shorter prompts"
        )
        raise bad_request(message, param="prompt_logprobs")


def with_versions(context: HttpContext, body: GeneratingBody, sampling: Sampling) -> Sampling:
    """Return the sampling with the weights that the request demands. Raise Failure, VersionUnavailable."""
    if body.stream and sampling.prompt_logprobs is not None:
        raise bad_request("`prompt_logprobs` does not come in a stream", param="prompt_logprobs")
    exact, oldest = body.weight_version or "", body.min_weight_version or ""
    if not exact and not oldest:
        return sampling
    context.check_versions(exact, oldest)
    return msgspec.structs.replace(sampling, weight_version=exact, min_weight_version=oldest)


def request_of(
    context: HttpContext,
    body: GeneratingBody,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    seed: int | None,
    *,
    request_id: str,
    arrival_s: float,
) -> Request:
    """Return one engine request; without a seed it gets a random one."""
    seed = secrets.randbits(63) if seed is None else seed & SEED_MASK
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        sampling=msgspec.structs.replace(sampling, seed=seed),
        tenant=body.cache_salt or "",
        priority=context.priority_of(body.priority),
        arrival_s=arrival_s,
    )


def choices_of(
    context: HttpContext, body: SamplingBody, prompts: Sequence[Sequence[int]], *, reply_id: str, arrival_s: float
) -> list[Choice]:
    """Return `n` choices for every prompt, numbered as OpenAI does: all of the first prompt, then of the second."""
    count = body.n or 1
    _check_choices(len(prompts), count)
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    choices: list[Choice] = []
    _check_prompt_logprobs(body, count * sum(map(len, prompts)))
    for prompt in map(tuple, prompts):
        sampling = with_versions(context, body, sampling_of(context, body, len(prompt)))
        for number in range(count):
            index = len(choices)
            seed = None if body.seed is None else body.seed + number
            request_id = f"{reply_id}-{index}"
            request = request_of(context, body, prompt, sampling, seed, request_id=request_id, arrival_s=arrival_s)
            shows_stop = bool(body.include_stop_str_in_output)
            text = ChoiceText(context.tokenizer.stream(), stops, sampling.min_tokens, shows_stop=shows_stop)
            choices.append(Choice(index, request, text))
    return choices
