"""Lending beside a `vllm serve` that is not ours: keeps a rollout engine running, and the agent's word renewed.

It is an engine to the gateway's agent (agent.py), as a `Supervisor` or a `Seat` is. Every half a second it looks for a
board whose process lives (whether that answers requests is not asked), and writes a grant that holds for two seconds:
all that the engine has, or, without a board, nothing and why. So the gate closes by itself whatever happens to this
process. The rollout engine decides step by step inside that, and looks for itself whether serving lives and the board
is fresh. When it dies it is started again, with the weights it had; when serving restarts, its new board is found and
the engine learns its step times anew. Without a serving engine it is a dedicated rollout worker.

New weights come as they do to every device: the agent's intake (weights.py) fetches and checks them, then asks here to
stage a folder and to commit it. An engine of which it is not certain what it runs is ended at once and started again
with the last weights that were whole.

The gateway may have the engine parked while there is no work: its gate is shut, its turns are handed back and its KV
memory goes to the machine; when it is called back, its cache is let go again, in the time of one wake-up.

Whether serving has shut the gate for the moment is seen in what the engine shows of its steps. When all turns have left
a shut gate it asks for them, and the gate stays shut until such a step would be let through. An engine that shows
nothing for seconds hangs, and does not pass for one that waits.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from rose.core.admission import Mode
from rose.core.gates import GateWatch
from rose.coserve import messages
from rose.coserve.guest import UNWANTED
from rose.coserve.mailbox import Mailbox
from rose.engines.base import EngineFacts, Request
from rose.engines.vllm.desk import Status, Terms
from rose.engines.vllm.finding import board_of, is_shown, own_folder, port_of
from rose.engines.vllm.process import EngineProcess
from rose.engines.vllm.starting import RolloutEngine
from rose.engines.vllm.worker import VllmWorker, engine_facts
from rose.errors import ConfigError, ModelError, QueueFull, RequestRefused, RoseError, Unavailable
from rose.front.tally import Tally
from rose.rollout.condition import WORD_S_MAX
from rose.rollout.vllm_status import LendingTally, lending_status_of

logger = logging.getLogger("rose.agent")

BEAT_S, LEASE_S = 0.5, 2.0
HANG_S = 30.0  # an engine that has not taken a grant for this long hangs
QUICK_DEATH_S, QUICK_DEATHS_MAX = 60.0, 3
PAUSE_S = 2.0
WAITING_MAX = 256
ALL = 1 << 20  # tokens and sequences: as many as the engine has


@dataclass(frozen=True, slots=True)
class VllmLending:
    """What is lent, beside whom, on what terms. Without `serving_url` nobody is served here."""

    engine: RolloutEngine
    serving_url: str = ""
    mode: Mode = "idle"
    ttft_s: float = 0.5
    tpot_s: float = 0.15
    slack_share: float = 0.7
    compute_share: float = 1.0  # of the device's time, until the owner says otherwise
    answer_s: float = 60.0

    def terms(self, board: Path) -> Terms:
        return Terms(str(board), self.mode, self.ttft_s, self.tpot_s, self.slack_share, self.answer_s)


class VllmSeat:
    """One rollout engine on vLLM. `start` returns when it is up."""

    def __init__(self, lending: VllmLending) -> None:
        self.gave_up: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self.on_step: Callable[[messages.Stepped], None] = lambda stepped: None
        self.on_lending: Callable[[], None] = lambda: None
        self.lending = lending
        self.stopped = ""  # why nothing is lent, by the owner
        self.wishes: dict[str, object] = {"compute_share": lending.compute_share}  # the owner's limits
        self.memory_share = 1.0  # what the owner lets it have of its KV memory
        self.is_wanted = True  # by the gateway
        self.activation_s: float | None = None
        self.parking_s: float | None = None
        self.restarts = 0
        self.lending_tally = LendingTally()
        self._locks = _locked(lending)
        self._process: EngineProcess | None = None
        self._worker: VllmWorker | None = None
        self._reason = Unavailable("the rollout engine is starting")
        self._board: Path | None = None
        self._no_board = ""
        self._staged: messages.Stage | None = None
        self._weights: messages.Stage | None = None  # what a new engine must begin with
        self._tally = Tally()
        self._tally.started(engine_facts(Status(0)))
        self._gate, self._steps_seen, self._looked_s = GateWatch(), 0, 0.0
        self._turns: dict[str, asyncio.Task[None]] = {}
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises what is wrong with the serving engine or the rollout engine."""
        if self.lending.serving_url:
            self._board = board_of(self.lending.serving_url)
        await self._start_engine()
        self._keeper = asyncio.create_task(self._keep())
        self._keeper.add_done_callback(self._kept)

    # What the agent asks

    @property
    def facts(self) -> EngineFacts:
        if self._worker is not None:
            with suppress(Unavailable):
                return self._tally.total(engine_facts(self._worker.status()))
        return self._tally.total(None)

    @property
    def trouble(self) -> Unavailable | None:
        if self._worker is None:
            return self._reason
        why = self.stopped or self._no_board or self._why_parked() or self._why_not_lent()
        return Unavailable(why) if why else None

    def _why_parked(self) -> str:
        return "" if self.is_wanted else UNWANTED

    def _why_not_lent(self) -> str:
        """For longer than a turn should wait here."""
        if not self.lending.serving_url or (status := self.status) is None:
            return ""
        missing = status.lent.missing
        return status.lent.resting or (f"learning how long serving's steps take: {missing}" if missing else "")

    @property
    def lending_status(self) -> messages.LendingStatus | None:
        """None for a dedicated worker."""
        return lending_status_of(self) if self.lending.serving_url else None

    @property
    def shut_s(self) -> float | None:
        """As of the last look, which `on_lending` told of."""
        return self._gate.shut_s(self._looked_s)

    def _look_at_gate(self, now_s: float) -> None:
        self._looked_s, status = now_s, self.status
        is_shut_off = self.trouble is not None or bool(self.wishes.get("dry_run"))
        if status is None or is_shut_off or now_s - status.at_s > WORD_S_MAX:
            self._gate.forget()
            return
        has_turns = bool(status.running or status.waiting)
        is_open = status.gate_open and (now_s < status.until_s or not has_turns)
        is_let = is_open or status.steps != self._steps_seen
        self._steps_seen = status.steps
        if has_turns or is_let:
            self._gate.asked(now_s, is_let=is_let)
        else:
            self._gate.left(now_s)

    @property
    def status(self) -> Status | None:
        """Of the engine, if there is one."""
        with suppress(Unavailable):
            return self._worker.status() if self._worker is not None else None
        return None

    def submit(self, requests: Sequence[Request]) -> Mailbox:
        worker = self._checked()
        room = self.lending.engine.max_sequences + WAITING_MAX - len(self._turns)
        if len(requests) > room:
            raise QueueFull(f"{len(self._turns)} rollouts are running or waiting", hint="retry a little later")
        mailbox = Mailbox()
        for request in requests:
            if request.request_id in self._turns:
                raise RequestRefused(f"request `{request.request_id}` is already here")
            self._turns[request.request_id] = asyncio.create_task(self._run(worker, request, mailbox))
        return mailbox

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            task = self._turns.pop(request_id, None)
            if task is not None:
                task.cancel()

    async def ask(self, command: messages.Command) -> messages.Reply:
        if isinstance(command, messages.Want):
            await self._be_wanted(command.is_wanted)
        worker = self._checked()
        match command:
            case messages.Evict():
                await worker.evict(command.request_id)
            case messages.Stage():
                await worker.stage(command.version, command.folder)
                self._staged = command
            case messages.Commit():
                await self._commit(worker, command.version)
            case messages.KvBudget():
                await worker.kv_budget(command.budget_bytes)
            case messages.GetFacts() | messages.Want():
                pass
            case _:
                raise RequestRefused(f"a rollout engine on vLLM does not know `{type(command).__name__}`")
        return messages.Reply(command.tag, self.facts, gate_open=self.trouble is None)

    async def want(self, **changes: object) -> None:
        """By the owner; kept over restarts."""
        self.wishes |= changes
        if self._worker is not None:
            await self._worker.want(**self._control())

    async def _be_wanted(self, is_wanted: bool) -> None:
        """Be there, or be parked until there is work; what the owner holds back stays so. Kept over restarts."""
        if is_wanted == self.is_wanted:
            return
        self.is_wanted, began_s = is_wanted, time.monotonic()
        if self._worker is None:
            return
        await self._worker.want(**{"kv_bytes": None, **self._control()})
        seconds = time.monotonic() - began_s
        if is_wanted:
            self.activation_s = seconds
        else:
            self.parking_s = seconds
        self.on_lending()

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._reason = Unavailable("the device is shutting down")
        self._worker = None
        self.cancel(list(self._turns))
        if self._process is not None:
            await self._process.close()
        self._locks.close()

    def _checked(self) -> VllmWorker:
        if self._worker is None:
            raise Unavailable(self._reason.what, hint="retry a little later")
        return self._worker

    # Turns

    async def _run(self, worker: VllmWorker, request: Request, mailbox: Mailbox) -> None:
        try:
            async for event in worker.generate(request):
                mailbox.put(event)
                if event.finish_reason is not None:
                    self._turns.pop(request.request_id, None)
                self.on_step(messages.Stepped((event,), self.facts))
        except RoseError as error:
            mailbox.fail(error)
        finally:
            if self._turns.get(request.request_id) is asyncio.current_task():
                del self._turns[request.request_id]

    async def _commit(self, worker: VllmWorker, version: str) -> None:
        try:
            await worker.commit(version)
        except Unavailable:
            if self._process is not None:  # mixed weights, or gone: in both cases another engine is started
                logger.error("version `%s` failed half-way: the rollout engine is ended and started again", version)
                self._process.kill()
            raise
        self._weights = self._staged

    # Keeping it running

    async def _start_engine(self) -> None:
        """Raises RoseError, also where the machine has no room for another process or its folder."""
        try:
            process = EngineProcess(self.lending.engine)
            try:
                worker = await process.start()
                await self._give_back(worker)
            except BaseException:
                await process.close()
                raise
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(f"the rollout engine cannot be started: {error}") from error
        self._process, self._worker = process, worker
        self._tally.started(engine_facts(worker.status()))
        self._beat()

    async def _give_back(self, worker: VllmWorker) -> None:
        """The weights that the engine before had. If they are gone it says what it runs, and is sent them again."""
        if self._weights is None:
            return
        try:
            await worker.stage(self._weights.version, self._weights.folder)
            await worker.commit(self._weights.version)
        except ModelError as error:
            logger.warning("version `%s` cannot be given to the new engine: %s", self._weights.version, error.what)
            self._weights = None

    async def _keep(self) -> None:
        deaths, born_s = 0, time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            if self._is_well():
                self._beat()
                self._cut_log()
                continue
            deaths = deaths + 1 if time.monotonic() - born_s < QUICK_DEATH_S else 1
            await self._bury()
            if deaths >= QUICK_DEATHS_MAX:
                self.gave_up.set_result(
                    Unavailable(f"the rollout engine died {deaths} times in a row: {self._reason.what}")
                )
                return
            await asyncio.sleep(PAUSE_S * deaths)
            try:
                await self._start_engine()
                self.restarts += 1
                logger.warning("the rollout engine is running again")
            except RoseError as error:
                logger.error("the rollout engine cannot be restarted: %s", error.what)
                self._reason = Unavailable(error.what)
            born_s = time.monotonic()

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        """The keeper has ended: without one no grant is renewed, so an error of its own must not pass unheard."""
        if keeper.cancelled() or self.gave_up.done():
            return
        error = keeper.exception()
        logger.error("the rollout engine is no longer kept", exc_info=error)
        self.gave_up.set_result(Unavailable(f"the rollout engine is no longer kept: {error!r}"))

    def _cut_log(self) -> None:
        if self._process is not None:
            self._process.cut_log()

    def _is_well(self) -> bool:
        if self._process is None or self._worker is None or not self._process.is_running:
            return False
        with suppress(Unavailable):  # it has just died
            return self._worker.behind_s < HANG_S
        return False

    async def _bury(self) -> None:
        if self._process is None:
            return
        self._reason = Unavailable(f"the rollout engine is gone; its last words:\n{self._process.last_words()}")
        logger.error("%s", self._reason.what)
        self._tally.gone(self.facts)
        process, self._process, self._worker = self._process, None, None
        process.kill()
        await process.close()

    def _beat(self) -> None:
        """Renew the grant, if there is somebody to lend beside, and tell of it. Whatever fails, the engine is kept."""
        try:
            self._find_board()
            if self._worker is not None:
                with suppress(Unavailable):
                    self._worker.wish(**self._control())
            self.lending_tally.total(self.status or Status(0))
            self._look_at_gate(time.monotonic())
            self.on_lending()
        except Exception:
            logger.exception("a grant was not renewed, or nobody was told of it")

    def _control(self) -> dict[str, object]:
        terms = self.lending.terms(self._board) if self._board is not None else None
        is_dark = bool(self.lending.serving_url) and terms is None
        why = self.stopped or (self._no_board if is_dark else "") or self._why_parked()
        size, until_s = 0 if why else ALL, time.monotonic() + LEASE_S
        parked = {} if self.is_wanted else {"kv_bytes": 0}
        grant = {"tokens": size, "sequences": size, "until_s": until_s}
        return {**grant, "terms": terms, "stopped": why, **self.wishes, **parked}

    def _find_board(self) -> None:
        if not self.lending.serving_url:
            return
        if self._board is not None and is_shown(self._board):
            return
        before = self._no_board
        try:
            self._board, self._no_board = board_of(self.lending.serving_url), ""
        except RoseError as error:
            self._board, self._no_board = None, error.what
        if self._no_board != before:
            logger.warning("%s", self._no_board or "the serving engine shows its board again")


def _locked(lending: VllmLending) -> ExitStack:
    """One agent per server, core and GPU: two would each lend the same slack. Raises ConfigError."""
    names = {part: part.replace(":", "-") for part in lending.engine.parts}
    if lending.serving_url:
        names[lending.serving_url] = str(port_of(lending.serving_url))
    with ExitStack() as locks:
        for what, name in names.items():
            locks.callback(os.close, _lock(what, own_folder() / f"{name}.lent"))
        return locks.pop_all()


def _lock(what: str, path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"another agent lends {what} already", hint="stop it first: one agent per device") from error
    return descriptor
