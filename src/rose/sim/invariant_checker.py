"""The event log of a simulated world, and its invariants, checked at every event against records of their own.

docs/simulation.md lists the invariants. An accepted token must be the one that an undisturbed engine with the reported
weights samples there (`token_oracle`). Tokens that are not durable may be lost with the gateway, but not after a client
received them.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from rose.api.trajectories import Batch
from rose.core.trajectory import NO_VERSION, Trajectory
from rose.engines.base import Request
from rose.errors import RequestRefused
from rose.gateway.sessions import Finish
from rose.sim.scenario import ReceivedAnswer, Scenario, SimulatedEpisode, versions_of
from rose.sim.token_oracle import is_complete_answer, oracle_token

LINES_KEPT = 60


class EventLog:
    """The events of a world, line by line, and a digest of all lines. `listen` receives every line."""

    def __init__(self, now_s: Callable[[], float], listen: Callable[[str], None] | None = None) -> None:
        self.last: deque[str] = deque(maxlen=LINES_KEPT)
        self._now_s, self._listen = now_s, listen
        self._digest = hashlib.blake2b(digest_size=16)

    def record(self, actor: str, event: str) -> None:
        line = f"{self._now_s():10.4f}  {actor:<12} {event}"
        self.last.append(line)
        self._digest.update(line.encode())
        if self._listen is not None:
            self._listen(line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


class Violation(AssertionError):
    """A violated invariant."""


Prompt = tuple[int, ...]
"""Prompts identify turns: all turns of a world have different ones."""


@dataclass(slots=True)
class GatewayRecord:
    """Turns and trajectories that the gateway holds."""

    tokens: dict[Prompt, int] = field(default_factory=dict)
    ended: set[Prompt] = field(default_factory=set)
    finished: dict[str, Finish] = field(default_factory=dict)


@dataclass(slots=True)
class TurnPlacement:
    """The newest placement of a turn."""

    attempt_id: int
    seed: int
    oldest: int  # the oldest version it may run on


class InvariantChecker:
    """The checker of a world; the parts of the world report every event to it."""

    def __init__(self, scenario: Scenario) -> None:
        self.checked_tokens = 0
        self.episodes: dict[str, SimulatedEpisode] = {}
        self.data: dict[str, str] = {}  # digests of delivered trajectories
        self._scenario = scenario
        self._durable, self._pending = GatewayRecord(), GatewayRecord()
        self._placed: dict[Prompt, TurnPlacement] = {}
        self._groups: dict[str, list[str]] = {}
        self._answers: dict[Prompt, ReceivedAnswer] = {}
        self._batches: dict[int, bytes] = {}
        self._published = self._acknowledged = 0

    # The trainer

    def publishing(self, version: str) -> None:
        self._published = int(version)

    def published(self, version: str) -> None:
        """Record that the trainer received the acknowledgement."""
        self._acknowledged = int(version)

    def began(self, episode: SimulatedEpisode, group: str) -> None:
        self.episodes[episode.trajectory_id] = episode
        self._groups.setdefault(group, []).append(episode.trajectory_id)

    def sent(self, batch: Batch) -> None:
        """Check a batch that the gateway sends: it never changes."""
        encoded = msgspec.msgpack.encode(batch)
        if self._batches.setdefault(batch.batch, encoded) != encoded:
            raise Violation(f"batch {batch.batch} differs when requested again")

    def received(self, batch: Batch) -> None:
        """Check a batch that the trainer received: complete groups, each delivered once."""
        for group in batch.groups:
            members = self._groups.pop(group.group, None)
            if members is None:
                raise Violation(f"{group.group} was delivered twice, or never begun")
            delivered = [trajectory.trajectory_id for trajectory in group.trajectories]
            lost = set(members) - set(delivered)
            if len(delivered) != len(set(delivered)) or set(delivered) - set(members) or group.lost != len(lost):
                raise Violation(f"{group.group} has {members}, but {delivered} with {group.lost} lost were delivered")
            for name in lost:
                self._check_lost(self.episodes[name])
            for trajectory in group.trajectories:
                self._check_trajectory(self.episodes[trajectory.trajectory_id], trajectory)

    # The players

    def answered(self, episode: SimulatedEpisode, prompt: Prompt, answered: ReceivedAnswer) -> None:
        known = self._answers.setdefault(prompt, answered)
        if known != answered:
            raise Violation(f"{episode.trajectory_id} repeated its request and got another answer")
        self._check_tokens(prompt, 0, answered.token_ids, answered.logprobs, versions_of(answered.spans))
        if not is_complete_answer(answered.token_ids, episode.sampling):
            raise Violation(f"{episode.trajectory_id} got an incomplete answer: {answered.token_ids}")

    def finished(self, episode: SimulatedEpisode) -> None:
        if episode.trajectory_id not in self._durable.finished:
            raise Violation(f"{episode.trajectory_id} got an acknowledged finish that the ledger does not hold")

    def refused(self, episode: SimulatedEpisode, error: RequestRefused) -> None:
        finish = self._durable.finished.get(episode.trajectory_id)
        if finish is None or not finish.is_lost:
            raise Violation(f"{episode.trajectory_id} was refused: {error.what}")
        episode.is_lost = True
        self._check_lost(episode)

    # The gateway

    def placed(self, request: Request, attempt_id: int) -> None:
        prompt, partial = request.prompt_ids, request.partial
        known = self._placed.get(prompt)
        if known is not None and known.seed != request.sampling.seed:
            raise Violation(f"a turn got another seed when it was placed again (attempt {attempt_id})")
        if known is not None and known.attempt_id >= attempt_id:
            raise Violation(f"attempt {attempt_id} comes after {known.attempt_id}")
        oldest = self._acknowledged - self._scenario.max_staleness
        self._placed[prompt] = TurnPlacement(attempt_id, request.sampling.seed, oldest)
        kept = self._known_tokens(prompt)
        if len(partial.token_ids) != kept:
            raise Violation(
                f"attempt {attempt_id} continues from {len(partial.token_ids)} tokens, but {kept} were received"
            )
        if prompt in self._durable.ended or prompt in self._pending.ended:
            raise Violation(f"attempt {attempt_id} runs a turn that had ended")
        self._check_tokens(prompt, 0, partial.token_ids, partial.logprobs, versions_of(partial.spans))

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
        """Check tokens of a turn that the gateway accepted."""
        kept = self._known_tokens(prompt)
        if start != kept:
            raise Violation(f"tokens from {start} on were accepted where {kept} are known")
        self._check_tokens(prompt, start, token_ids, logprobs, [version] * len(token_ids))
        if token_ids and int(version) < self._placed[prompt].oldest:
            raise Violation(f"tokens of version {version}, {self._placed[prompt].oldest} is the oldest allowed")
        self._pending.tokens[prompt] = start + len(token_ids)
        if ends:
            self._pending.ended.add(prompt)

    def ended(self, trajectory_id: str, finish: Finish) -> None:
        """Check that the gateway finishes a trajectory once."""
        if trajectory_id in self._durable.finished or trajectory_id in self._pending.finished:
            raise Violation(f"{trajectory_id} finished twice")
        self._pending.finished[trajectory_id] = finish

    def settled(self) -> None:
        """Record that all accepted tokens are durable."""
        self._durable.tokens.update(self._pending.tokens)
        self._durable.ended |= self._pending.ended
        self._durable.finished.update(self._pending.finished)
        self._pending = GatewayRecord()

    def died(self) -> None:
        """Drop what was not durable when the gateway died."""
        self._pending = GatewayRecord()

    # The end

    def check_all_done(self) -> None:
        """Check that every trajectory ended and every group was delivered."""
        for episode in self.episodes.values():
            if not episode.is_over and not episode.is_vanishing:
                raise Violation(f"{episode.trajectory_id} never ended: {len(episode.answers)} turns taken")
        if self._groups:
            raise Violation(f"{sorted(self._groups)} were never delivered")

    # Checks

    def _known_tokens(self, prompt: Prompt) -> int:
        return max(self._durable.tokens.get(prompt, 0), self._pending.tokens.get(prompt, 0))

    def _check_tokens(
        self, prompt: Prompt, start: int, token_ids: Sequence[int], logprobs: Sequence[float], versions: Iterable[str]
    ) -> None:
        if not token_ids:
            return
        placed = self._placed.get(prompt)
        if placed is None:
            raise Violation("tokens of a turn that was never placed")
        position = len(prompt) + start
        for token_id, logprob, version in zip(token_ids, logprobs, versions, strict=True):
            if (token_id, logprob) != oracle_token(placed.seed, position, int(version)):
                raise Violation(f"token {position} of a turn is not what version {version} draws there")
            position += 1
        self.checked_tokens += len(token_ids)

    def _check_lost(self, episode: SimulatedEpisode) -> None:
        if not episode.is_vanishing:
            raise Violation(f"{episode.trajectory_id} was lost, but its player had not vanished")

    def _check_trajectory(self, episode: SimulatedEpisode, trajectory: Trajectory) -> None:
        name = episode.trajectory_id
        ids: tuple[int, ...] = ()
        mask: list[bool] = []
        versions: list[str] = []
        for prompt, answer in zip(episode.asked, episode.answers, strict=True):
            fresh = len(prompt) - len(ids)
            ids = prompt + answer
            mask += [False] * fresh + [True] * len(answer)
            versions += [NO_VERSION] * fresh + versions_of(self._answers[prompt].spans)
        if trajectory.token_ids != ids or list(trajectory.loss_mask) != mask:
            raise Violation(f"{name} was delivered with other tokens than its player received")
        if list(trajectory.versions) != versions:
            raise Violation(f"{name} was delivered with other versions than its player received")
        if self._scenario.is_strict and set(versions) - {NO_VERSION} != {str(self._published)}:
            raise Violation(f"{name} has tokens of {sorted(set(versions))}, and {self._published} was published")
        if trajectory.reward != episode.finish.reward:
            raise Violation(f"{name} has the reward {trajectory.reward}, not {episode.finish.reward}")
        if name in self.data:
            raise Violation(f"{name} was delivered twice")
        self.data[name] = hashlib.blake2b(msgspec.msgpack.encode(trajectory), digest_size=16).hexdigest()
