"""What must always hold in a simulated world, checked as it happens by somebody who keeps accounts of his own.

- Every token that the gateway accepts is the one that an undisturbed engine with the named weights would have drawn
  there (`law`), of a version within the staleness bound, from a worker whose lease had not run out.
- What the ledger has is never forgotten: a turn never goes back behind it, an answer that a client got is the answer
  for ever, a finished trajectory stays finished and finishes once, a batch is the same however often it is asked for.
- Every trajectory that was begun is handed out once, whole, or was lost for a reason that this world has given it.
- The gateway's counts balance, and its queue is bounded.

What was received but is not durable yet may be lost with the gateway; whoever was told of it may not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from rose.core.trajectory import NO_VERSION, Trajectory
from rose.engines.base import Request
from rose.errors import RequestRefused
from rose.rollout.sessions import Finish
from rose.rollout.trajectories import Batch
from rose.sim.episodes import Answered, Episode
from rose.sim.law import drawn, is_whole
from rose.sim.scenario import Scenario
from rose.sim.story import Violation

Prompt = tuple[int, ...]
"""Of all turns of a world no two have the same."""


@dataclass(slots=True)
class Known:
    """What the gateway has of turns and trajectories."""

    tokens: dict[Prompt, int] = field(default_factory=dict)
    ended: set[Prompt] = field(default_factory=set)
    finished: dict[str, Finish] = field(default_factory=dict)

    def take(self, other: Known) -> None:
        self.tokens.update(other.tokens)
        self.ended |= other.ended
        self.finished.update(other.finished)


@dataclass(slots=True)
class Placed:
    """The newest placement of a turn."""

    ticket: int
    seed: int
    oldest: int  # version it may run on


class Judge:
    def __init__(self, scenario: Scenario) -> None:
        self.checked_tokens = 0
        self.episodes: dict[str, Episode] = {}
        self.data: dict[str, str] = {}  # what was handed out, by trajectory
        self._scenario = scenario
        self._durable, self._pending = Known(), Known()
        self._placed: dict[Prompt, Placed] = {}
        self._groups: dict[str, list[str]] = {}
        self._answers: dict[Prompt, Answered] = {}
        self._batches: dict[int, bytes] = {}
        self._published = self._acknowledged = 0

    # The trainer

    def publishing(self, version: str) -> None:
        self._published = int(version)

    def published(self, version: str) -> None:
        """The trainer knows that it is."""
        self._acknowledged = int(version)

    def began(self, episode: Episode, group: str) -> None:
        self.episodes[episode.trajectory_id] = episode
        self._groups.setdefault(group, []).append(episode.trajectory_id)

    def given(self, batch: Batch) -> None:
        """The gateway hands a batch to whoever asked."""
        told = msgspec.msgpack.encode(batch)
        if self._batches.setdefault(batch.batch, told) != told:
            raise Violation(f"batch {batch.batch} is not the same when asked for again")

    def handed(self, batch: Batch) -> None:
        """The trainer has it."""
        for group in batch.groups:
            members = self._groups.pop(group.group, None)
            if members is None:
                raise Violation(f"{group.group} was handed out twice, or never begun")
            found = [trajectory.trajectory_id for trajectory in group.trajectories]
            lost = set(members) - set(found)
            if len(found) != len(set(found)) or set(found) - set(members) or group.lost != len(lost):
                raise Violation(f"{group.group} has {members}, and {found} with {group.lost} lost were handed out")
            for name in lost:
                self._check_lost(self.episodes[name])
            for trajectory in group.trajectories:
                self._check_trajectory(self.episodes[trajectory.trajectory_id], trajectory)

    # The players

    def answered(self, episode: Episode, prompt: Prompt, answered: Answered) -> None:
        known = self._answers.setdefault(prompt, answered)
        if known != answered:
            raise Violation(f"{episode.trajectory_id} asked again and got another answer")
        self._check_law(prompt, 0, answered.token_ids, answered.logprobs, answered.versions)
        if not is_whole(answered.token_ids, episode.sampling):
            raise Violation(f"{episode.trajectory_id} got an answer that is not whole: {answered.token_ids}")

    def finished(self, episode: Episode) -> None:
        if episode.trajectory_id not in self._durable.finished:
            raise Violation(f"{episode.trajectory_id} was told that it has finished, and the ledger does not have it")

    def refused(self, episode: Episode, error: RequestRefused) -> None:
        finish = self._durable.finished.get(episode.trajectory_id)
        if finish is None or not finish.is_lost:
            raise Violation(f"{episode.trajectory_id} was refused: {error.what}")
        episode.is_lost = True
        self._check_lost(episode)

    # The gateway

    def placed(self, request: Request, ticket: int) -> None:
        prompt, partial = request.prompt_ids, request.partial
        known = self._placed.get(prompt)
        if known is not None and known.seed != request.sampling.seed:
            raise Violation(f"a turn was given other dice when it was placed again (ticket {ticket})")
        if known is not None and known.ticket >= ticket:
            raise Violation(f"ticket {ticket} comes after {known.ticket}")
        oldest = self._acknowledged - self._scenario.max_staleness
        self._placed[prompt] = Placed(ticket, request.sampling.seed, oldest)
        kept = max(self._durable.tokens.get(prompt, 0), self._pending.tokens.get(prompt, 0))
        if len(partial.token_ids) != kept:
            raise Violation(f"ticket {ticket} goes on from {len(partial.token_ids)} tokens, and {kept} were received")
        if prompt in self._durable.ended or prompt in self._pending.ended:
            raise Violation(f"ticket {ticket} runs a turn that had ended")
        versions = [span.version for span in partial.spans for _ in range(span.start, span.end)]
        self._check_law(prompt, 0, partial.token_ids, partial.logprobs, versions)

    def accepted(
        self,
        prompt: Prompt,
        start: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        version: str,
        *,
        ends: bool,
    ) -> None:
        """The gateway took these tokens of a turn for good."""
        kept = max(self._durable.tokens.get(prompt, 0), self._pending.tokens.get(prompt, 0))
        if start != kept:
            raise Violation(f"tokens from {start} on were accepted where {kept} are known")
        self._check_law(prompt, start, token_ids, logprobs, [version] * len(token_ids))
        if token_ids and int(version) < self._placed[prompt].oldest:
            raise Violation(f"tokens of version {version}, {self._placed[prompt].oldest} is the oldest allowed")
        self._pending.tokens[prompt] = start + len(token_ids)
        if ends:
            self._pending.ended.add(prompt)

    def ended(self, trajectory_id: str, finish: Finish) -> None:
        """The gateway finishes a trajectory."""
        if trajectory_id in self._durable.finished or trajectory_id in self._pending.finished:
            raise Violation(f"{trajectory_id} finished twice")
        self._pending.finished[trajectory_id] = finish

    def settled(self) -> None:
        """All that the gateway knows is durable."""
        self._durable.take(self._pending)
        self._pending = Known()

    def died(self) -> None:
        """What was not durable is gone."""
        self._pending = Known()

    # The end

    def check_all_done(self) -> None:
        """Trouble is over and nothing more happens: nothing may be missing."""
        for episode in self.episodes.values():
            if not episode.is_over and not episode.is_vanishing:
                raise Violation(f"{episode.trajectory_id} never came to its end: {len(episode.answers)} turns taken")
        if self._groups:
            raise Violation(f"{sorted(self._groups)} were never handed out")

    @property
    def digest(self) -> str:
        """Of all that was handed out, in whatever order."""
        return hashlib.blake2b(repr(sorted(self.data.items())).encode(), digest_size=16).hexdigest()

    # Checks

    def _check_law(
        self, prompt: Prompt, start: int, token_ids: Sequence[int], logprobs: Sequence[float], versions: Iterable[str]
    ) -> None:
        if not token_ids:
            return
        placed = self._placed.get(prompt)
        if placed is None:
            raise Violation("tokens of a turn that was never placed")
        position = len(prompt) + start
        for token_id, logprob, version in zip(token_ids, logprobs, versions, strict=True):
            if (token_id, logprob) != drawn(placed.seed, position, int(version)):
                raise Violation(f"token {position} of a turn is not what version {version} draws there")
            position += 1
        self.checked_tokens += len(token_ids)

    def _check_lost(self, episode: Episode) -> None:
        if not episode.is_vanishing:
            raise Violation(f"{episode.trajectory_id} was lost, and its player was there")

    def _check_trajectory(self, episode: Episode, trajectory: Trajectory) -> None:
        name = episode.trajectory_id
        ids: tuple[int, ...] = ()
        mask: list[bool] = []
        versions: list[str] = []
        for prompt, answer in zip(episode.asked, episode.answers, strict=True):
            fresh = len(prompt) - len(ids)
            ids = prompt + answer
            mask += [False] * fresh + [True] * len(answer)
            versions += [NO_VERSION] * fresh + self._answers[prompt].versions
        if trajectory.token_ids != ids or list(trajectory.loss_mask) != mask:
            raise Violation(f"{name} was handed out with other tokens than its player saw")
        if list(trajectory.versions) != versions:
            raise Violation(f"{name} was handed out with other versions than its player was told")
        if self._scenario.is_strict and set(versions) - {NO_VERSION} != {str(self._published)}:
            raise Violation(f"{name} has tokens of {sorted(set(versions))}, and {self._published} was published")
        if trajectory.reward != episode.finish.reward:
            raise Violation(f"{name} has the reward {trajectory.reward}, not {episode.finish.reward}")
        if name in self.data:
            raise Violation(f"{name} was handed out twice")
        self.data[name] = hashlib.blake2b(msgspec.msgpack.encode(trajectory), digest_size=16).hexdigest()
