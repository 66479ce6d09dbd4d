"""A device's engine as its agent holds it, in virtual time: what a supervisor of a real engine process is.

Commands take effect between two steps, in the order in which they came, and what they lead to is told from there, so an
agent here is told things when a real one would be. What differs between a dedicated and a borrowed device is the step:
`_next_step` chooses one and says how long it takes, `_end_step` tells what it brought.

The engine can be stopped for a while (`gate`), and it can die: then whoever waits for it is told, its requests are
gone, and after a while there is a fresh one with the weights that the device was started with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from rose.coserve import messages
from rose.coserve.mailbox import Mailbox
from rose.engines.base import EngineFacts, Request, TokenEvent
from rose.errors import RequestRefused, RoseError, Unavailable
from rose.sim.gate import Gate
from rose.sim.law import LawfulEngine

ASK_AGAIN_S = 0.05  # as the executor of a lent device
STAGING_S = 0.02


def folder_of(weights: int) -> str:
    """Where a device finds weights that have arrived; in a simulation the name is all there is."""
    return f"arrived/{weights}"


def weights_in(folder: str) -> int:
    return int(folder.rpartition("/")[2])


class SimulatedHandle:
    """An `AgentEngine`. One per device; `run` is its engine process."""

    def __init__(self, agents_gate: Gate) -> None:
        self.gave_up: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self.on_step: Callable[[messages.Stepped], None] = lambda stepped: None
        self.on_lending: Callable[[], None] = lambda: None
        self.lending_status: messages.LendingStatus | None = None
        self.gate = Gate()
        self.reply_s = 0.0  # until the agent's process has read an answer, while steps go on
        self.trouble: Unavailable | None = None
        self._agents_gate, self._has_died = agents_gate, False
        self._mailboxes: dict[str, Mailbox] = {}
        self._commands: list[Callable[[], None]] = []
        self._awake = asyncio.Event()
        self._asked: list[asyncio.Future[None]] = []
        self._staged: tuple[str, int] | None = None
        self.engine = self._fresh()
        self._facts = self.engine.facts()

    def _fresh(self) -> LawfulEngine:
        raise AssertionError("a device says what its engine is")

    def attach(self) -> None:
        """An agent's process has come."""

    # What the agent holds

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def submit(self, requests: Sequence[Request]) -> Mailbox:
        if self.trouble is not None:
            raise self.trouble
        mailbox = Mailbox()
        for request in requests:
            self._mailboxes[request.request_id] = mailbox
            self._between_steps(lambda request=request: self._add(request))  # type: ignore[misc]
        return mailbox

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in list(request_ids):
            self._mailboxes.pop(request_id, None)
            self._between_steps(lambda name=request_id: self._cancel(name))  # type: ignore[misc]

    async def ask(self, command: messages.Command) -> messages.Reply:
        if self.trouble is not None:
            raise self.trouble
        if isinstance(command, messages.Stage):
            await self._stage(command)
        else:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._asked.append(done)
            self._between_steps(lambda: self._obey(command, done))
            await done
            await asyncio.sleep(self.reply_s)
        return messages.Reply(0, self._facts)

    async def close(self) -> None:
        """Its world ends it."""

    # The engine process

    async def run(self) -> None:
        while True:
            self._awake.clear()
            commands, self._commands = self._commands, []
            for command in commands:
                command()
            step_s = self._next_step(asyncio.get_running_loop().time()) if not self.gate.is_stopped else None
            if step_s is None:
                await self._sleep()
            else:
                await asyncio.sleep(step_s)
                await self._until_running()
                self._end_step(asyncio.get_running_loop().time())

    def die(self, why: str) -> None:
        """The process is gone. The agent's process hears of it, now or when it goes on."""
        self.trouble, self._has_died = Unavailable(why), True
        mailboxes, self._mailboxes = self._mailboxes, {}
        self._commands.clear()
        self.gate.clear()
        for done in self._asked:
            if not done.done():
                done.set_exception(Unavailable(why))
                done.exception()  # seen: nobody may be waiting for it
        self._asked.clear()
        for mailbox in mailboxes.values():
            mailbox.fail(Unavailable(why))

    def restart(self) -> None:
        """After its death."""
        if not self._has_died:
            return
        self.engine, self._staged, self.trouble, self._has_died = self._fresh(), None, None, False
        self._facts = self.engine.facts()
        self._awake.set()

    @property
    def requests(self) -> int:
        """Of rollouts, that the engine holds."""
        facts = self.engine.facts()
        return facts.running + facts.waiting

    async def _until_running(self) -> None:
        while self.gate.is_stopped:
            going: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.gate.enter(lambda: None if going.done() else going.set_result(None))  # noqa: B023
            await going

    async def _sleep(self) -> None:
        await self._until_running()
        wait_s = self._wait_s(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(wait_s):
                await self._awake.wait()
        except TimeoutError:
            return

    def _wait_s(self, now_s: float) -> float | None:
        """How long there is nothing to do unless somebody comes."""
        return ASK_AGAIN_S if self.requests else None

    def _next_step(self, now_s: float) -> float | None:
        """How long the step takes that begins now; None if there is none to run."""
        raise AssertionError("a device says what its steps are")

    def _end_step(self, now_s: float) -> None:
        raise AssertionError("a device says what its steps are")

    # Commands

    def _between_steps(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._awake.set()

    def _add(self, request: Request) -> None:
        if request.request_id not in self._mailboxes:
            return
        try:
            self.engine.add(request)
        except RoseError as error:
            self._mailboxes.pop(request.request_id).fail(error)

    def _cancel(self, request_id: str) -> None:
        self.engine.cancel(request_id)

    async def _stage(self, command: messages.Stage) -> None:
        engine = self.engine
        await asyncio.sleep(STAGING_S)
        if self.trouble is not None or self.engine is not engine:
            raise self.trouble or Unavailable("the engine was restarted meanwhile")
        self._staged = command.version, weights_in(command.folder)

    def _obey(self, command: messages.Command, done: asyncio.Future[None]) -> None:
        self._asked.remove(done)
        if done.done():  # whoever asked has gone
            return
        if isinstance(command, messages.Evict):
            self._evict(command.request_id)
        elif isinstance(command, messages.Want):
            self._want(command.is_wanted)
        elif isinstance(command, messages.Commit):
            if self._staged is None or self._staged[0] != command.version:
                done.set_exception(RequestRefused(f"version {command.version!r} is not staged"))
                return
            self._commit(*self._staged)
        self._facts = self.engine.facts()
        self._tell_lending()
        done.set_result(None)

    def _commit(self, version: str, weights: int) -> None:
        self.engine.swap(version)
        self.engine.weights, self._staged = weights, None
        self._swapped()

    def _evict(self, request_id: str) -> None:
        try:
            self.engine.evict(request_id)
        except KeyError:  # it has ended
            return
        self.tell([TokenEvent(request_id, (), (), self.engine.facts().version, "abort")])

    def _swapped(self) -> None:
        """New weights run from here on."""

    def _want(self, is_wanted: bool) -> None:
        """Whether there is work for it; only a lent device minds."""

    def _tell_lending(self) -> None:
        """How it is lent, if it is."""

    def tell(self, events: Sequence[TokenEvent], tokens: int = 0, seconds: float = 0.0) -> None:
        """The agent's process, if it goes on, hears of what a step added."""
        stepped = messages.Stepped(tuple(events), self.engine.facts(), tokens, seconds)
        self._agents_gate.enter(lambda: self._told(stepped))

    def _told(self, stepped: messages.Stepped) -> None:
        self._facts, events = stepped.facts, stepped.events
        for event in events:
            mailbox = self._mailboxes.get(event.request_id)
            if mailbox is not None:
                mailbox.put(event)
                if event.finish_reason is not None:
                    del self._mailboxes[event.request_id]
        self.on_step(stepped)
