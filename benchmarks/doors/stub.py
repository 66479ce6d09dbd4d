"""A worker that computes nothing: every turn takes the same time, whoever asks.

    python -m doors.stub GATEWAY MODEL DELAY_MS      (the worker's token comes in ROSE_WORKER_TOKEN)

It can be asked in two ways. Directly, it is an HTTP server with the token route. As a worker, it joins the gateway as
any agent does, tells the tokens of its turns as often as an agent with so many of them would, and the last of each as
soon as its time has come. The difference between the two is the gateway.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

import aiohttp
import msgspec
from aiohttp import web

from rose.api.worker_messages import (
    CONNECT_PATH,
    CancelTurn,
    EvictTurn,
    Heartbeat,
    Join,
    SendQueue,
    TokensAdded,
    Turn,
    TurnTokens,
    Welcome,
    decode_to_agent,
)
from rose.openai.loops import loop_factory
from rose.worker.turn_executor import gather_s

VERSION, TOKEN, LOGPROB = "0", 7, -0.5
SEATS, KV_TOKENS, CONTEXT_TOKENS = 4096, 1 << 30, 4096


class _Sampling(msgspec.Struct):
    max_tokens: int


class _Body(msgspec.Struct):
    token_ids: list[int]
    sampling_params: _Sampling


_body = msgspec.json.Decoder(_Body)


class Running:
    """One turn on the worker's side: its tokens come evenly over its time."""

    def __init__(self, turn: Turn, now_s: float) -> None:
        self.attempt_id, self.began_s = turn.attempt_id, now_s
        self.wanted = turn.request.sampling.max_tokens - len(turn.request.partial.token_ids)
        self.told = 0

    def piece(self, count: int, finish: str | None = None) -> TurnTokens:
        cached = 0 if self.told == 0 else None
        self.told += count
        return TurnTokens(self.attempt_id, (TOKEN,) * count, (LOGPROB,) * count, VERSION, finish, cached)  # type: ignore[arg-type]


class Worker:
    def __init__(self, delay_s: float, say: Callable[[TokensAdded], None]) -> None:
        self._delay_s, self._say = delay_s, say
        self._turns: dict[int, Running] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def start(self, turn: Turn) -> None:
        loop = asyncio.get_running_loop()
        self._turns[turn.attempt_id] = Running(turn, loop.time())
        self._timers[turn.attempt_id] = loop.call_later(self._delay_s, self.end, turn.attempt_id, "length")

    def end(self, attempt_id: int, how: str) -> None:
        turn = self._turns.pop(attempt_id, None)
        if turn is None:
            return
        self._timers.pop(attempt_id).cancel()
        left = turn.wanted - turn.told if how == "length" else 0
        self._say(TokensAdded((turn.piece(left, how),)))

    def forget(self, attempt_id: int) -> None:
        if self._turns.pop(attempt_id, None) is not None:
            self._timers.pop(attempt_id).cancel()

    async def tell_for_ever(self) -> None:
        while True:
            await asyncio.sleep(gather_s(self.running))
            now_s = asyncio.get_running_loop().time()
            news = [
                turn.piece(due)
                for turn in self._turns.values()
                if (due := int(turn.wanted * (now_s - turn.began_s) / self._delay_s) - turn.told) > 0
                and turn.told + due < turn.wanted
            ]
            if news:
                self._say(TokensAdded(tuple(news)))

    @property
    def running(self) -> int:
        return len(self._turns)


async def work(gateway: str, model: str, delay_s: float, ready: Callable[[], None]) -> None:
    headers = {"Authorization": f"Bearer {os.environ['ROSE_WORKER_TOKEN']}"}
    async with aiohttp.ClientSession() as http, http.ws_connect(gateway + CONNECT_PATH, headers=headers) as connection:
        outbox = SendQueue(connection.send_bytes)
        worker = Worker(delay_s, outbox.put)
        outbox.put(Join("stub", "dedicated", model, VERSION, SEATS, KV_TOKENS, CONTEXT_TOKENS))
        await outbox.flush()
        tasks = [asyncio.create_task(task) for task in (outbox.run(), worker.tell_for_ever())]
        async for frame in connection:
            for order in decode_to_agent(frame.data):
                match order:
                    case Welcome():
                        tasks.append(asyncio.create_task(_beat(outbox, worker, order.beat_s)))
                        ready()
                    case Turn():
                        worker.start(order)
                    case EvictTurn():
                        worker.end(order.attempt_id, "abort")
                    case CancelTurn():
                        worker.forget(order.attempt_id)
        for task in tasks:
            task.cancel()


async def _beat(outbox: SendQueue, worker: Worker, beat_s: float) -> None:
    while True:
        outbox.put(
            Heartbeat(
                running=worker.running,
                waiting=0,
                kv_used_tokens=0,
                kv_tokens=KV_TOKENS,
                version=VERSION,
                gate_open=True,
                tokens_per_s=0.0,
            )
        )
        await asyncio.sleep(beat_s)


def door(delay_s: float) -> web.Application:
    """The same work without a gateway."""

    async def generate(request: web.Request) -> web.Response:
        body = _body.decode(await request.read())
        await asyncio.sleep(delay_s)
        count = body.sampling_params.max_tokens
        entry = {"token": f"token_id:{TOKEN}", "token_id": TOKEN, "logprob": LOGPROB}
        choice = {
            "index": 0,
            "token_ids": [TOKEN] * count,
            "finish_reason": "length",
            "logprobs": {"content": [entry] * count},
            "weight_versions": [{"version": VERSION, "start": 0, "end": count}],
        }
        reply = {"request_id": "stub", "choices": [choice], "weight_version": VERSION}
        return web.Response(body=msgspec.json.encode(reply), content_type="application/json")

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    return app


async def main(gateway: str, model: str, delay_ms: str) -> None:
    delay_s = float(delay_ms) / 1000
    runner = web.AppRunner(door(delay_s), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    await work(gateway, model, delay_s, lambda: print(f"the stub is ready at {url}", flush=True))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as loop:
        loop.run(main(*sys.argv[1:]))
