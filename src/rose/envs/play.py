"""Plays one episode and records exactly the tokens that were sampled, over any transport.

The transport is one callable: token ids in, the sampled ids with their log-probabilities out. The conversation is kept
as token ids and only ever extended. An answer is decoded for the environment, but never tokenised again: a second
tokenisation may differ, and the trainer would learn from tokens that were never sampled. The text between an answer
and the next observation comes from the model's own chat template, rendered with a mark in the answer's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rose.api.requests import TurnAnswer, TurnSampling
from rose.core.trajectory import NO_VERSION, Trajectory
from rose.envs.environment import EnvironmentFailed, Outcome, TimedEnvironment
from rose.errors import ConfigError, Unavailable
from rose.models.tokenizer import Tokenizer

MARK = "\u241e"
"""Stands for the assistant's answer while a template is taken apart; no environment writes it."""


class Generate(Protocol):
    """The transport. It moves to another worker by itself when one fails; what it raises ends the episode."""

    async def __call__(self, token_ids: Sequence[int], sampling: TurnSampling) -> TurnAnswer: ...


class ChatFrame:
    """The chat template of a model: turns observations into the token ids around its answers."""

    def __init__(self, tokenizer: Tokenizer, end_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.end_token_ids = tuple(end_token_ids)
        closing = tokenizer.encode(self._after_answer("x"), add_special_tokens=False)
        if not closing or closing[0] not in self.end_token_ids:
            raise ConfigError(
                f"{tokenizer.file}: the chat template does not end an answer with an end token of the model",
                hint="episodes need a template whose assistant turns end with eos_token",
            )
        self.end_id = closing[0]

    def first(self, observation: str) -> list[int]:
        """Return the prompt of the first turn."""
        text = self.tokenizer.render_chat([{"role": "user", "content": observation}])
        return self.tokenizer.encode(text, add_special_tokens=False)

    def following(self, observation: str, *, was_ended: bool) -> list[int]:
        """Return the ids between an answer and the next one; an answer that was cut off is ended first."""
        ids = self.tokenizer.encode(self._after_answer(observation), add_special_tokens=False)
        return ids[1:] if was_ended else ids

    def text(self, answer: TurnAnswer) -> str:
        """Return the text of an answer, without the end token."""
        token_ids = answer.token_ids[:-1] if self.is_ended(answer) else answer.token_ids
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def is_ended(self, answer: TurnAnswer) -> bool:
        return bool(answer.token_ids) and answer.token_ids[-1] == self.end_id

    def _after_answer(self, observation: str) -> str:
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": MARK},
            {"role": "user", "content": observation},
        ]
        return self.tokenizer.render_chat(messages).rpartition(MARK)[2]


@dataclass(slots=True)
class _Record:
    """A trajectory under construction."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)

    def add_context(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.loss_mask += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        self.versions += [NO_VERSION] * len(token_ids)

    def add_answer(self, answer: TurnAnswer) -> None:
        count = len(answer.token_ids)
        spans = sorted(answer.spans, key=lambda span: span.start)
        versions = [span.version for span in spans for _ in range(span.start, span.end)]
        if not count or len(answer.logprobs) != count or len(versions) != count:
            what = f"{count} tokens, {len(answer.logprobs)} log-probabilities and versions of {len(versions)}"
            raise Unavailable(f"a worker answered with {what}", hint="see that the worker runs this version of ROSE")
        self.token_ids += answer.token_ids
        self.loss_mask += [True] * count
        self.logprobs += answer.logprobs
        self.versions += versions


@dataclass(frozen=True, slots=True)
class Episode:
    """The episode to play. `seed` selects the task, the seed of `sampling` the random choices of the model."""

    trajectory_id: str
    group_id: str
    seed: int
    sampling: TurnSampling
    context_tokens_max: int = 4096


async def play(episode: Episode, environment: TimedEnvironment, frame: ChatFrame, generate: Generate) -> Trajectory:
    """Play one episode to its end and return its trajectory. Raises EnvironmentFailed, or what `generate` raises."""
    record = _Record()
    record.add_context(frame.first(await environment.reset(episode.seed)))
    prompt_tokens, answer_tokens = len(record.token_ids), episode.sampling.max_tokens
    if prompt_tokens + answer_tokens > episode.context_tokens_max:
        raise EnvironmentFailed(
            f"the first prompt has {prompt_tokens} tokens and an answer up to {answer_tokens}, together more than the "
            f"context of {episode.context_tokens_max}",
            hint="let the environment say less at first, or take a model with a longer context",
        )
    outcomes = list[Outcome]()
    while True:
        answer = await generate(tuple(record.token_ids), episode.sampling)
        record.add_answer(answer)
        outcome = await environment.step(frame.text(answer))
        outcomes.append(outcome)
        if outcome.is_done:
            break
        following = frame.following(outcome.observation, was_ended=frame.is_ended(answer))
        if len(record.token_ids) + len(following) + answer_tokens > episode.context_tokens_max:
            break  # an episode too long for the model is over, with what it earned so far
        record.add_context(following)
    return Trajectory(
        trajectory_id=episode.trajectory_id,
        group_id=episode.group_id,
        token_ids=tuple(record.token_ids),
        loss_mask=tuple(record.loss_mask),
        logprobs=tuple(record.logprobs),
        versions=tuple(record.versions),
        reward=sum((outcome.reward for outcome in outcomes), 0.0),
        is_success=outcome.is_done and outcome.is_success,
        turns=len(outcomes),
        invalid_turns=sum(not outcome.is_valid for outcome in outcomes),
    )


async def play_again(
    episode: Episode, environment: TimedEnvironment, frame: ChatFrame, generate: Generate, tries_max: int = 3
) -> Trajectory:
    """Play an episode as `play` does, but up to `tries_max` times from its seed while its environment fails."""
    for _ in range(tries_max - 1):
        try:
            return await play(episode, environment, frame, generate)
        except EnvironmentFailed:
            continue
    return await play(episode, environment, frame, generate)
