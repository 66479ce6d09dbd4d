"""The whole control plane in virtual time: seeds for as long as a time allows, and worlds that must be caught.

`rose.sim` checks every word as it is said; a test here only has to run worlds and look at the verdict. A gateway that
is broken on purpose shows that the invariant checker detects it.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from typing import Any, ClassVar

import msgspec
import pytest

from rose.api.frames import LENGTH_BYTES, FrameReader
from rose.api.worker_messages import Heartbeat, Turn
from rose.gateway.gateway_core import GatewayCore
from rose.gateway.sessions import Finish
from rose.sim.scenario import Scenario, Traffic, random_scenario
from rose.sim.simulated_gateway import SimulatedGateway, WatchedLedger
from rose.sim.world import WorldReport, simulate
from rose.worker.heartbeats import HeartbeatBuilder

SIMULATE_S = float(os.environ.get("ROSE_SIMULATE_CONTROL_S", "30"))
SEEDS_MIN = 12
SEEDS_TO_CATCH = 24
SEEDS_KEPT = (1, 12, 35, 62, 107, 116, 239, 558)

BUSY_SERVING: dict[str, Any] = {
    "dedicated": 1, "borrowed": 1, "mode": "idle", "traffic": Traffic(2.0, 24, 40, burst=4.0), "pages": 120,
    "faults_per_s": 0.0, "vanishing": 0.0, "router": "cost", "borrowed_max": None, "dedicated_max": None,
    "max_concurrency": 4, "tokens_max": 96, "wait_s": 30.0, "lease_s": 5.0, "max_waiting": 64,
}  # fmt: skip


def check(report: WorldReport) -> None:
    assert report.is_fine, "\n".join([report.violation, *report.last_lines[-20:], report.scenario.command])


def test_every_seed_keeps_every_invariant(capsys):
    """As many as a time allows, from 0 up; the first that fails is named, and belongs into SEEDS_KEPT."""
    begun_s, seed = time.monotonic(), 0
    totals: dict[str, int] = {}
    while time.monotonic() - begun_s < SIMULATE_S or seed < SEEDS_MIN:
        report = simulate(random_scenario(seed))
        check(report)
        totals = {name: totals.get(name, 0) + count for name, count in report.counts.items()}
        seed += 1
    with capsys.disabled():
        shown = ("trajectories", "placed", "evicted", "lost", "stalled", "restarts")
        print(f" {seed} seeds,", ", ".join(f"{totals[name]} {name}" for name in shown), end="")
    assert min(totals[name] for name in ("trajectories", "evicted", "lost", "stalled", "restarts")) > 0


@pytest.mark.parametrize("seed", SEEDS_KEPT)
def test_a_seed_that_once_failed(seed):
    check(simulate(random_scenario(seed)))


@pytest.mark.slow
def test_an_hour_of_faults():
    for seed in range(100_000, 100_006):
        check(simulate(random_scenario(seed, minutes=10)))


# One seed, one story


def digests(seed: int) -> str:
    report = simulate(random_scenario(seed))
    return f"{report.story_digest} {sorted(report.data.items())}"


def test_a_seed_is_deterministic():
    """In a process of its own, too, where sets are walked in another order."""
    seed = 5
    script = f"from tests.sim.test_control import digests; print(digests({seed}))"
    told = [digests(seed), digests(seed)]
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        found = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=100
        )
        told.append(found.stdout.strip())
    assert len(set(told)) == 1


def strict(seed: int, **changes: Any) -> Scenario:
    """Synchronous and on policy, with as many steps as fit into the time, faults or not."""
    known = random_scenario(seed)
    return dataclasses.replace(known, ahead=0, max_staleness=0, vanishing=0.0, **changes)


@pytest.mark.parametrize("seed", [1, 4, 16])
def test_training_data_does_not_depend_on_faults(seed):
    """Trouble costs time, so there are fewer steps; each of them is the same to the last bit."""
    calm = simulate_data(strict(seed, faults_per_s=0.0))
    other = simulate_data(strict(seed, faults_per_s=1.0, dedicated=2, borrowed=2, max_concurrency=3, router="paper"))
    both = calm.keys() & other.keys()
    assert len(both) >= 4
    assert {name: calm[name] for name in both} == {name: other[name] for name in both}


def simulate_data(scenario: Scenario) -> dict[str, str]:
    report = simulate(scenario)
    check(report)
    return report.data


# Gates


class ReportsStalls(SimulatedGateway):
    """Notes what workers say of their gates, and what becomes of their turns."""

    told: ClassVar[list[float | None]] = []

    def _receive_message(self, link, message):
        super()._receive_message(link, message)
        if isinstance(message, Heartbeat) and link.worker.kind == "borrowed":
            view = self._running_core().pool.view(link.worker)
            assert message.shut_s is None or view.blocked_since_s is not None, "the router knows what the device said"
            self.told.append(message.shut_s)


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "not told"])
def test_a_turn_on_a_blocked_worker_does_not_count_as_stalled(is_told, monkeypatch):
    """Nothing goes wrong in this world but that users keep one of two devices busy."""
    if not is_told:
        monkeypatch.setattr(HeartbeatBuilder, "_blocked_s", lambda self, now_s: None)
    ReportsStalls.told.clear()
    scenario = dataclasses.replace(random_scenario(0), **BUSY_SERVING)
    report = simulate(scenario, host=ReportsStalls)
    check(report)
    shut = [shut_s for shut_s in ReportsStalls.told if shut_s is not None]
    assert bool(shut) == is_told
    assert (report.counts["stalled"] == 0) == is_told


# Broken gateways are detected


class BrokenGateway(SimulatedGateway):
    """The mistakes that a gateway could make."""

    def core(self, ledger: WatchedLedger) -> GatewayCore:
        return self.broken(super().core(ledger))

    def broken(self, core: GatewayCore) -> GatewayCore:
        return core


class AcceptsDeadWorkers(BrokenGateway):
    """Takes what a worker says of turns that were taken from it."""

    def broken(self, core: GatewayCore) -> GatewayCore:
        turns: dict[int, Any] = {}
        unseat, heard, scheduler = core.scheduler._unplace, core.receive, core.scheduler

        def unseating(turn, *rest):
            turns[turn.attempt_id] = turn
            unseat(turn, *rest)

        def hearing(member, message, now_s):
            heard(member, message, now_s)
            for piece in getattr(message, "pieces", ()):
                turn = turns.get(piece.attempt_id)
                if turn is not None and not turn.is_over:
                    scheduler._take(turn, member, piece, now_s)

        core.scheduler._unplace, core.receive = unseating, hearing  # type: ignore[method-assign]
        return core


class ForgetsPartialOutput(BrokenGateway):
    """Begins turns anew when it is started again."""

    def core(self, ledger: WatchedLedger) -> GatewayCore:
        for number, entries in self._connection.execute("SELECT id, entries FROM log").fetchall():
            begun = [entry for entry in FrameReader().push(entries) if msgspec.msgpack.decode(entry)[0] == "b"]
            rest = b"".join(len(entry).to_bytes(LENGTH_BYTES, "little") + entry for entry in begun)
            self._connection.execute("UPDATE log SET entries = ? WHERE id = ?", (rest, number))
        return super().core(ledger)


class SkipsHashChecks(BrokenGateway):
    """Places turns on workers whose weights are not what they say."""

    def broken(self, core: GatewayCore) -> GatewayCore:
        core.pool.has_wrong_hash = lambda member: False  # type: ignore[method-assign]
        core.pool.is_verified = lambda member, version: True  # type: ignore[method-assign]
        return core


class AcceptsUnverifiedHashes(BrokenGateway):
    """Takes tokens of new weights before their hash is known."""

    def broken(self, core: GatewayCore) -> GatewayCore:
        is_proved = core.pool.is_verified
        core.pool.is_verified = lambda *known: is_proved(*known) is not False  # type: ignore[method-assign]
        return core


class IgnoresCaps(BrokenGateway):
    """Uses every device that there is."""

    def broken(self, core: GatewayCore) -> GatewayCore:
        core.provisioning.update = lambda now_s: None  # type: ignore[method-assign]
        return core


class NeverReturnsDevices(BrokenGateway):
    """Borrows, and never gives back."""

    def broken(self, core: GatewayCore) -> GatewayCore:
        core.provisioning._provision._returns = lambda *known: iter(())  # type: ignore[method-assign]
        return core


class IgnoresOwners(BrokenGateway):
    """Offers turns to devices that are held back."""

    def broken(self, core: GatewayCore) -> GatewayCore:
        core.pool.accepts_turns = lambda member: True  # type: ignore[method-assign]
        return core


class IgnoresStalls(BrokenGateway):
    """Blames workers for what serving does."""

    def broken(self, core: GatewayCore) -> GatewayCore:
        heard = core.pool.record_heartbeat

        def deaf(member, beat, now_s):
            heard(member, msgspec.structs.replace(beat, shut_s=None), now_s)
            member.heartbeat = beat

        core.pool.record_heartbeat = deaf  # type: ignore[method-assign]
        return core


class AcceptsAnyVersion(BrokenGateway):
    """Places turns on workers that are behind, and takes what they draw."""

    def broken(self, core: GatewayCore) -> GatewayCore:
        core.pool.may_run = lambda member: True  # type: ignore[method-assign]
        core.pool.is_since = lambda version, oldest: True  # type: ignore[method-assign]
        return core

    def _send(self, link, message):
        is_turn = isinstance(message, Turn)
        super()._send(link, msgspec.structs.replace(message, version=None) if is_turn else message)


class AnswersBeforeTheCommit(BrokenGateway):
    """Tells people what is not durable yet."""

    def broken(self, core: GatewayCore) -> GatewayCore:
        core.ledger.when_durable = lambda told: told(None)  # type: ignore[method-assign]
        return core


class IgnoresRepetition(BrokenGateway):
    """Takes a request that comes again for a new one."""

    def broken(self, core: GatewayCore) -> GatewayCore:
        opening = core.trajectories.open

        def forgetful(trajectory_id, now_s):
            session = opening(trajectory_id, now_s)
            session.by_digest.clear()
            return session

        core.trajectories.open = forgetful  # type: ignore[method-assign]
        return core


class LosesTurns(BrokenGateway):
    """Does not place the turns of a lost worker again."""

    def broken(self, core: GatewayCore) -> GatewayCore:
        put_back = core.scheduler._put_back

        def dropping(turn, outcome, now_s):
            if outcome == "lost":
                core.scheduler.counts.failed += 1
                core.scheduler._end(turn, "cancelled", now_s)
            else:
                put_back(turn, outcome, now_s)

        core.scheduler._put_back = dropping  # type: ignore[method-assign]
        return core


class FinishesTwice(BrokenGateway):
    """Lets a trajectory that has finished finish again."""

    def broken(self, core: GatewayCore) -> GatewayCore:
        finish = core.trajectories.finish

        def again(trajectory_id, outcome, now_s):
            session = core.trajectories._known(trajectory_id)
            if session is not None and session.finish is not None:
                session.close(Finish(outcome.reward))
            return finish(trajectory_id, outcome, now_s)

        core.trajectories.finish = again  # type: ignore[method-assign]
        return core


STRICT = {"ahead": 0, "max_staleness": 0}
SWAPPED_IN_MID_TURN = {
    "ahead": 1, "tokens_max": 96, "think_s": 0.01, "max_concurrency": 8, "dedicated": 2, "kv_blocks": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    "host, changes",
    [
        (AcceptsDeadWorkers, {}),
        (ForgetsPartialOutput, {}),
        (SkipsHashChecks, STRICT),
        (AcceptsUnverifiedHashes, SWAPPED_IN_MID_TURN),
        (IgnoresCaps, {"borrowed": 3, "borrowed_max": 1}),
        (NeverReturnsDevices, {"borrowed": 2, "return_after_s": 0.5}),
        (IgnoresOwners, {"borrowed": 2}),
        (IgnoresStalls, {"borrowed": 2, "dedicated": 1}),
        (AcceptsAnyVersion, {}),
        (AnswersBeforeTheCommit, {}),
        (IgnoresRepetition, {}),
        (LosesTurns, {"faults_per_s": 0.4}),
        (FinishesTwice, {}),
    ],
)
def test_a_broken_gateway_is_caught(host, changes):
    """Within a few seeds, whole ones of which pass when it is mended."""
    for seed in range(SEEDS_TO_CATCH):
        scenario = dataclasses.replace(random_scenario(seed), **({"faults_per_s": 1.0} | changes))
        report = simulate(scenario, host=host)
        if not report.is_fine:
            check(simulate(scenario))
            return
    pytest.fail(f"{host.__name__} was not caught in {SEEDS_TO_CATCH} seeds")
