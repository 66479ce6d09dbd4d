"""The gateway's client: what it sends, what it repeats, and what it gives up on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from rose import client as client_module
from rose.api.requests import TurnSampling, VersionSpan
from rose.api.trajectories import Batch, BeginBody, FinishBody
from rose.client import GatewayClient
from rose.errors import RequestRefused, RoseError, Unavailable

Reply = tuple[int, Any, dict[str, str]]
TURN = {
    "choices": [
        {
            "token_ids": [5, 6],
            "finish_reason": "stop",
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}]},
            "weight_versions": [{"version": "v1", "start": 0, "end": 2}],
        }
    ]
}


class ScriptedGateway:
    """A server that gives the next of its replies to every request, and keeps what it was sent."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        data = await request.read()
        body = msgspec.json.decode(data) if data else None
        self.requests.append((request.method, request.path_qs, dict(request.headers), body))
        status, reply, headers = self.replies.pop(0)
        data = reply if isinstance(reply, bytes) else msgspec.json.encode(reply)
        return web.Response(status=status, body=data, headers=headers)


def play(gateway: ScriptedGateway, story: Callable[[GatewayClient], Awaitable[None]], patience_s: float = 5.0) -> None:
    async def run() -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", gateway.handle)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        [(_, port)] = runner.addresses
        try:
            async with GatewayClient(f"http://127.0.0.1:{port}/", "a-token", patience_s=patience_s) as client:
                await story(client)
        finally:
            await runner.cleanup()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PAUSE_S", 0.01)


def begun(name: str, secret: str) -> dict[str, Any]:
    return {"id": name, "group": None, "task": "", "seed": 1, "session": f"{name}.{secret}"}


def test_a_repeated_begin_sends_the_same_secret() -> None:
    gateway = ScriptedGateway((200, begun("t 1", "s" * 20), {}), (200, begun("t 1", "s" * 20), {}), (200, TURN, {}))

    async def story(client: GatewayClient) -> None:
        for _ in range(2):
            await client.begin(BeginBody(id="t 1"))
        assert client.session("t 1") == "t 1." + "s" * 20 and client.session("another") == "another"
        await client.turn("t 1", {"token_ids": [1]})

    play(gateway, story)
    first, second, turn = gateway.requests
    assert len(first[3]["secret"]) >= 16 and second[3]["secret"] == "s" * 20
    assert turn[2]["X-Session-ID"] == "t 1." + "s" * 20
    assert all(headers["Authorization"] == "Bearer a-token" for _, _, headers, _ in gateway.requests)


def test_a_turn_has_tokens_probabilities_and_versions() -> None:
    gateway = ScriptedGateway((200, TURN, {}))

    async def story(client: GatewayClient) -> None:
        answer = await client.trajectory("t", priority=3)((1, 2), TurnSampling(0.5, 8, (9,), 4))
        assert (answer.token_ids, answer.logprobs, answer.finish_reason) == ((5, 6), (-0.5, -1.0), "stop")
        assert answer.spans == (VersionSpan("v1", 0, 2),)

    play(gateway, story)
    params = {"temperature": 0.5, "max_tokens": 8, "stop_token_ids": [9], "seed": 4, "logprobs": 1}
    params |= {"top_p": 1.0, "top_k": 0}
    assert gateway.requests[0][3] == {"token_ids": [1, 2], "sampling_params": params, "priority": 3}


@pytest.mark.parametrize("reply", [b"{}", b"not JSON", {"choices": []}, {"choices": [{"token_ids": [-1]}]}])
def test_an_unreadable_turn_is_unavailable(reply: Any) -> None:
    async def story(client: GatewayClient) -> None:
        with pytest.raises(Unavailable, match="unreadable"):
            await client.trajectory("t")((1,), TurnSampling())

    play(ScriptedGateway((200, reply, {})), story)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_refusal_for_now_is_repeated(status: int) -> None:
    gateway = ScriptedGateway((status, b"wait", {"Retry-After": "0"}), (503, b"", {}), (200, {"workers": []}, {}))

    async def story(client: GatewayClient) -> None:
        assert await client.pool() == {"workers": []}

    play(gateway, story)
    assert len(gateway.requests) == 3


def test_a_refusal_is_told_at_once_with_the_words_of_the_gateway() -> None:
    reply = {"error": {"message": "no such trajectory"}}
    gateway = ScriptedGateway((404, reply, {}), (400, b"plain \xff words", {}))

    async def story(client: GatewayClient) -> None:
        with pytest.raises(RequestRefused, match="answered 404: no such trajectory"):
            await client.finish("t/1", FinishBody(reward=1.0))
        with pytest.raises(RequestRefused, match="answered 400: plain"):
            await client.publish("v1", folder="/weights", wait_s=3.0)

    play(gateway, story)
    assert gateway.requests[0][1] == "/v1/trajectories/t%2F1/finish"
    assert gateway.requests[1][3]["wait_s"] == 3.0


def test_patience_ends_with_the_last_reason() -> None:
    async def story(client: GatewayClient) -> None:
        with pytest.raises(Unavailable, match="answered 503: busy") as refused:
            await client.pool()
        assert "has workers" in (refused.value.hint or "")

    play(ScriptedGateway(*[(503, b"busy", {})] * 50), story, patience_s=0.05)


def test_a_gateway_that_is_away_is_named() -> None:
    async def story() -> None:
        async with GatewayClient("http://127.0.0.1:9", "a-token", patience_s=0.0) as client:
            await client.pool()

    with pytest.raises(RoseError, match="cannot be reached"):
        asyncio.run(story())


def test_a_batch_that_is_not_ready_is_asked_for_again() -> None:
    batch = msgspec.msgpack.encode(Batch(4, ()))
    gateway = ScriptedGateway((200, b"", {}), (200, batch, {}))

    async def story(client: GatewayClient) -> None:
        assert await client.next_batch(2, 3) == Batch(4, ())

    play(gateway, story)
    assert [path for _, path, _, _ in gateway.requests] == ["/v1/batches/next?groups=2&after=3&wait_s=20"] * 2


@pytest.mark.parametrize("wanted, pause_s", [("3", 3.0), ("0", 0.01), ("9999", 10.0), ("Wed, 21 Oct", 0.01)])
def test_the_pause_between_attempts_is_bounded(wanted: str, pause_s: float) -> None:
    assert client_module._pause_s(wanted) == pause_s


def test_only_the_newest_secrets_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SECRETS_MAX", 2)
    names = ["a", "b", "c"]
    gateway = ScriptedGateway(*[(200, begun(name, "s" * 20), {}) for name in names])

    async def story(client: GatewayClient) -> None:
        for name in names:
            await client.begin(BeginBody(id=name))
        assert [client.session(name) for name in names] == ["a", "b." + "s" * 20, "c." + "s" * 20]

    play(gateway, story)
