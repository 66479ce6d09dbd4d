"""Messages between gateway and workers: their encoding, what is refused, and the queue before a connection."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from rose.api import worker_messages
from rose.api.faults import Fault
from rose.api.requests import Request
from rose.api.worker_messages import (
    AT_ONCE,
    FRAME_BYTES,
    FRAME_MESSAGES_MAX,
    Activate,
    CancelTurn,
    EvictTurn,
    Heartbeat,
    Join,
    Leave,
    NewVersion,
    Park,
    SendQueue,
    TokensAdded,
    Turn,
    TurnRefused,
    TurnTokens,
    VersionReady,
    Welcome,
    decode_to_agent,
    decode_to_gateway,
    encode,
)
from rose.errors import Unavailable

TO_AGENT = [
    Welcome(1.0),
    Turn(7, Request("r", (1, 2)), "v1"),
    EvictTurn(7),
    CancelTurn(7),
    NewVersion("v1", relay="/relay", run="r", hash="h"),
    Activate("work waits"),
    Park("no work"),
    Leave("the gateway ends", 2.0),
]
TO_GATEWAY = [
    Join("w", "borrowed", "m", "v0", 4, 1000, 512),
    Heartbeat(1, 2, 3, 4, "v0", True, slack_s=-1.0),
    TokensAdded((TurnTokens(7, (1,), (-0.5,), "v0", "stop", 3, (((1, -0.5),),)),)),
    TurnRefused(7, Fault("QueueFull", "full")),
    VersionReady("v1", hash="h", seconds={"stage": 1.0}),
]


def test_every_message_is_the_same_after_the_wire() -> None:
    assert decode_to_agent(encode(TO_AGENT)) == TO_AGENT
    assert decode_to_gateway(encode(TO_GATEWAY)) == TO_GATEWAY


def test_names_on_the_wire_are_those_of_earlier_versions() -> None:
    turn, join, beat = (msgspec.msgpack.decode(encode([one]))[0] for one in (TO_AGENT[1], TO_GATEWAY[0], TO_GATEWAY[1]))
    assert (turn["type"], turn["ticket"], join["seats"], beat["type"]) == ("Turn", 7, 4, "Beat")
    tags = [one["type"] for one in msgspec.msgpack.decode(encode([*TO_AGENT[2:4], *TO_GATEWAY[2:4]]))]
    assert tags == ["Evict", "Cancel", "Tokens", "Refused"]


@pytest.mark.parametrize(
    "message",
    [
        {"type": "Refused", "ticket": -1, "fault": {"kind": "x", "what": "y"}},
        {"type": "Unknown"},
        {"type": "Turn", "ticket": 1},
        {"type": "Tokens", "pieces": [[1, [1], [float("nan")], "v"]]},
        {"type": "Beat"},
        [],
    ],
)
def test_anything_else_cuts_the_connection(message: Any) -> None:
    frame = msgspec.msgpack.encode([message])
    with pytest.raises(Unavailable, match="a worker sent something unreadable"):
        decode_to_gateway(frame)
    with pytest.raises(Unavailable, match="run the same version of ROSE") as refused:
        decode_to_agent(frame)
    assert refused.value.what.startswith("the gateway sent")


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x91" * 5000, encode([CancelTurn(1)] * (FRAME_MESSAGES_MAX + 1))])
def test_bytes_that_are_no_frame_are_refused(frame: bytes) -> None:
    with pytest.raises(Unavailable):
        decode_to_agent(frame)


def test_messages_that_wait_together_go_in_one_frame() -> None:
    async def story() -> list[bytes]:
        frames: list[bytes] = []

        async def send(frame: bytes) -> None:
            frames.append(frame)

        queue = SendQueue(send)
        for message in TO_AGENT:
            queue.put(message)
        running = asyncio.create_task(queue.run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        queue.put(Park("later"))
        await asyncio.sleep(0.01)
        running.cancel()
        return frames

    first, second = asyncio.run(story())
    assert decode_to_agent(first) == TO_AGENT and decode_to_agent(second) == [Park("later")]


@pytest.mark.parametrize("count, tokens", [(2500, 1), (AT_ONCE, 60_000), (5, 400_000)])
def test_a_frame_is_closed_when_it_is_large(count: int, tokens: int) -> None:
    async def story() -> list[bytes]:
        frames: list[bytes] = []

        async def send(frame: bytes) -> None:
            frames.append(frame)

        queue = SendQueue(send)
        for attempt in range(count):
            queue.put(Turn(attempt, Request("r", (1,) * tokens)))
        await queue.flush()
        return frames

    frames = asyncio.run(story())
    messages = [message for frame in frames for message in decode_to_agent(frame)]
    assert [message.attempt_id for message in messages if isinstance(message, Turn)] == list(range(count))
    assert all(len(frame) < FRAME_BYTES + 2 * tokens + 1000 for frame in frames) and len(frames) > 1


def test_a_peer_that_does_not_read_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_messages, "WAITING_MAX", 3)

    async def story() -> None:
        async def send(frame: bytes) -> None:
            return

        queue = SendQueue(send)
        for attempt in range(4):
            queue.put(CancelTurn(attempt))
        await queue.run()

    with pytest.raises(ConnectionResetError, match="3 messages wait"):
        asyncio.run(story())
