"""vLLM's control routes for RL trainers, answered by the gateway as if the pool were one vLLM server.

prime-rl, SkyRL and AReaL drive their inference servers by these routes: pause, update the weights, resume. They exist
with `control.api: vllm` and are for the trainer's token only. Three forms of an update are known:

    {"weight_dir": FOLDER}                     prime-rl: the gateway publishes the folder's weights
    {"model_path": FOLDER}                     AReaL, at /areal_update_weights: the same
    {"update_info": {version, relay, run, hash}}   vLLM's own, by the backend `rose`: the trainer has published them

Every call may be repeated, and may come in any order. A version is announced once. An answer to an update means that
the weights are in the relay, that the folder is no longer needed, and that no worker which can take turns is further
behind than `max_staleness`. A pause holds placements: running turns go on, because a worker swaps its weights between
two of its steps. A pause is not kept over a restart of the gateway.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from aiohttp import web
from msgspec import Meta

from rose import __version__
from rose.api.worker_messages import NewVersion
from rose.bounds import SESSION_CHARACTERS_MAX, TEXT_CHARACTERS_MAX, Label, Name, Text
from rose.errors import RequestRefused, Unavailable
from rose.gateway.gateway_server import Gateway
from rose.gateway.pool import Pool, PoolWorker
from rose.gateway.publisher_process import RUN_CHARACTERS_MAX
from rose.gateway.sessions import Finish
from rose.openai.http_errors import bad_request
from rose.openai.request_parsing import BodyReader, FreeJson, FreeObject
from rose.openai.response_writing import json_response
from rose.weights.folder_publisher import PublishOrder

PauseMode = Literal["abort", "wait", "keep"]
BACKEND = "rose"
WORLD_SIZE = 1  # the gateway is one receiver, however many workers there are
LOOK_S = 0.5  # between two looks at what sends no signal
WORKERS_SHOWN_MAX = 5
NUMBERED = re.compile(r"(\d{1,15})-")


class FolderBody(msgspec.Struct):
    model_path: Text


class RelayVersion(msgspec.Struct):
    """A version that the trainer has published."""

    version: Name
    relay: Annotated[str, Meta(min_length=1, max_length=TEXT_CHARACTERS_MAX)]
    run: Annotated[str, Meta(min_length=1, max_length=RUN_CHARACTERS_MAX)]
    hash: Annotated[str, Meta(max_length=128)] = ""


class UpdateBody(msgspec.Struct):
    weight_dir: Text | None = None
    update_info: RelayVersion | None = None


class InitBody(FreeJson):
    FREE: ClassVar[tuple[str, ...]] = ("init_info",)
    init_info: FreeObject


class FinishUpdateBody(msgspec.Struct):
    weight_version: Label | None = None


class ControlReply(msgspec.Struct):
    """What vLLM's and AReaL's clients read, in one object."""

    message: str
    status: str
    weight_version: str
    success: bool = True
    workers: list[str] = []  # those that run the newest version


class PauseState(msgspec.Struct):
    is_paused: bool


class WorldSize(msgspec.Struct):
    world_size: int


class WeightInfo(msgspec.Struct):
    weight_version: str


class ServerInfo(msgspec.Struct):
    rose_version: str
    model: str
    weight_version: str
    workers: int
    max_staleness: int
    is_paused: bool


UPDATE, AREAL_UPDATE = BodyReader(UpdateBody), BodyReader(FolderBody)
INIT, FINISH_UPDATE = BodyReader(InitBody), BodyReader(FinishUpdateBody)

_background: set[asyncio.Task[Any]] = set()  # publications whose request has given up waiting


async def pause(gateway: Gateway, request: web.Request) -> web.Response:
    """Hold placements. With the mode `wait` the answer comes when no turn runs."""
    mode = request.query.get("mode", "abort")
    if mode not in get_args(PauseMode):
        raise bad_request("`mode` must be one of abort, wait, keep", param="mode")
    scheduler = gateway.core.scheduler
    scheduler.hold()
    wait_s = gateway.settings.control.wait_s
    if mode == "wait" and not await _until(gateway, lambda: not scheduler.running or not scheduler.is_held, wait_s):
        what = f"{scheduler.running} turns still run after {wait_s:g} s; placements are held"
        raise Unavailable(what, hint="send the request again, or pause with mode=keep")
    return _reply(gateway, "generation is paused: no turn is placed, running turns continue", "paused")


async def resume(gateway: Gateway, request: web.Request) -> web.Response:
    gateway.core.scheduler.release(gateway.now_s())
    return _reply(gateway, "generation continues", "resumed")


async def is_paused(gateway: Gateway, request: web.Request) -> web.Response:
    return json_response(PauseState(gateway.core.scheduler.is_held))


async def world_size(gateway: Gateway, request: web.Request) -> web.Response:
    return json_response(WorldSize(WORLD_SIZE))


async def weight_info(gateway: Gateway, request: web.Request) -> web.Response:
    return json_response(WeightInfo(gateway.core.version))


async def server_info(gateway: Gateway, request: web.Request) -> web.Response:
    core = gateway.core
    name, held = gateway.context.model_name, core.scheduler.is_held
    return json_response(ServerInfo(__version__, name, core.version, len(core.pool), core.pool.max_staleness, held))


async def accept(gateway: Gateway, request: web.Request) -> web.Response:
    """Answer a call for which nothing is to do: prefix caches end with their weights, and no group is joined."""
    return _reply(gateway, "nothing needs to be done", "ok")


async def finish_session(gateway: Gateway, request: web.Request) -> web.Response:
    """End a session that was not begun as a trajectory; an unknown one is no error."""
    name = request.query.get("session_id", "")[: SESSION_CHARACTERS_MAX + 1]
    session = gateway.core.trajectories.get(name)
    if session is not None and session.secret is None and session.group is None and session.finish is None:
        gateway.core.finish(session.name, Finish(is_lost=True), gateway.now_s())
        await gateway.durable()
    return _reply(gateway, "the session is finished", "ok")


async def init_transfer(gateway: Gateway, request: web.Request) -> web.Response:
    body = INIT.read(await gateway.context.read(request))
    if body.init_info.get("backend") != BACKEND:
        hint = "build the trainer's engine with rose.adapters.vllm_trainer.RoseTrainerInitInfo"
        raise bad_request(f'`init_info.backend` must be "{BACKEND}": {hint}', param="init_info.backend")
    return _reply(gateway, "weights come through the relay", "ok")


async def update(gateway: Gateway, request: web.Request) -> web.Response:
    body = UPDATE.read(await gateway.context.read(request))
    if (body.weight_dir is None) == (body.update_info is None):
        what = "send the weights as a folder, `weight_dir`, or as a published version, `update_info`"
        raise bad_request(f"{what}; NCCL and LoRA are not known here", param="weight_dir")
    if body.weight_dir is not None:
        return await _update_from(gateway, body.weight_dir)
    info = body.update_info
    assert info is not None
    await _announce(gateway, NewVersion(info.version, relay=info.relay, run=info.run, hash=info.hash))
    return _reply(gateway, "the version is announced", "ok")


async def update_areal(gateway: Gateway, request: web.Request) -> web.Response:
    body = AREAL_UPDATE.read(await gateway.context.read(request))
    return await _update_from(gateway, body.model_path)


async def finish_update(gateway: Gateway, request: web.Request) -> web.Response:
    """Answer when the workers run the newest version."""
    data = await gateway.context.read(request)
    wanted = FINISH_UPDATE.read(data).weight_version if data else None
    if wanted is not None and not gateway.core.pool.was_published(wanted):
        raise bad_request("no version of this name was announced by /update_weights", param="weight_version")
    await _wait_for_workers(gateway, gateway.settings.control.wait_s)
    return _reply(gateway, "the workers run the version", "ok")


async def _update_from(gateway: Gateway, folder: str) -> web.Response:
    """Publish a folder's weights, and answer when the workers run them, both within `control.wait_s`."""
    wait_s, begin_s = gateway.settings.control.wait_s, gateway.now_s()
    try:
        async with asyncio.timeout(wait_s):
            await _kept(_publish(gateway, folder))
    except TimeoutError as error:
        what = f"the weights were not published within {wait_s:g} s; the work goes on"
        raise Unavailable(what, hint="send the request again") from error
    await _wait_for_workers(gateway, max(0.0, wait_s - (gateway.now_s() - begin_s)))
    return _reply(gateway, "the workers run the folder's weights", "ok")


