"""The supervisor of a device's engine process: starts it, starts another when it dies, and keeps the desired state.

The first start may fail, and then the device does not start: a bad model folder is for the operator to fix. Later an
engine that dies is started again after a pause that doubles with every quick death, up to a limit. An engine that no
longer answers is killed, and then treated like any other dead one. Every new engine gets the desired state of lending
with its start command, and obeys it before its first step, so it never lends against an admin command.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable

import msgspec

from rose.core.history import HistorySnapshot
from rose.device import engine_messages
from rose.device.channel_client import ChannelClient
from rose.device.engine_channel import Channel, DeviceChannel
from rose.device.supervision import settle, supervise
from rose.device.transport import reject_connections
from rose.engines.process_keeper import RestartCounter, RestartPolicy
from rose.errors import RoseError, Unavailable

logger = logging.getLogger("rose.device")

# An engine that lived for 20 s had worked: its death starts a new count.
RESTARTS = RestartPolicy(pause_first_s=0.25, pause_longest_s=10.0, healthy_s=20.0, deaths_max=5)
QUERY_EVERY_S = 10.0
ANSWER_WITHIN_S = 60.0  # many times the longest step; a process that is silent for longer is stuck
STOPS = ("pause", "drain", "remove", "dry_run")
LENT_DEATHS_MAX = 2  # one may be chance; every further one costs serving its requests
HELD_BACK = (
    "the engine died twice in a row soon after its start while it was lent: rollouts are held back; "
    "`rose lend resume` tries again"
)
REMOVED = "the engine could not be restarted with the rollout model and serves without it: {why}"


class DesiredState:
    """The desired state of lending, which outlives the engine: admin commands, learned history, rollouts held back.

    Rollouts run in the engine's process and may be what kills it. If a lent engine died soon after its start, twice in
    a row, the next one starts with rollouts held back until `resume`; their model is loaded all the same. If an engine
    does not even get ready, the next one is started without the rollout model; if that fails too, that model was not
    the cause, and lending is tried again.
    """

    def __init__(self, lend: engine_messages.Lend | None) -> None:
        self.removed = ""  # why the next engine is started without the rollout model
        self.history: HistorySnapshot | None = None  # what the last engine learned about serving
        self._lend = lend
        self._commands: dict[str, engine_messages.AdminCommand] = {}  # by action, in the order of their last arrival
        self._held_back = ""
        self._deaths = 0  # in a row: soon after the start, and lent

    @property
    def lend(self) -> engine_messages.Lend | None:
        """Return the terms on which the next engine is lent; None if it is not."""
        return None if self.removed else self.lend_terms

    @property
    def lend_terms(self) -> engine_messages.Lend | None:
        """Return the terms on which an engine with the rollout model is lent; None if the device never is."""
        if self._lend is None:
            return None
        commands = tuple(self._commands.values())
        return msgspec.structs.replace(self._lend, commands=commands, held_back=self._held_back, history=self.history)

    @property
    def is_lending(self) -> bool:
        """Whether rollouts may run: then they may be what kills the engine."""
        return self.lend is not None and not self._held_back and not any(stop in self._commands for stop in STOPS)

    def on_history(self, history: HistorySnapshot) -> None:
        self.history = history

    def on_command(self, command: engine_messages.AdminCommand) -> None:
        before = self._commands.get(command.action, command)
        if command.action in STOPS:
            self._commands.pop(command.action, None)
            self._commands[command.action] = command
        elif command.action == "limits":
            memory_share = before.memory_share if command.memory_share is None else command.memory_share
            compute_share = before.compute_share if command.compute_share is None else command.compute_share
            self._commands["limits"] = engine_messages.AdminCommand("limits", memory_share, compute_share)
        elif command.action == "resume":
            for stop in STOPS:
                self._commands.pop(stop, None)
            self._held_back, self._deaths = "", 0

    def on_death(self, *, is_quick: bool, unready: str = "") -> bool:
        """Count the death of an engine, soon after its start or before it was ready; return whether it was lent."""
        was_lent = self.is_lending
        if unready:
            if self._lend is not None:
                self.removed = "" if self.removed else REMOVED.format(why=unready)
            if self.removed:
                logger.error("%s: the next one is started without the rollout model", unready)
        elif not is_quick:
            self._deaths = 0
        elif was_lent:
            self._deaths += 1
        if was_lent and self._deaths >= LENT_DEATHS_MAX:
            logger.error(HELD_BACK)
            self._held_back = HELD_BACK
        return was_lent


class Supervisor:
    """One per device. `client` is what its users hold; its `gave_up` is set when no engine can be kept running.

    `listener` is where the rollout front of a lent device connects.
    """

    def __init__(
        self,
        command: engine_messages.StartEngine,
        *,
        on_progress: Callable[[str], None],
        listener: socket.socket | None = None,
    ) -> None:
        settings = command.settings
        self.client = ChannelClient(settings.max_sequences + settings.max_waiting, self._stop)
        self.desired = DesiredState(command.lend)
        self._command, self._listener, self._on_progress = command, listener, on_progress
        self._restarts = RestartCounter(RESTARTS)
        self._keeper: asyncio.Task[None] | None = None
        self.client.events.history.subscribe(self.desired.on_history)

    async def start(self) -> None:
        """Start the first engine. Raises what keeps it from starting."""
        await self._start_engine()
        self._keeper = supervise(self._keep(), "the supervisor of the engine", self._give_up)

    async def _stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)

    async def _start_engine(self) -> None:
        lend, loop = self.desired.lend, asyncio.get_running_loop()
        if self._listener is not None:
            loop.remove_reader(self._listener)
            if self.desired.removed:  # no engine listens there: the rollout front gets the reason
                self._listener.setblocking(False)
                loop.add_reader(self._listener, reject_connections, self._listener, self.desired.removed)
        self.client.attach(
            await DeviceChannel.start(
                msgspec.structs.replace(self._command, lend=lend),
                listener=self._listener if lend is not None else None,
                events=self.client.events,
                on_progress=self._on_progress,
            )
        )

    def _give_up(self, reason: Unavailable) -> None:
        """End the device; its parent starts it again."""
        settle(self.client.gave_up, reason)

    async def _keep(self) -> None:
        unready = ""  # why the last engine did not start
        reason = ""
        while True:
            born_s = time.monotonic()
            if self.client.channel is not None:
                gone = await self._until_gone(self.client.channel)
                logger.error("the engine is gone: %s; restarting it", gone.what)
                reason = f"{gone.what}; it is being restarted"
                self.client.detach(Unavailable(reason, hint="retry a little later"))
            lived_s = time.monotonic() - born_s
            was_lent = self.desired.on_death(is_quick=self._restarts.is_quick(lived_s), unready=unready)
            # A death that rollouts may have caused is no reason to give up serving.
            pause_s = self._restarts.pause_after(lived_s, counts=not was_lent)
            if pause_s is None:
                self._give_up(
                    Unavailable(
                        f"the engine died {self._restarts.deaths} times in a row, the last time because: {reason}",
                        hint="the lines above say more; `rose doctor` checks the machine",
                    )
                )
                return
            await asyncio.sleep(pause_s)
            unready = ""
            try:
                await self._start_engine()
            except RoseError as error:
                logger.error("the engine cannot be restarted: %s", error.what)
                unready, reason = error.what, f"the engine cannot be restarted: {error.what}"
                self.client.detach(Unavailable(reason))
            else:
                logger.warning("the engine is running again")

    async def _until_gone(self, channel: Channel) -> Unavailable:
        """Wait for the engine's end, and check now and then that it still answers."""
        while True:
            await asyncio.wait([channel.gone], timeout=QUERY_EVERY_S)
            if channel.gone.done():
                return channel.gone.result()
            try:
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    await channel.call(engine_messages.GetFacts(0))
            except TimeoutError:
                logger.error("the engine process has not answered for %.0f s; killing it", ANSWER_WITHIN_S)
                channel.kill()
            except RoseError:
                pass  # it just went
