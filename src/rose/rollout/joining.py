"""`GET /v1/workers/connect`: where the agents of devices come in, by WebSocket."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from rose.bounds import TEXT_CHARACTERS_MAX
from rose.errors import RoseError, Unavailable
from rose.front.connections import cut
from rose.rollout.gateway import Gateway
from rose.rollout.messages import FRAME_BYTES_MAX, Join, Leave, ToGateway, Tokens, Welcome, decode_to_gateway, encode
from rose.rollout.outbox import Outbox
from rose.rollout.pool import Member

JOIN_S = 10.0
COME_BACK_S = 1.0
WORK_AT_ONCE = 64  # messages and pieces of tokens between two looks at the other connections: a few milliseconds
WORK_OF_OTHERS = 8  # a message that is not tokens counts as so many: it may place several turns


async def connect(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """One connection of one agent, from its first word to its last."""
    connection = web.WebSocketResponse(max_msg_size=FRAME_BYTES_MAX, compress=False, timeout=1.0)
    await connection.prepare(request)
    outbox = Outbox(connection.send_bytes)
    writer = asyncio.create_task(outbox.run())
    writer.add_done_callback(lambda task: _on_writer_done(task, request))
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
            work = 0
            for message in more:
                gateway.heard(member, message)
                work += 1 + len(message.pieces) if isinstance(message, Tokens) else WORK_OF_OTHERS
                if work >= WORK_AT_ONCE:
                    work = 0
                    await asyncio.sleep(0)
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
            await connection.send_bytes(encode([Leave(error.what[:TEXT_CHARACTERS_MAX], COME_BACK_S)]))
        except ConnectionError:
            return
    await connection.close()


def _on_writer_done(task: asyncio.Task[None], request: web.Request) -> None:
    """Cut the connection when nothing can be sent on it any more; its reader then ends."""
    if not task.cancelled() and task.exception() is not None:
        _cut(request)


def _cut(request: web.Request) -> None:
    """A member that lost its lease may not read any more: nothing waits for it."""
    if request.transport is not None:
        cut(request.transport)
