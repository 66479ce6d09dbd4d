"""Fault injection: what goes wrong in a simulated world and when, drawn from the seed, and healed after a while.

Every fault is one that a real cluster has. None is malicious, except for a worker that runs other weights than it
reports; and it reports the hash of what it runs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from rose.sim.borrowed_device import LentDevice
from rose.sim.invariant_checker import EventLog
from rose.sim.network import NetworkFaults, NetworkGate
from rose.sim.scenario import Scenario
from rose.sim.simulated_agent import SimulatedAgent
from rose.sim.simulated_gateway import SimulatedGateway
from rose.sim.simulated_handle import DedicatedDevice, SimulatedHandle
from rose.sim.weight_store import WeightStore

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class Machine:
    """The processes of a device. The engine dies with the agent on a dedicated device, not on a borrowed one."""

    def __init__(
        self,
        name: str,
        handle: SimulatedHandle,
        agent: SimulatedAgent,
        spawn: Spawn,
        log: EventLog,
        *,
        is_borrowed: bool,
    ) -> None:
        self.name, self.handle, self.agent, self._is_borrowed = name, handle, agent, is_borrowed
        self._spawn, self._log = spawn, log
        self._agent_task: asyncio.Task[None] | None = None
        self._engine_task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._agent_task is not None and self._engine_task is not None

    @property
    def was_dismissed(self) -> bool:
        """Return whether its agent has left for good."""
        return self._agent_task is not None and self._agent_task.done()

    def start(self) -> None:
        """Start the processes that do not run."""
        if self._engine_task is None:
            self.handle.restart()
            self._engine_task = self._spawn(self.handle.run(), f"engine of {self.name}")
        if self._agent_task is None or self._agent_task.done():
            self.agent.has_no_power = False
            self._agent_task = self._spawn(self.agent.run(), f"agent of {self.name}")
        self._log.record(self.name, "runs")

    def kill_agent(self) -> None:
        self._log.record(self.name, "agent is killed")
        self._end_agent()
        if not self._is_borrowed:
            self._end_engine("its front was killed")

    def kill_engine(self) -> None:
        self._log.record(self.name, "engine is killed")
        self._end_engine("the engine process was killed")

    def lose_power(self) -> None:
        """End both processes without closing connections."""
        self._log.record(self.name, "loses its power")
        self.agent.has_no_power = True
        self._end_agent()
        self._end_engine("there is no power")

    def _end_agent(self) -> None:
        if self._agent_task is not None:
            self.agent.gate.clear()
            self._agent_task.cancel()
            self._agent_task = None

    def _end_engine(self, why: str) -> None:
        if self._engine_task is not None:
            self._engine_task.cancel()
            self._engine_task = None
            self.handle.die(why)


START_TRIES = 20


@dataclass(slots=True)
class FaultInjector:
    """The faults of a world: `run` injects them until it is cancelled, `end` heals all at once."""

    machines: Sequence[Machine]
    gateway: SimulatedGateway
    network_faults: NetworkFaults
    store: WeightStore
    chance: random.Random
    log: EventLog
    scenario: Scenario
    _open: dict[int, Callable[[], None]] = field(default_factory=dict)
    _count: int = 0

    async def run(self) -> None:
        kinds, weights = zip(*KINDS.items(), strict=True)
        while self.scenario.faults_per_s:
            await asyncio.sleep(self.chance.expovariate(self.scenario.faults_per_s))
            kind = self.chance.choices(kinds, weights)[0]
            kind(self)

    def end(self) -> None:
        self.log.record("world", "has no more faults")
        for number in list(self._open):
            self._heal(number)

    def for_a_while(self, seconds: float, heal: Callable[[], None]) -> None:
        self._count += 1
        self._open[self._count] = heal
        asyncio.get_running_loop().call_later(seconds, self._heal, self._count)

    def _heal(self, number: int) -> None:
        heal = self._open.pop(number, None)
        if heal is not None:
            heal()

    # Devices

    def kill_agent(self) -> None:
        self._crash(Machine.kill_agent, 0.2, 4.0)

    def kill_engine(self) -> None:
        self._crash(Machine.kill_engine, 0.2, 4.0)

    def lose_power(self) -> None:
        self._crash(Machine.lose_power, 0.5, 8.0)

    def _crash(self, crash: Callable[[Machine], None], shortest_s: float, longest_s: float) -> None:
        machine = self._machine()
        crash(machine)
        self.for_a_while(self.chance.uniform(shortest_s, longest_s), machine.start)

    def stop_agent(self) -> None:
        machine = self._machine()
        self._stop(f"{machine.name} agent", machine.agent.gate, self.chance.uniform(0.3, 8.0))

    def stop_engine(self) -> None:
        machine = self._machine()
        self._stop(f"{machine.name} engine", machine.handle.gate, self.chance.uniform(0.3, 8.0))

    def _stop(self, name: str, gate: NetworkGate, seconds: float) -> None:
        self.log.record(name, f"is stopped for {seconds:.2f} s")
        gate.stop()
        self.for_a_while(seconds, gate.go_on)

    def slow_down(self) -> None:
        handle = self._machine().handle
        if isinstance(handle, DedicatedDevice):
            handle.slower = self.chance.choice([3.0, 20.0])
            self.for_a_while(self.chance.uniform(1.0, 8.0), lambda: setattr(handle, "slower", 1.0))

    def cut_off(self) -> None:
        machine, seconds = self._machine(), self.chance.choice([0.5, 2.0, 6.0, 16.0]) * self.chance.uniform(0.7, 1.3)
        self.log.record(machine.name, f"network is cut for {seconds:.2f} s")
        machine.agent.place.cut_off()
        self.for_a_while(seconds, machine.agent.place.heal)

    def jump_clock(self) -> None:
        machine = self._machine()
        machine.agent.clock_off_s += self.chance.choice([-3600.0, -0.4, 0.4, 3600.0])
        self.log.record(machine.name, "clock jumps")

    # Owners and operators

    def reclaim_storm(self) -> None:
        """Reclaim all borrowed devices at once, by serving load or by their owners."""
        is_order, seconds = self.chance.random() < 0.5, self.chance.uniform(0.5, 6.0)
        action: Literal["pause", "drain"] = "pause" if self.chance.random() < 0.3 else "drain"
        for machine in self.machines:
            device = machine.handle
            if not isinstance(device, LentDevice) or not machine.is_running:
                continue
            if is_order:
                self.log.record(machine.name, f"owner: {action}, for {seconds:.2f} s")
                device.control(action)
                self.for_a_while(seconds, partial(device.control, "resume"))
            else:
                requests = self.chance.randint(4, 16)
                self.log.record(machine.name, f"gets {requests} serving requests at once")
                device.spike(requests, asyncio.get_running_loop().time())

    def drain(self) -> None:
        """Drain a worker, and start it again later."""
        machine = self._machine()
        self.gateway.drain(machine.name)
        self.for_a_while(self.chance.uniform(1.0, 6.0), lambda: self._start_again(machine))

    def _start_again(self, machine: Machine, tries: int = START_TRIES) -> None:
        """Start a drained worker; its drain may arrive late or never."""
        if machine.was_dismissed:
            machine.start()
        elif tries:
            self.for_a_while(1.0, lambda: self._start_again(machine, tries - 1))

    # Weights

    def lag(self) -> None:
        """Make a worker slow to load new weights."""
        machine, before = self._machine(), (0.05, 0.4)
        machine.agent.loading_s = (3.0, 12.0)
        self.log.record(machine.name, "loads new weights slowly")
        self.for_a_while(self.chance.uniform(2.0, 15.0), lambda: setattr(machine.agent, "loading_s", before))

    def lie(self) -> None:
        """Make a worker report a new version without loading it, with a delayed hash."""
        machine = self._machine()
        name, handle = machine.name, machine.handle
        self.store.liars.add(name)
        handle.reply_s = self.chance.choice([0.0, 0.3, 1.0])
        self.log.record(name, "reports weights that it does not run")
        self.for_a_while(self.chance.uniform(2.0, 15.0), lambda: self.store.liars.discard(name))
        self.for_a_while(self.chance.uniform(2.0, 15.0), lambda: setattr(handle, "reply_s", 0.0))

    def close_relay(self) -> None:
        self.store.relay.is_closed = True
        self.log.record("relay", "is unreachable")
        self.for_a_while(self.chance.uniform(0.5, 6.0), lambda: setattr(self.store.relay, "is_closed", False))

    # The gateway and the network

    def kill_gateway(self) -> None:
        gateway = self.gateway.pick()
        gateway.kill()
        self.for_a_while(self.chance.uniform(0.05, 3.0), gateway.start)

    def stop_gateway(self) -> None:
        self._stop("gateway", self.gateway.pick().gate, self.chance.uniform(0.2, 6.0))

    def fill_disk(self) -> None:
        """Make the gateway's ledger read-only."""
        self.log.record("gateway", "cannot write to its disk")
        gateway = self.gateway.pick()
        gateway.write_to_disk(can=False)
        self.for_a_while(self.chance.uniform(0.2, 3.0), lambda: gateway.write_to_disk(can=True))

    def storm(self) -> None:
        """Lose and duplicate requests and replies."""
        faults = self.network_faults
        faults.lost_requests, faults.lost_replies, faults.doubled = (
            self.chance.choice([0.0, 0.1, 0.5]) for _ in range(3)
        )
        self.log.record("network", f"loses {faults.lost_requests:.0%} / {faults.lost_replies:.0%} of requests")
        self.for_a_while(self.chance.uniform(1.0, 8.0), faults.clear)

    def _machine(self) -> Machine:
        return self.chance.choice(list(self.machines))


KINDS: dict[Callable[[FaultInjector], None], int] = {
    FaultInjector.kill_agent: 3,
    FaultInjector.kill_engine: 3,
    FaultInjector.lose_power: 2,
    FaultInjector.stop_agent: 3,
    FaultInjector.stop_engine: 3,
    FaultInjector.slow_down: 1,
    FaultInjector.cut_off: 4,
    FaultInjector.jump_clock: 1,
    FaultInjector.reclaim_storm: 6,
    FaultInjector.drain: 2,
    FaultInjector.lag: 2,
    FaultInjector.lie: 3,
    FaultInjector.close_relay: 1,
    FaultInjector.kill_gateway: 5,
    FaultInjector.stop_gateway: 2,
    FaultInjector.fill_disk: 1,
    FaultInjector.storm: 3,
}
