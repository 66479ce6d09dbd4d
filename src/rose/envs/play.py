"""Plays one episode, token by token exact, over whatever carries the tokens.

The transport is one callable: ids in, the sampled ids with their log-probabilities out. The conversation is kept as
token ids and only ever extended. What the model wrote is never decoded and tokenised again, since the second
tokenisation may differ from what was sampled, and then the trainer would learn from tokens nobody drew. Text goes
one way: to the environment.

What stands between the model's words and the next observation is taken from the model's own chat template, by
rendering a conversation with a mark in the assistant's place and keeping what follows the mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rose.core.trajectory import NO_VERSION, Trajectory
from rose.envs.base import EnvironmentFailed, Guarded, Outcome
from rose.errors import ConfigError, Unavailable
from rose.models.tokenizer import Tokenizer

MARK = "\u241e"
"""Stands for the assistant's words while a template is taken apart; no environment writes it."""


@dataclass(frozen=True, slots=True)
class TurnSampling:
    """How a turn is drawn. Training turns use the whole distribution: no top-p, top-k or penalties."""

    temperature: float = 1.0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of an answer were sampled under this version of the weights."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn of the model. A stop token is the last of `token_ids`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: Literal["stop", "length"]


class Generate(Protocol):
    """The transport. It goes on elsewhere by itself when a worker fails; what it raises ends the episode."""

    async def __call__(self, token_ids: Sequence[int], sampling: TurnSampling) -> Answer: ...


class ChatFrame:
    """Turns observations into the ids around the model's own words."""

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
        """The prompt of the first turn."""
        text = self.tokenizer.render_chat([{"role": "user", "content": observation}])
        return self.tokenizer.encode(text, add_special_tokens=False)

    def following(self, observation: str, *, was_ended: bool) -> list[int]:
        """What comes between an answer and the next one; an answer that was cut off is ended first."""
        ids = self.tokenizer.encode(self._after_answer(observation), add_special_tokens=False)
        return ids[1:] if was_ended else ids

    def text(self, answer: Answer) -> str:
        """The model's words, without the end token."""
        words = answer.token_ids[:-1] if self.is_ended(answer) else answer.token_ids
        return self.tokenizer.decode(words, skip_special_tokens=False)

    def is_ended(self, answer: Answer) -> bool:
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
    """A trajectory in the making."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    reward: float = 0.0
    turns: int = 0
    invalid_turns: int = 0

    def add_context(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.loss_mask += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        self.versions += [NO_VERSION] * len(token_ids)

    def add_answer(self, answer: Answer) -> None:
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

    def add_outcome(self, outcome: Outcome) -> None:
        self.reward += outcome.reward
        self.turns += 1
        self.invalid_turns += not outcome.is_valid


@dataclass(frozen=True, slots=True)
class Episode:
    """Which episode to play: the task by its seed, the dice by the sampling's."""

    trajectory_id: str
    group_id: str
    seed: int
    sampling: TurnSampling
    context_tokens_max: int = 4096


async def play(episode: Episode, environment: Guarded, frame: ChatFrame, generate: Generate) -> Trajectory:
    """One episode to its end. Raises EnvironmentFailed, or what `generate` raises."""
    record = _Record()
    record.add_context(frame.first(await environment.reset(episode.seed)))
    _check_first(len(record.token_ids), episode)
    while True:
        answer = await generate(tuple(record.token_ids), episode.sampling)
        record.add_answer(answer)
        outcome = await environment.step(frame.text(answer))
        record.add_outcome(outcome)
        if outcome.is_done:
            break
        following = frame.following(outcome.observation, was_ended=frame.is_ended(answer))
        if len(record.token_ids) + len(following) + episode.sampling.max_tokens > episode.context_tokens_max:
            break  # an episode too long for the model is over, with what it earned so far
        record.add_context(following)
    return _trajectory(episode, record, outcome)


async def play_again(
    episode: Episode, environment: Guarded, frame: ChatFrame, generate: Generate, tries_max: int = 3
) -> Trajectory:
    """As `play`; an episode whose environment failed is played anew from its seed, up to `tries_max` times."""
    for _ in range(tries_max - 1):
        try:
            return await play(episode, environment, frame, generate)
        except EnvironmentFailed:
            continue
    return await play(episode, environment, frame, generate)


def _check_first(prompt_tokens: int, episode: Episode) -> None:
    answer_tokens, context_tokens = episode.sampling.max_tokens, episode.context_tokens_max
    if prompt_tokens + answer_tokens > context_tokens:
        raise EnvironmentFailed(
            f"the first prompt has {prompt_tokens} tokens and an answer up to {answer_tokens}, together more than the "
            f"context of {context_tokens}",
            hint="let the environment say less at first, or take a model with a longer context",
        )


def _trajectory(episode: Episode, record: _Record, last: Outcome) -> Trajectory:
    return Trajectory(
        trajectory_id=episode.trajectory_id,
        group_id=episode.group_id,
        token_ids=tuple(record.token_ids),
        loss_mask=tuple(record.loss_mask),
        logprobs=tuple(record.logprobs),
        versions=tuple(record.versions),
        reward=record.reward,
        is_success=last.is_done and last.is_success,
        turns=record.turns,
        invalid_turns=record.invalid_turns,
    )
