"""`GET /v1/workers/connect`: the WebSocket by which the agents of devices join the pool."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from rose.api.worker_messages import (
    FRAME_BYTES_MAX,
    Join,
    Leave,
    SendQueue,
    ToGateway,
    TokensAdded,
    Welcome,
    decode_to_gateway,
    encode,
)
from rose.bounds import TEXT_CHARACTERS_MAX
from rose.errors import RoseError, Unavailable
from rose.gateway.gateway_server import Gateway
from rose.gateway.pool import PoolWorker
from rose.openai.connections import cut

JOIN_S = 10.0
COME_BACK_S = 1.0
WORK_AT_ONCE = 64  # messages and pieces of tokens before other connections get their turn: a few milliseconds
WORK_OF_OTHERS = 8  # a message that is not tokens counts as so many: it may place several turns


async def connect(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """Serve one connection of one agent, from its registration to its end."""
    connection = web.WebSocketResponse(max_msg_size=FRAME_BYTES_MAX, compress=False, timeout=1.0)
    await connection.prepare(request)

    def close() -> None:
        """Cut the connection of a worker that lost its lease or does not read."""
        if request.transport is not None:
            cut(request.transport)

    queue = SendQueue(connection.send_bytes)
    writer = asyncio.create_task(queue.run())
    writer.add_done_callback(lambda task: None if task.cancelled() or task.exception() is None else close())
    worker: PoolWorker | None = None
    try:
        async with asyncio.timeout(JOIN_S):
            first = await _receive_frame(connection)
        if not first or not isinstance(join := first[0], Join):
            raise Unavailable("a worker must join first")
        worker = gateway.core.pool.join(join, queue.put, gateway.now_s(), close)
        queue.put(Welcome(gateway.settings.beat_s))
        gateway.core.on_joined(worker, gateway.now_s())
        messages, work = first[1:], 0  # also over frames: those that have come already are received without a pause
        while True:
            for message in messages:
                gateway.receive(worker, message)
                work += 1 + len(message.pieces) if isinstance(message, TokensAdded) else WORK_OF_OTHERS
                if work >= WORK_AT_ONCE:
                    work = 0
                    await asyncio.sleep(0)
            if not (messages := await _receive_frame(connection)):
                await asyncio.sleep(0)
    except (RoseError, ConnectionError, TimeoutError) as error:
        if isinstance(error, RoseError) and not connection.closed:
            try:
                await connection.send_bytes(encode([Leave(error.what[:TEXT_CHARACTERS_MAX], COME_BACK_S)]))
            except ConnectionError:
                return connection
        await connection.close()
    finally:
        writer.cancel()
        if worker is not None:
            gateway.remove_worker(worker)
    return connection


async def _receive_frame(connection: web.WebSocketResponse) -> list[ToGateway]:
    """Return the messages of one frame."""
    frame = await connection.receive()
    if frame.type is not aiohttp.WSMsgType.BINARY:
        raise ConnectionResetError("the worker has left")
    return decode_to_gateway(frame.data)
