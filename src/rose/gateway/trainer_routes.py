"""Routes of trainers and environments: trajectories, batches of finished groups, versions of the weights, the pool.

Batches are JSON, or msgpack for clients that accept it: hundreds of thousands of tokens need no text.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rose.api.trajectories import MSGPACK, Batch, BeginBody, Begun, FinishBody, Finished, PublishBody, PublishReply
from rose.api.worker_messages import Heartbeat, NewVersion, ServingReport
from rose.core.fleet_orders import OrderedState
from rose.core.provision import Cycle
from rose.errors import RequestRefused
from rose.gateway.auth import is_trusted
from rose.gateway.fleet_view import state_of
from rose.gateway.gateway_server import Gateway
from rose.gateway.pool import PoolWorker
from rose.gateway.sessions import Finish
from rose.gateway.trajectory_table import Forbidden
from rose.openai.http_errors import Failure, bad_request
from rose.openai.request_parsing import BodyReader
from rose.openai.response_writing import json_response

POLL_S_DEFAULT, POLL_S_MAX = 30.0, 120.0
CYCLES_SHOWN = 64

Value = TypeVar("Value", int, float)


class WorkerStatus(msgspec.Struct, rename={"max_concurrency": "seats"}):
    """One worker of the pool."""

    name: str
    kind: str
    version: str
    hash: str  # of the weights it runs, as far as it knows
    state: str
    turns: int
    max_concurrency: int
    running: int
    waiting: int
    kv_used_tokens: int
    kv_tokens: int
    tokens_per_s: float
    turns_ended: int
    trouble: str
    place: str  # of the rollout model, on a device that serves users
    is_offered: bool  # by its owner
    is_wanted: bool  # by the gateway, for what there is to do
    prefill_tok_s: float | None
    decode_tok_s: float | None
    slack_s: float | None
    shut_s: float | None  # how long serving has blocked admission; None while it does not
    sync_s: float | None  # from publishing its version until it ran it
    seconds: dict[str, float]  # of loading that version, by phase; generation stalls in `commit`
    labels: dict[str, str]  # that it registered with
    ordered: OrderedState  # by the operator
    serving: ServingReport | None  # of its users, on a device that serves them


WRITTEN_HERE = {"version", "hash"}  # fields of a heartbeat that `VersionReady` updates too
AS_REPORTED = (set(WorkerStatus.__struct_fields__) & set(Heartbeat.__struct_fields__)) - WRITTEN_HERE


class PoolStatus(msgspec.Struct):
    """The pool. `allocation` has the recent cycles of borrowing, on the gateway's clock, which shows `now_s`.

    `allocation_overhead_share` is the share of the gateway's lifetime in which some device was wanted and not usable
    yet, or being given back. `last_batch` is the number of the newest batch; a new trainer asks for the next one.
    """

    version: str | None
    members: list[WorkerStatus]
    waiting_turns: int
    running_turns: int
    counts: dict[str, int]
    last_batch: int
    now_s: float
    allocation: list[Cycle]
    allocation_overhead_share: float | None


BEGIN, FINISH, PUBLISH = BodyReader(BeginBody), BodyReader(FinishBody), BodyReader(PublishBody)


async def begin(gateway: Gateway, request: web.Request) -> web.Response:
    body = BEGIN.read(await gateway.context.read(request))
    session = gateway.core.trajectories.begin(
        body.id or f"trajectory-{uuid.uuid4().hex}",
        gateway.now_s(),
        group=body.group,
        group_size=body.group_size,
        task=body.task,
        seed=body.seed,
        secret=body.secret,
        is_trusted=is_trusted(request),
    )
    await gateway.durable()
    return json_response(Begun(session.trajectory_id, session.group_id, session.task, session.seed, session.name))


async def finish(gateway: Gateway, request: web.Request) -> web.Response:
    body = FINISH.read(await gateway.context.read(request))
    name = request.match_info["trajectory"]
    try:
        finish = Finish(body.reward, body.is_success, body.invalid_turns, body.is_lost)
        session = gateway.core.finish(name, finish, gateway.now_s(), is_trusted=is_trusted(request))
    except Forbidden:
        raise
    except KeyError as error:
        raise Failure(404, f"there is no trajectory `{name[:80]}`", code="not_found") from error
    except RequestRefused as error:
        raise Failure(409, error.what, code="already_finished") from error
    await gateway.durable()
    return json_response(Finished(session.trajectory_id, session.turn_count, session.forks))


async def next_batch(gateway: Gateway, request: web.Request) -> web.Response:
    groups = query_number(request, "groups", int, 1, 0, 1 << 20)
    after = query_number(request, "after", int, 0, 0, 1 << 62)
    wait_s = query_number(request, "wait_s", float, POLL_S_DEFAULT, 0.0, POLL_S_MAX)
    batch = await gateway.changes.wait_until(lambda: gateway.core.trajectories.batch(groups, after), wait_s)
    if batch is None:
        return web.Response(status=204)
    await gateway.durable()
    is_binary = MSGPACK in request.headers.get("Accept", "")
    body = await encoded_batch(batch, msgspec.msgpack.encode if is_binary else msgspec.json.encode)
    return web.Response(body=body, content_type=MSGPACK if is_binary else "application/json")


async def encoded_batch(batch: Batch, encode: Callable[[Any], bytes]) -> bytes:
    """Encode one trajectory at a time: a batch may be hundreds of megabytes, and other requests wait for the loop."""
    groups = []
    for group in batch.groups:
        trajectories = []
        for trajectory in group.trajectories:
            trajectories.append(msgspec.Raw(encode(trajectory)))
            await asyncio.sleep(0)
        fields = {"group": group.group, "task": group.task, "trajectories": trajectories, "lost": group.lost}
        groups.append(msgspec.Raw(encode(fields)))
    return encode({"batch": batch.batch, "groups": groups})


async def publish(gateway: Gateway, request: web.Request) -> web.Response:
    body = PUBLISH.read(await gateway.context.read(request))
    if bool(body.folder) == bool(body.relay) or bool(body.relay) != bool(body.run):
        raise bad_request("a version lies in a `folder`, or in a `relay` under the name of a `run`", param="folder")
    gateway.core.publish(NewVersion(body.version, body.folder, body.relay, body.run, body.hash), gateway.now_s())
    await gateway.durable()

    def behind() -> dict[str, str]:
        """Return why each worker that does not run the version does not yet."""
        pool = gateway.core.pool
        return {
            worker.name: worker.trouble or "it is being loaded"
            for worker in pool
            if worker.weights.version != body.version
        }

    if body.wait_s:
        await gateway.changes.wait_until(lambda: None if behind() else True, body.wait_s)
    ready = {worker.name: worker.weights for worker in gateway.core.pool if worker.weights.version == body.version}
    loaded = {name: weights for name, weights in ready.items() if weights.seconds}
    return json_response(
        PublishReply(
            body.version,
            list(ready),
            behind(),
            {name: weights.sync_s for name, weights in loaded.items() if weights.sync_s is not None},
            {name: weights.seconds["commit"] for name, weights in loaded.items() if "commit" in weights.seconds},
        )
    )


async def pool(gateway: Gateway, request: web.Request) -> web.Response:
    counts, provisioning, now_s = gateway.core.scheduler.counts, gateway.core.provisioning, gateway.now_s()
    status = PoolStatus(
        version=gateway.core.pool.newest_version,
        members=[status_of(worker, gateway) for worker in gateway.core.pool],
        waiting_turns=gateway.core.scheduler.waiting,
        running_turns=gateway.core.scheduler.running,
        counts={name: getattr(counts, name) for name in type(counts).__slots__},
        last_batch=gateway.core.trajectories.last_batch,
        now_s=now_s,
        allocation=provisioning.cycles[-CYCLES_SHOWN:],
        allocation_overhead_share=provisioning.overhead_share(now_s),
    )
    return json_response(status)


async def drain(gateway: Gateway, request: web.Request) -> web.Response:
    name = request.match_info["worker"]
    worker = gateway.core.pool.get(name)
    if worker is None:
        raise Failure(404, f"there is no worker `{name[:80]}`; GET /v1/pool lists them", code="not_found")
    gateway.core.scheduler.drain(worker, gateway.now_s())
    return json_response(status_of(worker, gateway))


def query_number(
    request: web.Request, name: str, kind: type[Value], default: Value, least: Value, most: Value
) -> Value:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = kind(text)
    except ValueError:
        value = kind(-1)
    if not least <= value <= most:
        raise bad_request(f"`{name}` must be a number from {least} to {most}", param=name)
    return value


def status_of(worker: PoolWorker, gateway: Gateway) -> WorkerStatus:
    """Return what an operator sees of one worker."""
    heartbeat, weights, placement = worker.heartbeat, worker.weights, worker.placement
    return WorkerStatus(
        name=worker.name,
        kind=worker.kind,
        version=weights.version,
        hash=weights.hash,
        state=state_of(worker, gateway.core.pool, gateway.now_s()),
        turns=len(placement.attempt_ids),
        max_concurrency=worker.turns_max,
        turns_ended=placement.turns_ended,
        trouble=worker.trouble or heartbeat.why,
        is_wanted=worker.provisioning.is_wanted,
        sync_s=weights.sync_s,
        seconds=weights.seconds,
        labels=worker.registration.labels,
        ordered=placement.order.state,
        **{name: getattr(heartbeat, name) for name in AS_REPORTED},
    )
