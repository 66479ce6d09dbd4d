"""`GET /v1/workers/connect`: where the agents of devices come in, by WebSocket."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from rose.errors import RoseError, Unavailable
from rose.front.connections import cut
from rose.rollout.gateway import Gateway
from rose.rollout.messages import FRAME_BYTES_MAX, Join, Leave, ToGateway, Welcome, decode_to_gateway, encode
from rose.rollout.outbox import Outbox
from rose.rollout.pool import Member

JOIN_S = 10.0
COME_BACK_S = 1.0


async def connect(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """One connection of one agent, from its first word to its last."""
    connection = web.WebSocketResponse(max_msg_size=FRAME_BYTES_MAX, compress=False, timeout=1.0)
    await connection.prepare(request)
    outbox = Outbox(connection.send_bytes)
    writer = asyncio.create_task(outbox.run())
    writer.add_done_callback(lambda task: task.cancelled() or task.exception())  # the reader sees that it is gone
    member: Member | None = None
    try:
        async with asyncio.timeout(JOIN_S):
            join, *more = await _received(connection)
        if not isinstance(join, Join):
            raise Unavailable("a worker must join first")
        member = gateway.pool.join(join, outbox.put, gateway.now_s())
        member.close = lambda: _cut(request)
        outbox.put(Welcome(gateway.settings.beat_s))
        gateway.joined(member)
        while True:
            for message in more:
                gateway.heard(member, message)
            more = await _received(connection)
    except (RoseError, ConnectionError, TimeoutError) as error:
        await _say_goodbye(connection, error)
    finally:
        writer.cancel()
        if member is not None:
            gateway.lost(member)
    return connection


async def _received(connection: web.WebSocketResponse) -> list[ToGateway]:
    """The messages of one frame, at least one."""
    while True:
        frame = await connection.receive()
        if frame.type is not aiohttp.WSMsgType.BINARY:
            raise ConnectionResetError("the worker has left")
        messages = decode_to_gateway(frame.data)
        if messages:
            return messages


async def _say_goodbye(connection: web.WebSocketResponse, error: BaseException) -> None:
    if isinstance(error, RoseError) and not connection.closed:
        try:
            await connection.send_bytes(encode([Leave(error.what, COME_BACK_S)]))
        except ConnectionError:
            return
    await connection.close()


def _cut(request: web.Request) -> None:
    """A member that lost its lease may not read any more: nothing waits for it."""
    if request.transport is not None:
        cut(request.transport)
