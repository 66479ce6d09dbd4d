"""Whatever workers and the trainer do: a turn has tokens of the weights that it demands only, and ends in time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rose.api.worker_messages import CancelTurn, Join, NewVersion, TokensAdded, Turn, TurnTokens, VersionReady
from rose.engines.base import Request, Sampling, TokenEvent
from rose.errors import RoseError, Unavailable, VersionUnavailable
from rose.gateway.pool import Pool, PoolWorker
from rose.gateway.turn_scheduler import LOOK_PAST_MAX, Scheduler

WAIT_S, VERSION_WAIT_S, TOKENS = 8.0, 4.0, 4
NAMES, VERSIONS = st.sampled_from("abc"), st.integers(0, 5).map(str)
DEMANDS = st.one_of(
    st.just(Sampling(max_tokens=TOKENS)),
    VERSIONS.map(lambda version: Sampling(max_tokens=TOKENS, weight_version=version)),
    VERSIONS.map(lambda version: Sampling(max_tokens=TOKENS, min_weight_version=version)),
)
OPERATIONS = st.one_of(
    st.tuples(st.just("submit"), DEMANDS),
    st.tuples(st.just("publish")),
    st.tuples(st.just("load"), NAMES),
    st.tuples(st.just("load silently"), NAMES),
    st.tuples(st.just("step"), NAMES),
    st.tuples(st.just("leave"), NAMES),
    st.tuples(st.just("join"), NAMES),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 3.0])),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
)


@dataclass
class Reader:
    sampling: Sampling
    cluster: Cluster
    versions: list[str] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)

    def put(self, event: TokenEvent) -> None:
        assert not self.ends
        self.versions += [event.version] * len(event.token_ids)
        self.ends += [event.finish_reason] if event.finish_reason is not None else []

    def fail(self, error: RoseError) -> None:
        assert not self.ends
        if isinstance(error, VersionUnavailable):
            assert self.sampling.demands_version and error.newest == str(self.cluster.published)
        self.ends.append(error)


class Cluster:
    """A scheduler and workers that do one thing at a time. `runs` is what a worker really runs."""

    def __init__(self, max_staleness: int) -> None:
        self.pool = Pool("model", 1e9, max_staleness=max_staleness)
        self.scheduler = Scheduler(self.pool, waiting_max=1000, wait_s=WAIT_S, version_wait_s=VERSION_WAIT_S)
        self.now_s, self.published = 0.0, 0
        self.workers: dict[str, PoolWorker] = {}
        self.runs: dict[str, str] = {}
        self.turns: dict[str, dict[int, Turn]] = {}
        self.readers: dict[str, Reader] = {}
        self.began_s: dict[str, float] = {}

    def submit(self, sampling: Sampling) -> None:
        name = f"t{len(self.readers)}"
        self.readers[name], self.began_s[name] = Reader(sampling, self), self.now_s
        self.scheduler.submit(Request(name, (1, 2), sampling), self.readers[name], self.now_s)

    def publish(self) -> None:
        self.published += 1
        self.pool.publish(NewVersion(str(self.published), "folder"), self.now_s)
        for worker in self.pool:
            self.scheduler.update_worker(worker, self.now_s)

    def join(self, name: str) -> None:
        if name not in self.workers:
            self.runs[name], self.turns[name] = str(self.published), {}
            join = Join(name, "dedicated", "model", self.runs[name], 2, 1000, 512)
            self.workers[name] = self.pool.join(join, lambda message: self.receive(name, message), self.now_s)
            self.scheduler.update_worker(self.workers[name], self.now_s)

    def receive(self, name: str, message: Any) -> None:
        if isinstance(message, Turn):
            self.turns[name][message.attempt_id] = message
        elif isinstance(message, CancelTurn):
            self.turns[name].pop(message.attempt_id, None)

    def load(self, name: str, *, is_silent: bool = False) -> None:
        """A worker runs the newest version; the gateway may hear of it later than of the next tokens."""
        if name in self.workers:
            self.runs[name] = str(self.published)
            if not is_silent:
                self.pool.record_version(self.workers[name], VersionReady(self.runs[name]), self.now_s)
                self.scheduler.update_worker(self.workers[name], self.now_s)

    def step(self, name: str) -> None:
        for attempt_id, turn in list(self.turns[name].items()) if name in self.workers else ():
            partial = len(turn.request.partial.token_ids)
            piece = TurnTokens(attempt_id, (7,), (-0.5,), self.runs[name], "stop" if partial else None)
            if partial:
                del self.turns[name][attempt_id]
            self.scheduler.receive_tokens(self.workers[name], TokensAdded((piece,)), self.now_s)

    def leave(self, name: str) -> None:
        worker = self.workers.pop(name, None)
        if worker is not None and self.pool.remove(worker):
            self.scheduler.remove_worker(worker, self.now_s)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.scheduler.place(self.now_s)
        self.scheduler.expire(self.now_s)

    def cancel(self, number: int) -> None:
        self.scheduler.cancel([f"t{number}"], self.now_s)
        if reader := self.readers.get(f"t{number}"):
            reader.ends = reader.ends or ["cancelled"]

    def check(self) -> None:
        for reader in self.readers.values():
            sampling = reader.sampling
            if sampling.weight_version:
                assert set(reader.versions) <= {sampling.weight_version}
            if sampling.min_weight_version:
                assert all(int(version) >= int(sampling.min_weight_version) for version in reader.versions)
        open_turns = [name for name, reader in self.readers.items() if not reader.ends]
        assert sorted(self.scheduler._turns) == sorted(open_turns)
        held = [*self.scheduler._queue, *self.scheduler._queue_again, *self.scheduler._queue_demanding]
        waiting = [entry[-1] for entry in (*held, *self.scheduler._versionless.values()) if entry[-1].is_waiting]
        assert len(waiting) == self.scheduler.waiting == len({id(turn) for turn in waiting})
        assert all(self.scheduler.has(turn.request.request_id) for turn in waiting)

    def check_nothing_is_late(self) -> None:
        """Without progress every turn ends: with 409 if nothing has its weights, else with 503."""
        for name in list(self.workers):
            self.leave(name)
        self.wait(max(WAIT_S, VERSION_WAIT_S) + 1)
        for reader in self.readers.values():
            assert reader.ends
            if isinstance(reader.ends[0], Unavailable):
                assert not reader.sampling.demands_version or self.now_s > WAIT_S


@given(st.integers(0, 1), st.lists(OPERATIONS, max_size=60))
def test_tokens_are_of_demanded_weights_and_turns_end(max_staleness: int, operations: list[tuple[Any, ...]]) -> None:
    cluster = Cluster(max_staleness)
    for kind, *values in operations:
        match kind:
            case "load silently":
                cluster.load(*values, is_silent=True)
            case _:
                getattr(cluster, kind)(*values)
        cluster.check()
    cluster.check_nothing_is_late()


@given(st.lists(DEMANDS, max_size=40), st.integers(1, 4))
def test_a_worker_with_room_takes_what_it_may(demands: list[Sampling], published: int) -> None:
    """However many turns wait for weights that nothing runs."""
    cluster = Cluster(0)
    for _ in range(published):
        cluster.publish()
    for sampling in [*[Sampling(max_tokens=TOKENS, weight_version="99")] * (LOOK_PAST_MAX + 1), *demands]:
        cluster.submit(sampling)
    cluster.join("a")
    able = [s for s in demands if s.weight_version in ("", str(published))]
    able = [s for s in able if int(s.min_weight_version or 0) <= published]
    assert len(cluster.turns["a"]) == min(2, len(able))
