"""From a request's body to engine requests: which prompts, how many tokens, sampled how, under which seeds.

Choice i of a request with a seed uses seed + i, so that the choices of one request differ and each can be had again by
itself. Without a seed every choice gets a random one.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import cast

import msgspec

from rose.engines.base import Request, Sampling
from rose.errors import ContextTooLong
from rose.front.context import Front
from rose.front.failures import bad_request
from rose.front.generation import Choice
from rose.front.requests import CHOICES_MAX, TEMPERATURE_MIN, CompletionBody, GenerateSampling, Prompt, SamplingBody
from rose.front.text import ChoiceText

SEED_MASK = 2**63 - 1


def prompts_of(prompt: Prompt) -> list[str | list[int]]:
    """Return the prompts of a request: a text, token ids, or a list of either; never a mixture."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt[0], int):
        check_choices(len(prompt), 1)
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise bad_request("`prompt` mixes texts and token ids", param="prompt", code="invalid_type")
    return [cast(list[int], prompt)] if kinds == {int} else cast(list[str | list[int]], prompt)


async def encode_prompts(front: Front, body: CompletionBody) -> list[list[int]]:
    """Return the token ids of every prompt of a completion request."""
    prompts = prompts_of(body.prompt)
    check_choices(len(prompts), body.n or 1)
    if all(isinstance(prompt, str) for prompt in prompts):
        encoded = await front.encode_many(cast(list[str], prompts), add_special_tokens=True)
    else:
        encoded = cast(list[list[int]], prompts)
    for ids in encoded:
        check_prompt(front, ids, "prompt")
    return encoded


def check_choices(prompts: int, count: int) -> None:
    """Raise Failure if a request asks for too many answers. Comes before any work on the prompts."""
    if count * prompts > CHOICES_MAX:
        raise bad_request(f"{prompts} prompts with n = {count} are more than {CHOICES_MAX} choices", param="n")


def check_prompt(front: Front, token_ids: Sequence[int], param: str) -> None:
    if not token_ids:
        raise bad_request(f"`{param}` is empty; send at least one token", param=param)
    if len(token_ids) >= front.context_tokens:
        raise ContextTooLong(
            f"the prompt has {len(token_ids)} tokens and leaves no room in the context of {front.context_tokens}"
        )
    if max(token_ids) >= front.vocabulary:
        message = f"`{param}` has token id {max(token_ids)}; the vocabulary has {front.vocabulary}, counted from 0"
        raise bad_request(message, param=param)


def max_tokens_of(front: Front, prompt_tokens: int, wanted: int | None, default: int | None) -> int:
    """As many as asked for, else the default, else all the context that is left."""
    left = front.context_tokens - prompt_tokens
    if wanted is None:
        return left if default is None else min(default, left)
    if wanted > left:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens and max_tokens is {wanted}, together more than the context of "
            f"{front.context_tokens}",
            hint="shorten the prompt or lower max_tokens",
        )
    return wanted


def sampling_of(front: Front, body: SamplingBody | GenerateSampling, *, max_tokens: int, top_logprobs: int) -> Sampling:
    """With seed 0; every choice gets its own."""
    stop_token_ids = tuple(body.stop_token_ids or ())
    if stop_token_ids and max(stop_token_ids) >= front.vocabulary:
        message = f"`stop_token_ids` has {max(stop_token_ids)}; the vocabulary has {front.vocabulary}, counted from 0"
        raise bad_request(message, param="stop_token_ids")
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"`min_tokens` {min_tokens} is more than max_tokens {max_tokens}", param="min_tokens")
    temperature = 1.0 if body.temperature is None else body.temperature
    top_k = max(0, body.top_k or 0)
    return Sampling(
        temperature=max(temperature, TEMPERATURE_MIN) if temperature > 0 else 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=top_k if top_k < front.vocabulary else 0,
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=stop_token_ids,
        top_logprobs=top_logprobs,
    )


def with_seed(sampling: Sampling, seed: int | None, number: int) -> Sampling:
    """The sampling of choice `number`."""
    chosen = secrets.randbits(63) if seed is None else (seed + number) & SEED_MASK
    return msgspec.structs.replace(sampling, seed=chosen)


def choices_of(
    front: Front,
    body: SamplingBody,
    prompts: Sequence[Sequence[int]],
    *,
    reply_id: str,
    arrival_s: float,
    max_tokens: int | None,
    default_max_tokens: int | None,
    top_logprobs: int,
) -> list[Choice]:
    """`n` choices for every prompt, numbered as OpenAI does: all of the first prompt, then all of the second."""
    count = body.n or 1
    check_choices(len(prompts), count)
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    choices: list[Choice] = []
    for prompt in prompts:
        limit = max_tokens_of(front, len(prompt), max_tokens, default_max_tokens)
        sampling = sampling_of(front, body, max_tokens=limit, top_logprobs=top_logprobs)
        prompt_ids = tuple(prompt)
        for number in range(count):
            index = len(choices)
            request = Request(
                request_id=f"{reply_id}-{index}",
                prompt_ids=prompt_ids,
                sampling=with_seed(sampling, body.seed, number),
                tenant=body.cache_salt or "",
                priority=front.priority_of(body.priority),
                arrival_s=arrival_s,
            )
            text = ChoiceText(front.tokenizer.stream(), stops, sampling.min_tokens)
            choices.append(Choice(index, request, text))
    return choices