def _kept(work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
    """Return a future whose cancellation does not stop the work: its process would lose the order in it."""
    task = asyncio.create_task(work)
    _background.add(task)
    task.add_done_callback(_end)
    return asyncio.shield(task)


def _end(task: asyncio.Task[None]) -> None:
    _background.discard(task)
    if not task.cancelled():
        task.exception()  # the request that it was for may be gone


async def _publish(gateway: Gateway, folder: str) -> None:
    publisher = gateway.publisher
    if publisher is None:
        hint = "start it with --door-folder FOLDER --door-relay ADDRESS"
        raise RequestRefused("this gateway reads no weights from folders", hint=hint)
    async with publisher.turn():  # until it is announced: a repetition must see this version as the newest
        newest = gateway.core.pool.newest
        order = PublishOrder(folder, _next_number(newest), newest.hash if newest is not None else "")
        outcome = await publisher.publish(order)
        if outcome.version:
            spec = publisher.spec
            gateway.core.publish(
                NewVersion(outcome.version, relay=spec.relay, run=spec.run, hash=outcome.hash), gateway.now_s()
            )
        await gateway.durable()


def _next_number(newest: NewVersion | None) -> int:
    """Return the number of the next version: one more than that in the newest name, if it has one."""
    match = NUMBERED.match(newest.version) if newest is not None else None
    return int(match[1]) + 1 if match else 1


async def _announce(gateway: Gateway, version: NewVersion) -> None:
    """Tell the workers of a version, unless its name is known: a call that comes late must not bring it back."""
    if not gateway.core.pool.was_published(version.version):
        gateway.core.publish(version, gateway.now_s())
    await gateway.durable()


async def _wait_for_workers(gateway: Gateway, wait_s: float) -> None:
    """Wait until the workers may run turns on the newest weights. Raises Unavailable after this long."""
    if not await _until(gateway, lambda: not _behind(gateway.core.pool), wait_s):
        behind = _behind(gateway.core.pool)
        shown = "; ".join(f"{name}: {why}" for name, why in list(behind.items())[:WORKERS_SHOWN_MAX])
        what = f"{len(behind)} workers do not run the version yet: {shown}"
        raise Unavailable(what, hint="send the request again; GET /v1/pool shows the workers")


def _behind(pool: Pool) -> dict[str, str]:
    """Return why workers are waited for.

    Those that cannot take turns now are not: they load the version before their next one. Nor is a worker in trouble,
    once another one has shown that the version can be loaded.
    """
    if pool.newest is None:
        return {}
    able = [worker for worker in pool if pool.accepts_turns(worker) and worker.provisioning.is_wanted]
    is_loadable = any(_runs_newest(pool, worker) for worker in able)
    waited_for = [worker for worker in able if not pool.may_run(worker)]
    if able and not is_loadable and not waited_for:
        waited_for = able  # all are within the bound, and none has tried the version yet
    return {
        worker.name: worker.trouble or "it is being loaded"
        for worker in waited_for
        if not (is_loadable and worker.trouble)
    }


def _runs_newest(pool: Pool, worker: PoolWorker) -> bool:
    return worker.weights.version == pool.newest_version and not pool.has_wrong_hash(worker)


async def _until(gateway: Gateway, look: Callable[[], bool], wait_s: float) -> bool:
    """Return whether the condition holds within this time."""
    until_s = gateway.now_s() + wait_s
    while not look():
        rest_s = until_s - gateway.now_s()
        if rest_s <= 0:
            return False
        await gateway.changes.wait_until(lambda: look() or None, min(LOOK_S, rest_s))
    return True


def _reply(gateway: Gateway, message: str, status: str) -> web.Response:
    pool = gateway.core.pool
    workers = [worker.name for worker in pool if _runs_newest(pool, worker)]
    return json_response(ControlReply(message, status, gateway.core.version, True, workers))
