"""What goes wrong in a simulated world, and when: drawn from the seed, and healed after a while.

Every fault is one that a real world has. Nothing here is malice, except for a worker that runs other weights than it
says; and it tells the hash of what it runs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from rose.sim.dedicated import DedicatedDevice
from rose.sim.gateway import SimulatedGateway
from rose.sim.lent import LentDevice
from rose.sim.machine import Machine
from rose.sim.scenario import Scenario
from rose.sim.shelf import Shelf
from rose.sim.story import Story
from rose.sim.wire import Weather

START_TRIES = 20


@dataclass(slots=True)
class Trouble:
    """`run` makes trouble for as long as it is let; `end` heals everything at once."""

    machines: Sequence[Machine]
    gateway: SimulatedGateway
    weather: Weather
    shelf: Shelf
    chance: random.Random
    story: Story
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
        self.story.tell("the world", "is calm from now on")
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
        machine = self._machine()
        machine.kill_agent()
        self.for_a_while(self.chance.uniform(0.2, 4.0), machine.start)

    def kill_engine(self) -> None:
        machine = self._machine()
        machine.kill_engine()
        self.for_a_while(self.chance.uniform(0.2, 4.0), machine.start)

    def lose_power(self) -> None:
        machine = self._machine()
        machine.lose_power()
        self.for_a_while(self.chance.uniform(0.5, 8.0), machine.start)

    def stop_agent(self) -> None:
        machine, seconds = self._machine(), self.chance.uniform(0.3, 8.0)
        self.story.tell(machine.name, f"agent is stopped for {seconds:.2f} s")
        machine.agent.gate.stop()
        self.for_a_while(seconds, machine.agent.gate.go_on)

    def stop_engine(self) -> None:
        machine, seconds = self._machine(), self.chance.uniform(0.3, 8.0)
        self.story.tell(machine.name, f"engine is stopped for {seconds:.2f} s")
        machine.handle.gate.stop()
        self.for_a_while(seconds, machine.handle.gate.go_on)

    def slow_down(self) -> None:
        handle = self._machine().handle
        if isinstance(handle, DedicatedDevice):
            handle.slower = self.chance.choice([3.0, 20.0])
            self.for_a_while(self.chance.uniform(1.0, 8.0), lambda: setattr(handle, "slower", 1.0))

    def cut_off(self) -> None:
        machine, seconds = self._machine(), self.chance.choice([0.5, 2.0, 6.0, 16.0]) * self.chance.uniform(0.7, 1.3)
        self.story.tell(machine.name, f"network is cut for {seconds:.2f} s")
        machine.agent.place.cut_off()
        self.for_a_while(seconds, machine.agent.place.heal)

    def jump_clock(self) -> None:
        machine = self._machine()
        machine.agent.clock_off_s += self.chance.choice([-3600.0, -0.4, 0.4, 3600.0])
        self.story.tell(machine.name, "clock jumps")

    # Owners

    def reclaim_storm(self) -> None:
        """All borrowed devices at once: users come, or the owners want them back."""
        lent = [machine for machine in self.machines if isinstance(machine.handle, LentDevice)]
        is_order, seconds = self.chance.random() < 0.5, self.chance.uniform(0.5, 6.0)
        action: Literal["pause", "drain"] = "pause" if self.chance.random() < 0.3 else "drain"
        for machine in lent:
            assert isinstance(machine.handle, LentDevice)
            if not machine.is_whole:
                continue
            if is_order:
                self.story.tell(machine.name, f"owner says {action}, for {seconds:.2f} s")
                machine.handle.control(action)
                self.for_a_while(seconds, partial(machine.handle.control, "resume"))
            else:
                requests = self.chance.randint(4, 16)
                self.story.tell(machine.name, f"gets {requests} users at once")
                machine.handle.spike(requests, asyncio.get_running_loop().time())

    def drain(self) -> None:
        """The operator sends a worker away, and later somebody starts it again."""
        machine = self._machine()
        self.gateway.drain(machine.name)
        self.for_a_while(self.chance.uniform(1.0, 6.0), lambda: self._start_again(machine))

    def _start_again(self, machine: Machine, tries: int = START_TRIES) -> None:
        """It may not have heard yet that it is to leave, or never hear it."""
        if machine.was_sent_away:
            machine.start()
        elif tries:
            self.for_a_while(1.0, lambda: self._start_again(machine, tries - 1))

    # Weights

    def lag(self) -> None:
        """A worker that takes very long over new weights."""
        machine, before = self._machine(), (0.05, 0.4)
        machine.agent.loading_s = (3.0, 12.0)
        self.story.tell(machine.name, "takes long over new weights")
        self.for_a_while(self.chance.uniform(2.0, 15.0), lambda: setattr(machine.agent, "loading_s", before))

    def lie(self) -> None:
        """A worker that takes a new version's name, and not its weights; and it takes its time to tell their hash."""
        machine = self._machine()
        name, handle = machine.name, machine.handle
        self.shelf.liars.add(name)
        handle.reply_s = self.chance.choice([0.0, 0.3, 1.0])
        self.story.tell(name, "lies about its weights")
        self.for_a_while(self.chance.uniform(2.0, 15.0), lambda: self.shelf.liars.discard(name))
        self.for_a_while(self.chance.uniform(2.0, 15.0), lambda: setattr(handle, "reply_s", 0.0))

    def close_relay(self) -> None:
        self.shelf.relay.is_closed = True
        self.story.tell("the relay", "is out of reach")
        self.for_a_while(self.chance.uniform(0.5, 6.0), lambda: setattr(self.shelf.relay, "is_closed", False))

    # The gateway and the way to it

    def kill_gateway(self) -> None:
        self.gateway.kill()
        self.for_a_while(self.chance.uniform(0.05, 3.0), self.gateway.start)

    def stop_gateway(self) -> None:
        seconds = self.chance.uniform(0.2, 6.0)
        self.story.tell("gateway", f"is stopped for {seconds:.2f} s")
        self.gateway.gate.stop()
        self.for_a_while(seconds, self.gateway.gate.go_on)

    def fill_disk(self) -> None:
        """The gateway cannot write its ledger."""
        self.story.tell("gateway", "cannot write to its disk")
        self.gateway.write_to_disk(can=False)
        self.for_a_while(self.chance.uniform(0.2, 3.0), lambda: self.gateway.write_to_disk(can=True))

    def storm(self) -> None:
        """Requests and replies get lost, or come twice."""
        weather = self.weather
        weather.lost_requests, weather.lost_replies, weather.doubled = (
            self.chance.choice([0.0, 0.1, 0.5]) for _ in range(3)
        )
        self.story.tell("the network", f"loses {weather.lost_requests:.0%} / {weather.lost_replies:.0%} of requests")
        self.for_a_while(self.chance.uniform(1.0, 8.0), weather.clear)

    def _machine(self) -> Machine:
        return self.chance.choice(list(self.machines))


KINDS: dict[Callable[[Trouble], None], int] = {
    Trouble.kill_agent: 3,
    Trouble.kill_engine: 3,
    Trouble.lose_power: 2,
    Trouble.stop_agent: 3,
    Trouble.stop_engine: 3,
    Trouble.slow_down: 1,
    Trouble.cut_off: 4,
    Trouble.jump_clock: 1,
    Trouble.reclaim_storm: 6,
    Trouble.drain: 2,
    Trouble.lag: 2,
    Trouble.lie: 3,
    Trouble.close_relay: 1,
    Trouble.kill_gateway: 5,
    Trouble.stop_gateway: 2,
    Trouble.fill_disk: 1,
    Trouble.storm: 3,
}
