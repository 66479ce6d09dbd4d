"""The exchange of loads among several gateways, and the route by which clients and other gateways ask for it.

Every gateway asks the others once a second, with the operator's token, which all gateways of a job share. One that does
not answer is left out: no worker is moved to it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack

import aiohttp
import msgspec
from aiohttp import web

from rose.api.trajectories import ShardStatus
from rose.bounds import UNREADABLE
from rose.config.server_settings import GatewaySettings
from rose.core.shard_balance import MoveWorkers, ShardLoad, ShardLoads
from rose.errors import ConfigError, Unavailable
from rose.gateway.auth import ROLES, VARIABLES
from rose.gateway.gateway_core import GatewayCore
from rose.gateway.gateway_server import Gateway
from rose.gateway.shard_moves import Record
from rose.gateway.trainer_routes import POLL_S_MAX, query_number
from rose.observe.journal import Journal
from rose.openai.response_writing import json_response

logger = logging.getLogger("rose.gateway")

EXCHANGE_S = 1.0
ANSWER_S = 2.0  # a gateway that takes longer is left out of this exchange
STATUS_BYTES_MAX = 1 << 16

_status: msgspec.json.Decoder[ShardStatus] = msgspec.json.Decoder(ShardStatus)


def check_shards(settings: GatewaySettings) -> None:
    """Raise ConfigError for settings of several gateways that do not fit together."""
    shards, shard = settings.shards, settings.shard
    if not shards and shard is None:
        return
    if settings.control.api is not None:
        what = "the control routes for trainers publish weights on one gateway, and this one is one of several"
        raise ConfigError(what, hint="leave out --door, or `shards`")
    if shard is None or not shard < len(shards):
        what = f"shard {shard} is not a place in the list of {len(shards)} shards"
        raise ConfigError(what, hint="set `shards` to the addresses of all gateways and `shard` to this one's place")
    for address in shards:
        if not address.startswith(("http://", "https://")):
            raise ConfigError(f"`{address}` is not an address", hint="for example http://gateway-0:8002")
    missing = [VARIABLES[role] for role in ROLES if VARIABLES[role] not in os.environ]
    if missing:
        raise ConfigError(f"several gateways share their tokens, and {', '.join(missing)} is not set", hint="set it")


async def shard_status(gateway: Gateway, request: web.Request) -> web.Response:
    """Answer with the status of this shard, once it has `at_least` so many complete groups or `wait_s` has passed."""
    at_least = query_number(request, "at_least", int, 0, 0, 1 << 31)
    wait_s = query_number(request, "wait_s", float, 0.0, 0.0, POLL_S_MAX)
    trajectories = gateway.core.trajectories
    gateway.core.ledger.check()
    await gateway.changes.wait_until(lambda: trajectories.complete_groups >= at_least or None, wait_s)
    await gateway.durable()
    return json_response(status_of(gateway.core, gateway.now_s()))


def status_of(core: GatewayCore, now_s: float) -> ShardStatus:
    """Return what a gateway tells its clients and the other gateways about itself."""
    load, trajectories = core.shard_moves.load(now_s), core.trajectories
    return ShardStatus(
        core.shard_moves.shard,
        core.shard_moves.shards,
        trajectories.last_batch,
        trajectories.last_groups,
        trajectories.complete_groups,
        load.waiting_turns,
        load.free_workers,
        load.idle_workers,
        load.turns_per_worker,
    )


async def exchange_loads(gateway: Gateway, token: str) -> None:
    """Ask the other gateways for their loads, and move workers, for ever; return at once for a single gateway."""
    settings, moves = gateway.settings, gateway.core.shard_moves
    if settings.shard is None:
        return
    others = {number: url for number, url in enumerate(settings.shards) if number != settings.shard}
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    with ExitStack() as stack:
        if settings.shard_journal is not None:
            moves.record = _recorder(stack.enter_context(Journal(settings.shard_journal)))
        async with aiohttp.ClientSession(timeout=timeout, headers={"Authorization": f"Bearer {token}"}) as http:
            while True:
                await asyncio.sleep(EXCHANGE_S)
                loads = await asyncio.gather(*(_ask(http, number, url) for number, url in others.items()))
                moves.update([load for load in loads if load is not None], gateway.now_s())


async def _ask(http: aiohttp.ClientSession, number: int, url: str) -> ShardLoad | None:
    """Return the load of another shard, or None if it does not answer as that shard."""
    try:
        async with http.get(f"{url.rstrip('/')}/v1/shard", allow_redirects=False) as response:
            data = await response.content.read(STATUS_BYTES_MAX)
            if response.status != 200:
                raise Unavailable(f"it answered {response.status}")
            status = _status.decode(data)
            if status.shard != number:
                raise Unavailable(f"it calls itself shard {status.shard}")
    except (aiohttp.ClientError, OSError, TimeoutError, Unavailable, *UNREADABLE) as error:
        logger.debug("shard %d at %s is left out: %s", number, url, error)
        return None
    return ShardLoad(
        number, status.waiting_turns, status.free_workers, status.idle_workers, max(1, status.turns_per_worker)
    )


def _recorder(journal: Journal) -> Record:
    def record(now_s: float, seen: ShardLoads, moves: Sequence[MoveWorkers]) -> None:
        try:
            journal.append(time.time(), seen, moves)
        except Unavailable as error:
            logger.warning("%s", error.what)

    return record
