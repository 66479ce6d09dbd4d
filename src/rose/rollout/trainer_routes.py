"""The trainer's and the environments' own routes: trajectories, batches of finished groups, versions of the weights.

Batches come as JSON, or as msgpack for whoever accepts that: tokens by the hundred thousand need no text.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from rose.bounds import ITEMS_MAX, Count, Name, Seconds, Serial, Text
from rose.core.allocation import Cycle
from rose.errors import RequestRefused
from rose.front.answering import json_response
from rose.front.bodies import BodyReader
from rose.front.failures import Failure, bad_request
from rose.rollout.gateway import Gateway
from rose.rollout.messages import NewVersion
from rose.rollout.pool import Member
from rose.rollout.roles import is_trusted
from rose.rollout.sessions import Finish, Reward
from rose.rollout.trajectories import SECRET_PATTERN, Batch, Forbidden

MSGPACK = "application/msgpack"
POLL_S_DEFAULT, POLL_S_MAX = 30.0, 120.0
CYCLES_SHOWN = 64

Secret = Annotated[str, Meta(max_length=64, pattern=SECRET_PATTERN)]
Value = TypeVar("Value", int, float)


class BeginBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """With an `id` of the caller's own, asking twice makes one trajectory.

    An agent that may have to ask twice sends a `secret` that it made itself. Without one the gateway makes one, and
    only the trainer can begin the trajectory again.
    """

    id: Name | None = None
    group: Name | None = None
    group_size: Annotated[int, Meta(ge=1, le=4096)] = 1
    task: Text = ""
    seed: Serial | None = None
    secret: Secret | None = None


class Begun(msgspec.Struct):
    """`session` is the name for the trajectory's turns and its end: its id and its secret."""

    id: Name
    group: Name | None
    task: Text
    seed: Serial
    session: Text = ""


class FinishBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    reward: Reward = 0.0
    is_success: bool = False
    invalid_turns: Count = 0
    is_lost: bool = False


class Finished(msgspec.Struct):
    id: Name
    turns: Count
    forks: Count


class PublishBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`wait_s` waits for the members of the pool to run it, and then says which do.

    A version means one set of weights for ever: members that run it do not read them again. They lie in a folder that
    all members can read, or under the run's name in a relay.
    """

    version: Name
    folder: Text = ""
    relay: Text = ""
    run: Annotated[str, Meta(max_length=100)] = ""
    hash: Annotated[str, Meta(max_length=128)] = ""
    wait_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0


class Published(msgspec.Struct):
    """`sync_s`: per worker, seconds from publishing until it ran the version. `pause_s`: per worker, how long
    generation stalled.
    """

    version: Name
    ready: Annotated[list[Name], Meta(max_length=ITEMS_MAX)]
    behind: Annotated[dict[Name, Text], Meta(max_length=ITEMS_MAX)]  # why each of the others does not run it yet
    sync_s: Annotated[dict[Name, Seconds], Meta(max_length=ITEMS_MAX)] = {}
    pause_s: Annotated[dict[Name, Seconds], Meta(max_length=ITEMS_MAX)] = {}


class MemberShown(msgspec.Struct):
    name: str
    kind: str
    version: str
    hash: str  # of the weights it runs, as far as it knows
    state: str
    turns: int
    seats: int
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
    shut_s: float | None  # serving has shut its gate for so long, for the moment
    sync_s: float | None  # from the publishing of the version that it runs until it ran it
    seconds: dict[str, float]  # by phase, of taking that version; in `commit` lies the pause


class PoolShown(msgspec.Struct):
    """`allocation` is how devices came and went lately, on the gateway's clock, which shows `now_s`.

    `allocation_overhead_share` is the share of the gateway's life in which some device was wanted and not usable yet,
    or on its way back.
    """

    version: str | None
    members: list[MemberShown]
    waiting_turns: int
    running_turns: int
    counts: dict[str, int]
    now_s: float
    allocation: list[Cycle]
    allocation_overhead_share: float | None


BEGIN, FINISH, PUBLISH = BodyReader(BeginBody), BodyReader(FinishBody), BodyReader(PublishBody)


async def begin(gateway: Gateway, request: web.Request) -> web.Response:
    body = BEGIN.read(await gateway.front.read(request))
    session = gateway.books.begin(
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
    body = FINISH.read(await gateway.front.read(request))
    name = request.match_info["trajectory"]
    try:
        finish = Finish(body.reward, body.is_success, body.invalid_turns, body.is_lost)
        session = gateway.finish(name, finish, is_trusted=is_trusted(request))
    except Forbidden:
        raise
    except KeyError as error:
        raise Failure(404, f"there is no trajectory `{name[:80]}`", code="not_found") from error
    except RequestRefused as error:
        raise Failure(409, error.what, code="already_finished") from error
    await gateway.durable()
    return json_response(Finished(session.trajectory_id, session.turn_count, session.forks))


async def next_batch(gateway: Gateway, request: web.Request) -> web.Response:
    groups = _number(request, "groups", int, 1, 1, 1 << 20)
    after = _number(request, "after", int, 0, 0, 1 << 62)
    wait_s = _number(request, "wait_s", float, POLL_S_DEFAULT, 0.0, POLL_S_MAX)
    found = await _until(gateway, lambda: gateway.books.batch(groups, after), wait_s)
    if found is None:
        return web.Response(status=204)
    await gateway.durable()
    is_binary = MSGPACK in request.headers.get("Accept", "")
    body = await encoded_batch(found, msgspec.msgpack.encode if is_binary else msgspec.json.encode)
    return web.Response(body=body, content_type=MSGPACK if is_binary else "application/json")


async def encoded_batch(batch: Batch, encode: Callable[[Any], bytes]) -> bytes:
    """Encode one trajectory at a time: a whole batch may be hundreds of megabytes, and others wait for the loop."""
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
    body = PUBLISH.read(await gateway.front.read(request))
    if bool(body.folder) == bool(body.relay) or bool(body.relay) != bool(body.run):
        raise bad_request("a version lies in a `folder`, or in a `relay` under the name of a `run`", param="folder")
    gateway.publish(NewVersion(body.version, body.folder, body.relay, body.run, body.hash))
    await gateway.durable()
    if body.wait_s:
        await _until(gateway, lambda: _all_run(gateway, body.version) or None, body.wait_s)
    ready = [member.name for member in gateway.pool if member.version == body.version]
    behind = {
        member.name: member.trouble or "it is being loaded" for member in gateway.pool if member.version != body.version
    }
    took = [member for member in gateway.pool if member.version == body.version and member.seconds]
    return json_response(
        Published(
            body.version,
            ready,
            behind,
            {member.name: member.sync_s for member in took if member.sync_s is not None},
            {member.name: member.seconds["commit"] for member in took if "commit" in member.seconds},
        )
    )


async def pool(gateway: Gateway, request: web.Request) -> web.Response:
    counts, provisioning, now_s = gateway.scheduler.counts, gateway.books.provisioning, gateway.now_s()
    shown = PoolShown(
        version=gateway.pool.wanted_version,
        members=[_shown(member, gateway) for member in gateway.pool],
        waiting_turns=gateway.scheduler.waiting,
        running_turns=gateway.scheduler.running,
        counts={name: getattr(counts, name) for name in type(counts).__slots__},
        now_s=now_s,
        allocation=provisioning.cycles[-CYCLES_SHOWN:],
        allocation_overhead_share=provisioning.overhead_share(now_s),
    )
    return json_response(shown)


async def drain(gateway: Gateway, request: web.Request) -> web.Response:
    name = request.match_info["member"]
    member = gateway.pool.get(name)
    if member is None:
        raise Failure(404, f"there is no worker `{name[:80]}`; GET /v1/pool lists them", code="not_found")
    gateway.books.drain(member, gateway.now_s())
    return json_response(_shown(member, gateway))


async def _until(gateway: Gateway, look: Callable[[], Any], wait_s: float) -> Any:
    """What `look` finds, as soon as it finds something; None after this long."""
    try:
        async with asyncio.timeout(wait_s):
            while (found := look()) is None:
                await gateway.news.wait()
            return found
    except TimeoutError:
        return None


def _all_run(gateway: Gateway, version: str) -> bool:
    return all(member.version == version for member in gateway.pool)


def _number(request: web.Request, name: str, kind: type[Value], default: Value, least: Value, most: Value) -> Value:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        found = kind(text)
    except ValueError:
        found = kind(-1)
    if not least <= found <= most:
        raise bad_request(f"`{name}` must be a number from {least} to {most}", param=name)
    return found


def _shown(member: Member, gateway: Gateway) -> MemberShown:
    beat = member.beat
    return MemberShown(
        name=member.name,
        kind=member.kind,
        version=member.version,
        hash=member.hash,
        state=_state(member, gateway),
        turns=len(member.tickets),
        seats=member.seats,
        running=beat.running if beat is not None else 0,
        waiting=beat.waiting if beat is not None else 0,
        kv_used_tokens=beat.kv_used_tokens if beat is not None else 0,
        kv_tokens=member.kv_tokens,
        tokens_per_s=beat.tokens_per_s if beat is not None else 0.0,
        turns_ended=member.turns_ended,
        trouble=member.trouble or (beat.why if beat is not None else ""),
        place=member.place,
        is_offered=member.is_offered,
        is_wanted=member.is_wanted,
        prefill_tok_s=beat.prefill_tok_s if beat is not None else None,
        decode_tok_s=beat.decode_tok_s if beat is not None else None,
        slack_s=beat.slack_s if beat is not None else None,
        shut_s=beat.shut_s if beat is not None else None,
        sync_s=member.sync_s,
        seconds=member.seconds,
    )


def _state(member: Member, gateway: Gateway) -> str:
    if member.draining:
        return "draining"
    if not member.is_offered:
        return "held"
    if not member.is_wanted or member.place == "parked":
        return "parked"
    if not member.gate_open or gateway.now_s() < member.closed_until_s:
        return "closed"
    return "open" if gateway.pool.may_run(member) else "behind"
