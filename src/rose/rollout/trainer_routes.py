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

from rose.core.allocation import Cycle
from rose.errors import RequestRefused
from rose.front.answering import json_response
from rose.front.bodies import BodyReader
from rose.front.failures import Failure, bad_request
from rose.rollout.gateway import Gateway
from rose.rollout.messages import NewVersion
from rose.rollout.pool import Member
from rose.rollout.trajectories import Finish

MSGPACK = "application/msgpack"
POLL_S_DEFAULT, POLL_S_MAX = 30.0, 120.0
CYCLES_SHOWN = 64

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Place = Annotated[str, Meta(max_length=4096)]
Value = TypeVar("Value", int, float)


class BeginBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """With an `id` of the caller's own, asking twice makes one trajectory."""

    id: Name | None = None
    group: Name | None = None
    group_size: Annotated[int, Meta(ge=1, le=4096)] = 1
    task: str = ""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None


class Begun(msgspec.Struct):
    id: str
    group: str | None
    task: str
    seed: int


class FinishBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    reward: float = 0.0
    is_success: bool = False
    invalid_turns: Annotated[int, Meta(ge=0)] = 0
    is_lost: bool = False


class Finished(msgspec.Struct):
    id: str
    turns: int
    forks: int


class PublishBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`wait_s` waits for the members of the pool to run it, and then says which do.

    A version means one set of weights for ever: members that run it do not read them again. They lie in a folder that
    all members can read, or under the run's name in a relay.
    """

    version: Name
    folder: Place = ""
    relay: Place = ""
    run: Annotated[str, Meta(max_length=100)] = ""
    hash: Annotated[str, Meta(max_length=128)] = ""
    wait_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0


class Published(msgspec.Struct):
    """`sync_s` and `pause_s` are of those that took it now, by name: until it ran there, and what turns stood still."""

    version: str
    ready: list[str]
    behind: dict[str, str]  # why each of the others does not run it yet
    sync_s: dict[str, float] = {}
    pause_s: dict[str, float] = {}


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
    )
    await gateway.durable()
    return json_response(Begun(session.trajectory_id, session.group_id, session.task, session.seed))


async def finish(gateway: Gateway, request: web.Request) -> web.Response:
    body = FINISH.read(await gateway.front.read(request))
    name = request.match_info["trajectory"]
    try:
        session = gateway.finish(name, Finish(body.reward, body.is_success, body.invalid_turns, body.is_lost))
    except KeyError as error:
        raise Failure(404, f"there is no trajectory `{name[:80]}`", code="not_found") from error
    except RequestRefused as error:
        raise Failure(409, error.what, code="already_finished") from error
    await gateway.durable()
    return json_response(Finished(name, session.turn_count, session.forks))


async def next_batch(gateway: Gateway, request: web.Request) -> web.Response:
    groups = _number(request, "groups", int, 1, 1, 1 << 20)
    after = _number(request, "after", int, 0, 0, 1 << 62)
    wait_s = _number(request, "wait_s", float, POLL_S_DEFAULT, 0.0, POLL_S_MAX)
    found = await _until(gateway, lambda: gateway.books.batch(groups, after), wait_s)
    if found is None:
        return web.Response(status=204)
    await gateway.durable()
    if MSGPACK in request.headers.get("Accept", ""):
        return web.Response(body=msgspec.msgpack.encode(found), content_type=MSGPACK)
    return web.Response(body=msgspec.json.encode(found), content_type="application/json")


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
