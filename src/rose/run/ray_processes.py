"""The processes of a run on the nodes of a Ray cluster, as the run sees them.

Every process has a supervising actor (`rose.run.ray_supervisor`) and a task here that fetches its news: lines for its
log in the run folder, JSON for the run, deaths, and the address at which it is ready. When Ray makes the actor again on
another node, the task sees a new life, sends models and sealed secrets there, and goes on. If the process is then ready
at another address than before, the run is told. The gateway is not made again: its ledger was on the node that is lost,
so the run ends with a sentence, and `rose run --resume` goes on from the newest checkpoint.

The relay of the weights runs beside the trainer, on the driver's machine: it serves the run's own folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from rose.device.supervision import settle, supervise
from rose.errors import RoseError, Unavailable
from rose.run import process_specs
from rose.run.process_site import LocalProcesses, ProcessEvents, StartedProcess
from rose.run.processes import LOG_BYTES_MAX, START_S_MAX, Command, Died, OnJson, check_command_line
from rose.run.publishing import Publishing
from rose.run.ray_placement import ROLE_OF, models_of
from rose.run.ray_supervisor import Hello, NodeSupervisor
from rose.run.rotating import RotatingFile
from rose.run.sealed_secrets import seal
from rose.run.serving_traffic import TrafficPlan

CHUNK_BYTES = 16 << 20  # of a model folder; each goes through Ray's object store
AGAIN_S, STOP_S_MAX = 0.5, 20.0
REFUSALS_MAX = 2  # a supervisor that Ray calls dead as often in a row is not made again


@dataclass(slots=True)
class SupervisedProcess:
    """One process of the run on some node. `captured` is that of its newest start."""

    command: Command
    actor: Any
    log: RotatingFile
    on_json: OnJson | None
    ready: asyncio.Future[None]
    captured: dict[str, str] = field(default_factory=dict)
    hello: Hello | None = None  # of its supervisor's newest life
    ready_life: str = ""  # the newest life in which the process got ready
    seen: int = 0  # the last event of that life that was taken
    is_lost: bool = False
    cpu_s: dict[str, float] = field(default_factory=dict)  # by role, in that life
    watch: asyncio.Task[None] | None = None


class RayProcesses:
    """The processes of one run, each on the node that Ray has chosen for its role."""

    def __init__(
        self, group: Any, roles: Sequence[str], logs: Path, secrets: Mapping[str, str], events: ProcessEvents
    ) -> None:
        self.failed: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self._group, self._roles, self._logs, self._secrets, self._events = group, roles, logs, secrets, events
        self._supervised: dict[str, SupervisedProcess] = {}
        self._ended_cpu_s: dict[str, float] = {}
        self._beside: LocalProcesses | None = None  # the relay, and the trainer's other ranks
        logs.mkdir(parents=True, exist_ok=True)

    async def prepare(self) -> None:
        """Do nothing: what Ray starts inherits nothing of this process."""

    async def start(self, command: Command, on_json: OnJson | None = None) -> StartedProcess:
        check_command_line(command, self._secrets)
        if process_specs.is_rank(command):  # beside rank 0, which is the run itself
            beside = await self._processes_beside(self._secrets)
            return await beside.start(command, on_json)
        log = self._logs / f"{command.role}.log"
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        actor, file = self._make_actor(command), RotatingFile(log, LOG_BYTES_MAX)
        it = SupervisedProcess(command, actor, file, on_json, ready)
        self._supervised[command.role] = it
        name = f"the watch on {command.role}"
        it.watch = supervise(self._watch(it), name, lambda why: settle(self.failed, why))
        ends: list[asyncio.Future[Any]] = [it.ready, self.failed]
        await asyncio.wait(ends, timeout=START_S_MAX, return_when=asyncio.FIRST_COMPLETED)
        if not it.ready.done():
            what = f"{command.role} was not ready within {START_S_MAX:.0f} s"
            raise self.failed.result() if self.failed.done() else Unavailable(what, hint=f"see {log}, and `ray status`")
        assert it.hello is not None
        self._events.say(f"{command.role} is on {it.hello.address}")
        return it

    def cpu_s(self) -> dict[str, float]:
        beside = self._beside.cpu_s() if self._beside is not None else {}
        return _sum([self._ended_cpu_s, beside, *(it.cpu_s for it in self._supervised.values())])

    async def share_weights(self, publishing: Publishing) -> None:
        """Serve the run's folder of weights to the workers, unless the settings name a relay."""
        if not publishing.is_own:
            return
        import ray

        beside = await self._processes_beside(publishing.variables_of_relay)
        command = process_specs.relay(publishing.address, ray.util.get_node_ip_address())
        publishing.address = (await beside.start(command)).captured["url"]

    async def _processes_beside(self, secrets: Mapping[str, str]) -> LocalProcesses:
        """Return the processes on the machine of the run itself; the first call gives them their secrets."""
        if self._beside is None:
            self._beside = LocalProcesses(self._logs, secrets, self._events.on_death)
            self._beside.failed.add_done_callback(lambda done: settle(self.failed, done.result()))
            await self._beside.prepare()
        return self._beside

    async def close(self) -> None:
        stopping, self._supervised = list(self._supervised.values()), {}
        await asyncio.gather(*(self._end(it) for it in stopping))
        if self._beside is not None:
            await self._beside.close()

    def _make_actor(self, command: Command) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._roles.index(ROLE_OF[command.role])
        return (
            ray.remote(NodeSupervisor)
            .options(
                num_cpus=0,  # the bundle has them
                max_restarts=0 if command.role == process_specs.GATEWAY else -1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            )
            .remote()
        )

    async def _watch(self, it: SupervisedProcess) -> None:
        """Fetch the news of a process, life after life of its supervisor."""
        from ray.exceptions import ActorDiedError, RayError, RayTaskError

        refusals = 0
        while refusals < REFUSALS_MAX:
            is_greeted = False
            try:
                hello = await it.actor.hello.remote()
                is_greeted, refusals = True, 0
                if it.hello is None or it.hello.life != hello.life:
                    await self._begin(it, hello)
                it.is_lost = False
                while True:
                    events, it.cpu_s = await it.actor.news.remote(it.seen)
                    self._take(it, events)
            except RayTaskError:  # an error of ours, on the node
                raise
            except RayError as error:
                refusals += isinstance(error, ActorDiedError) and not is_greeted
                if not it.is_lost:
                    it.is_lost = True
                    self._events.say(f"{_place(it)} does not answer; Ray starts it elsewhere if its node is lost")
                await asyncio.sleep(AGAIN_S)
        if it.command.role == process_specs.GATEWAY and it.hello is not None:
            why = f"{_place(it)} is lost with its ledger"
            hint = f"`rose run --resume {self._logs.parent}` goes on from its newest checkpoint, on other nodes"
        else:
            why, hint = f"Ray has given up the supervisor of {_place(it)}", "see the logs of Ray on that node"
        settle(self.failed, Unavailable(why, hint=hint))

    async def _begin(self, it: SupervisedProcess, hello: Hello) -> None:
        """Send a new life what it needs, and have it start the process."""
        if it.hello is not None and it.command.role == process_specs.TRAFFIC:
            await self._follow(it)
        command, folders = it.command, models_of(it.command)
        for folder, place in folders.items():
            for path in sorted(file for file in Path(folder).rglob("*") if file.is_file()):
                name, offset = f"{place}/{path.relative_to(folder)}", 0
                with path.open("rb") as file:
                    while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                        await it.actor.receive.remote(name, offset, chunk)
                        offset += len(chunk)
        needed = {name: value for name, value in self._secrets.items() if name in command.secrets}
        await it.actor.begin.remote(command, seal(needed, hello.public), folders)
        if it.hello is not None:
            self._events.on_death(Died(command.role, -signal.SIGKILL, True))
        self._ended_cpu_s = _sum([self._ended_cpu_s, it.cpu_s])
        it.hello, it.seen, it.cpu_s = hello, 0, {}

    async def _follow(self, users: SupervisedProcess) -> None:
        """Wait until the serving device is ready again, and aim the users at where it is now."""
        device = self._supervised[process_specs.BORROWED]
        while device.is_lost or (await device.actor.hello.remote()).life != device.ready_life:
            await asyncio.sleep(AGAIN_S)
        assert users.command.input is not None
        plan = msgspec.json.decode(users.command.input, type=TrafficPlan)
        plan = msgspec.structs.replace(plan, url=device.captured["url"])
        users.command = replace(users.command, input=msgspec.json.encode(plan))

    def _take(self, it: SupervisedProcess, events: Sequence[tuple[int, str, Any]]) -> None:
        for number, kind, what in events:
            it.seen = number
            match kind:
                case "line":
                    with contextlib.suppress(OSError):  # a full disk is no reason to lose the process
                        it.log.write(what + b"\n")
                case "json" if it.on_json is not None:
                    it.on_json(what)
                case "died":
                    self._events.on_death(what)
                case "ready":
                    self._on_ready(it, what)
                case "failed":
                    settle(self.failed, Unavailable(what, hint=f"see {it.command.role}.log in {self._logs}"))

    def _on_ready(self, it: SupervisedProcess, captured: dict[str, str]) -> None:
        import ray

        assert it.hello is not None
        has_moved, it.captured = captured != it.captured, captured
        it.ready_life = it.hello.life
        if not it.ready.done():
            it.ready.set_result(None)
            return
        self._events.say(f"{it.command.role} is on {it.hello.address} now")
        if has_moved:
            self._events.on_moved(it.command.role)
            users = self._supervised.get(process_specs.TRAFFIC)
            if it.command.role == process_specs.BORROWED and users is not None and not users.is_lost:
                ray.kill(users.actor, no_restart=False)  # its next life follows the device

    async def _end(self, it: SupervisedProcess) -> None:
        """Stop a process with its supervisor; on a node that does not answer, Ray does it."""
        import ray

        if it.watch is not None:
            it.watch.cancel()
            await asyncio.gather(it.watch, return_exceptions=True)
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError, RoseError):
            async with asyncio.timeout(STOP_S_MAX):
                self._take(it, await it.actor.stop.remote(it.seen))
        ray.kill(it.actor)
        self._ended_cpu_s = _sum([self._ended_cpu_s, it.cpu_s])
        it.log.close()


def _place(it: SupervisedProcess) -> str:
    return f"{it.command.role} on {it.hello.address}" if it.hello is not None else it.command.role


def _sum(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {role: sum(part.get(role, 0.0) for part in parts) for role in {key for part in parts for key in part}}
