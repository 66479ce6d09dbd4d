"""A gateway's core over a ledger file, with one worker that records what it is sent."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from rose.api.worker_messages import Heartbeat, Join, TokensAdded, Turn, TurnTokens
from rose.config.server_settings import GatewaySettings
from rose.engines.base import Sampling, TokenEvent
from rose.engines.token_stream import TokenStream
from rose.gateway.gateway_core import GatewayCore
from rose.gateway.ledger import Ledger
from rose.gateway.sessions import Finish

MODEL = "model"
SAMPLING = Sampling(max_tokens=4096)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger.sqlite"


class Incarnation:
    """A gateway's core over a file, with one member that takes notes."""

    def __init__(self, path: Path, **changes: Any) -> None:
        self.ledger = Ledger(path, MODEL)
        self.core = GatewayCore(MODEL, GatewaySettings(**changes), self.ledger)
        self.told: list[Any] = []
        join = Join("a", "dedicated", MODEL, "0", 8, 10_000, 4096)
        self.member = self.core.join(join, self.told.append, 0.0)

    @property
    def turns(self) -> list[Turn]:
        return [message for message in self.told if isinstance(message, Turn)]

    def ask(self, name: str, *prompt_ids: int, whole: bool = True, sampling: Sampling = SAMPLING) -> TokenStream:
        reader = TokenStream()
        self.core.ask(name, prompt_ids, sampling, reader, 0.0, whole=whole)
        return reader

    def says(self, *token_ids: int, end: Any = None, top: Any = (), scores: Any = ()) -> None:
        """About the newest turn."""
        logprobs = tuple(-0.1 * token_id for token_id in token_ids)
        self.core.receive(
            self.member,
            TokensAdded((TurnTokens(self.turns[-1].attempt_id, token_ids, logprobs, "0", end, 2, top, scores),)),
            0.0,
        )

    def play(self, name: str, group: str, size: int = 1) -> None:
        self.core.trajectories.begin(name, 0.0, group=group, group_size=size, seed=3)
        self.ask(name, 1, 2)
        self.says(5, 6, end="stop")
        self.ask(name, 1, 2, 5, 6, 7)
        self.says(8, end="length")
        self.core.finish(name, Finish(1.0, True), 0.0)

    def kill(self) -> None:
        self.ledger.abandon()


def events_of(reader: TokenStream) -> list[TokenEvent]:
    return list(reader._events)


def rows(path: Path, table: str) -> int:
    with sqlite3.connect(path) as database:
        return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def alone(path: Path, **changes: Any) -> Incarnation:
    """A gateway whose worker takes no turns: all of them wait."""
    gateway = Incarnation(path, **changes)
    gateway.core.receive(gateway.member, Heartbeat(0, 0, 0, 10_000, "0", False), 0.0)
    return gateway


def under_way(gateway: Incarnation) -> int:
    return gateway.core.scheduler.waiting + gateway.core.scheduler.running
