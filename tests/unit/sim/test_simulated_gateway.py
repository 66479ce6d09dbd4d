"""The gateway process of a simulated world: kills, restarts, stops and full disks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from rose.clock import VirtualClock, run_virtual
from rose.engines.base import Sampling
from rose.errors import Unavailable
from rose.gateway.sessions import Finish
from rose.sim.invariant_checker import EventLog, InvariantChecker, Violation
from rose.sim.network import NetworkPlace
from rose.sim.scenario import SimulatedEpisode, random_scenario
from rose.sim.simulated_gateway import SimulatedGateway
from rose.sim.weight_store import WeightStore

EPISODE = SimulatedEpisode("t0", 0, turns=1, seed=3, sampling=Sampling(max_tokens=4))


def run(story: Callable[[SimulatedGateway], Awaitable[None]]) -> None:
    async def live() -> None:
        scenario, store = random_scenario(1), WeightStore()
        log = EventLog(asyncio.get_running_loop().time)
        gateway = SimulatedGateway(scenario, store, InvariantChecker(scenario), log, random.Random(1))
        gateway.start()
        try:
            await story(gateway)
        finally:
            gateway.close()
            store.close()

    run_virtual(live(), VirtualClock())


def test_a_killed_gateway_refuses_clients_and_agents() -> None:
    async def story(gateway: SimulatedGateway) -> None:
        await gateway.work(lambda: gateway.begin(EPISODE, "g", 2))
        waiting = gateway.work(lambda: gateway.batch(1, 0, 60.0))
        await asyncio.sleep(1)
        gateway.kill()
        with pytest.raises(ConnectionResetError):
            await waiting
        with pytest.raises(ConnectionRefusedError):
            await gateway.work(lambda: gateway.finish("t0", Finish()))
        assert gateway.accept("a", NetworkPlace(), lambda frame: None) is None

    run(story)


def test_what_was_acknowledged_survives_a_kill() -> None:
    async def story(gateway: SimulatedGateway) -> None:
        await gateway.work(lambda: gateway.begin(EPISODE, "g", 1))
        await gateway.work(lambda: gateway.finish("t0", Finish(1.0)))
        gateway.kill()
        gateway.start()
        batch = await gateway.work(lambda: gateway.batch(1, 0, 1.0))
        assert batch is not None and [group.group for group in batch.groups] == ["g"]

    run(story)


def test_a_trajectory_that_finishes_twice_is_a_violation() -> None:
    async def story(gateway: SimulatedGateway) -> None:
        await gateway.work(lambda: gateway.begin(EPISODE, "g", 2))
        await gateway.work(lambda: gateway.finish("t0", Finish(1.0)))
        session = gateway._running_core().trajectories.get("t0")
        assert session is not None
        with pytest.raises(Violation, match="finished twice"):
            session.close(Finish(0.0))

    run(story)


def test_a_stopped_gateway_answers_when_it_continues() -> None:
    async def story(gateway: SimulatedGateway) -> None:
        gateway.gate.stop()
        answer = gateway.work(lambda: gateway.begin(EPISODE, "g", 2))
        await asyncio.sleep(5)
        assert not answer.done()
        gateway.gate.go_on()
        await answer

    run(story)


def test_a_full_disk_refuses_until_there_is_room() -> None:
    async def story(gateway: SimulatedGateway) -> None:
        gateway.write_to_disk(can=False)
        with pytest.raises(Unavailable, match="cannot write its ledger"):
            await gateway.work(lambda: gateway.begin(EPISODE, "g", 2))
        gateway.write_to_disk(can=True)
        await asyncio.sleep(1)
        await gateway.work(lambda: gateway.begin(EPISODE, "g", 2))

    run(story)
