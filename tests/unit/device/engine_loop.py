"""The loop of one scripted engine in a thread, for tests, and the front's end of its socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from tests.integration.scripted_engine import ScriptedEngine

from rose.api.frames import FrameReader
from rose.config.server_settings import EngineSettings
from rose.device import engine_messages, executor, transport
from rose.engines.base import Budget, Request, Sampling, Stepped

STANDING_STILL = Budget(0, 0)


@dataclass
class Peer:
    """The front's end of the socket, blocking."""

    connection: socket.socket
    engine: ScriptedEngine
    thread: threading.Thread
    outcome: list[BaseException | None]

    def __post_init__(self) -> None:
        self._reader = FrameReader()
        self._unread: list[engine_messages.Event] = []

    def send(self, *commands: engine_messages.Command) -> None:
        self.connection.sendall(b"".join(map(engine_messages.frame, commands)))

    def receive(self) -> engine_messages.Event:
        while not self._unread:
            data = self.connection.recv(1 << 16)
            assert data, "the executor closed the socket"
            self._unread += map(engine_messages.decode_event, self._reader.push(data))
        return self._unread.pop(0)

    def until(self, wanted: Callable[[engine_messages.Event], bool]) -> list[engine_messages.Event]:
        """Everything up to the first event like this."""
        seen = [self.receive()]
        while not wanted(seen[-1]):
            seen.append(self.receive())
        return seen

    def ask(self, command: engine_messages.Command) -> engine_messages.Reply:
        self.send(command)
        *_, reply = self.until(lambda event: isinstance(event, engine_messages.Reply))
        assert isinstance(reply, engine_messages.Reply)
        return reply

    def end(self) -> BaseException | None:
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.outcome[0]


Start = Callable[..., Peer]


@pytest.fixture
def start() -> Iterator[Start]:
    peers: list[Peer] = []

    def begin(*, budget: Budget = Budget(512, 64)) -> Peer:  # noqa: B008
        ours, theirs = socket.socketpair()
        ours.settimeout(30)
        engine = ScriptedEngine(EngineSettings())
        loop = executor.Executor(engine, transport.EngineLink(theirs), budget)
        outcome: list[BaseException | None] = []

        def run() -> None:
            try:
                loop.run()
                outcome.append(None)
            except BaseException as error:
                outcome.append(error)
            theirs.close()

        peer = Peer(ours, engine, threading.Thread(target=run, daemon=True), outcome)
        peer.thread.start()
        peers.append(peer)
        return peer

    yield begin
    for peer in peers:
        peer.connection.close()
        peer.thread.join(30)


def request(name: str = "r", prompt: tuple[int, ...] = (1, 2, 3), **sampling: int) -> Request:
    return Request(name, prompt, Sampling(**{"max_tokens": 5, **sampling}))  # type: ignore[arg-type]


def finishes(name: str) -> Callable[[engine_messages.Event], bool]:
    def found(event: engine_messages.Event) -> bool:
        return isinstance(event, Stepped) and any(
            token.request_id == name and token.finish_reason for token in event.events
        )

    return found


def tokens_of(events: list[engine_messages.Event], name: str) -> list[int]:
    steps = [event for event in events if isinstance(event, Stepped)]
    return [token for step in steps for event in step.events if event.request_id == name for token in event.token_ids]
