"""A gateway's core with workers that record what they are sent, and a clock that ticks as a gateway's does."""

from __future__ import annotations

from typing import Any

from rose.api.worker_messages import (
    Heartbeat,
    Join,
    ToAgent,
    TokensAdded,
    Turn,
    TurnTokens,
)
from rose.config.server_settings import GatewaySettings
from rose.engines.base import Sampling
from rose.engines.token_stream import TokenStream
from rose.gateway.gateway_core import GatewayCore
from rose.gateway.pool import PoolWorker

MODEL = "model"


class World:
    """Books with members that take notes, and a clock that ticks as a gateway's does."""

    def __init__(self, **changes: Any) -> None:
        self.core = GatewayCore(MODEL, GatewaySettings(**({"lease_s": 5.0} | changes)))
        self.now_s = 0.0
        self.told: dict[str, list[ToAgent]] = {}
        self.silent: set[str] = set()
        self.shut: set[str] = set()
        self.gated_since_s: dict[str, float] = {}  # by serving, for the moment
        self.asked = 0

    def join(self, name: str, version: str = "0", **changes: Any) -> PoolWorker:
        told = self.told[name] = []
        known: dict[str, Any] = {"kind": "dedicated", "max_concurrency": 4, "kv_tokens": 10_000, "context_tokens": 4096}
        return self.core.join(
            Join(name=name, model=MODEL, version=version, **(known | changes)), told.append, self.now_s
        )

    def beat(self, member: PoolWorker, version: str | None = None, **changes: Any) -> None:
        open_ = member.name not in self.shut
        since_s = self.gated_since_s.get(member.name)
        shut_s = self.now_s - since_s if since_s is not None else None
        beat = Heartbeat(
            0, 0, 0, member.heartbeat.kv_tokens, version or member.weights.version, open_, shut_s=shut_s, **changes
        )
        self.core.receive(member, beat, self.now_s)

    def wait(self, seconds: float) -> None:
        """Ticks, and everybody who is not silent says how it is."""
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-9:
            self.now_s += 0.25
            for member in list(self.core.pool):
                if member.name not in self.silent:
                    self.beat(member, hash=member.weights.hash)
            self.core.tick(self.now_s)

    def ask(self, prompt_tokens: int = 10) -> TokenStream:
        reader = TokenStream()
        self.asked += 1
        prompt_ids = (self.asked, *range(prompt_tokens - 1))
        self.core.ask(f"t{self.asked}", prompt_ids, Sampling(max_tokens=100), reader, self.now_s)
        return reader

    def turns(self, name: str) -> list[Turn]:
        return [message for message in self.told[name] if isinstance(message, Turn)]

    def says(self, member: PoolWorker, attempt_id: int, *token_ids: int, version: str = "0", end: Any = None) -> None:
        piece = TurnTokens(attempt_id, token_ids, (-1.0,) * len(token_ids), version, end)
        self.core.receive(member, TokensAdded((piece,)), self.now_s)


def kinds(told: list[ToAgent]) -> list[str]:
    return [type(message).__name__ for message in told]
