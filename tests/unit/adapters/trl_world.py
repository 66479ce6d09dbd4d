"""A pool without sockets, and what TRL's side of it needs: settings, a dataset and rewards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tests.unit.fake_gateway import FakeGateway

from rose.adapters.trl import RosePool, TrlSample, TrlWeights, TrlWorker
from rose.api.trajectories import BeginBody, FinishBody, PublishReply
from rose.models.tensors import open_tensors

SECRET = b"the secret of a run in a test"
LABEL = "1-abcdef"
PATIENCE_S = 20.0
DATASET = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": n} for n in range(3)]


class PoolGateway(FakeGateway):
    """A gateway that also tells the state of its pool, and keeps what was published."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, waits=True)
        self.version, self.last_batch, self.workers = LABEL, 0, ["open"]
        self.published: list[dict[str, Any]] = []
        self.begun: list[BeginBody] = []
        self.ended: dict[str, FinishBody] = {}

    async def __aenter__(self) -> PoolGateway:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def begin(self, body: BeginBody) -> None:
        self.begun.append(body)
        await super().begin(body)

    async def finish(self, name: str, body: FinishBody) -> None:
        self.ended[name] = body
        await super().finish(name, body)

    async def publish(self, version: str, **where: Any) -> PublishReply:
        self.version = version
        self.published.append({"version": version} | where)
        return PublishReply(version, [], {})

    async def pool(self) -> dict[str, Any]:
        members = [
            {"name": f"w{n}", "state": state, "turns": 0, "version": self.version, "trouble": "its relay is away"}
            for n, state in enumerate(self.workers)
        ]
        return {"members": members, "version": self.version, "last_batch": self.last_batch, "waiting_turns": 3}


class FakePool(RosePool):
    """A pool whose gateway is an object here. One version is published."""

    def __init__(self, folder: Path, relay: str = "relay") -> None:
        super().__init__(folder, gateway="http://nowhere", relay=relay, run="r", token="a-token", secret=SECRET)
        self.gateway = PoolGateway(self.folder)
        self.numbers[LABEL] = 1

    def client(self, patience_s: float | None = None) -> Any:
        return self.gateway


def settings(**changes: Any) -> Any:
    """The fields of TRL's settings that the adapter reads."""
    plain = {
        "num_generations": 4,
        "max_completion_length": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "seed": 42,
        "chat_template_kwargs": None,
        "queue_maxsize": 1024,
        "max_inflight_tasks": 8,
        "max_staleness": 2,
        "token_budget": -1,
    }
    return SimpleNamespace(**(plain | changes))


def by_member(completions: list[Any], answer: list[int], **columns: Any) -> list[float]:
    """Reward the members of a group by their rank, and by the row."""
    assert set(columns) == {"prompts", "completion_ids"} and len(set(answer)) == 1
    return [answer[0] + rank for rank in range(len(completions))]


def publish(pool: RosePool) -> TrlWeights:
    """Publish the weights of the pool's folder, as TRL's trainer does when it begins."""
    weights, tensors = TrlWeights(pool), open_tensors(pool.folder.path)
    weights.init_weight_transfer()
    weights.send_weights((name, torch.from_numpy(tensors.float32(name))) for name in tensors.names())
    weights.resume()
    return weights


def take(worker: TrlWorker, count: int) -> list[TrlSample]:
    return [worker.rollout_buffer.get(timeout=PATIENCE_S) for _ in range(count)]


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never happened"
        time.sleep(0.01)


def held(seconds: float = 3600.0) -> Callable[[str], Awaitable[None]]:
    """Return a pause that no turn outlives."""
    return lambda name: asyncio.sleep(seconds)
