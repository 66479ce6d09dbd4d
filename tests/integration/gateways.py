"""Gateways and the devices that work for them, started as users do."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration import devices
from tests.integration.devices import Answer, Device, eventually

AGENT, WORKER, TRAINER, OPERATOR = "the-agents-token", "the-workers-token", "a-trainers-token", "an-operators-token"
ROLLOUTS = "a-token-for-the-rollouts-door"
TOKENS = {
    "ROSE_AGENT_TOKEN": AGENT,
    "ROSE_WORKER_TOKEN": WORKER,
    "ROSE_TRAINER_TOKEN": TRAINER,
    "ROSE_OPERATOR_TOKEN": OPERATOR,
    "ROSE_ROLLOUT_TOKEN": ROLLOUTS,
}
GENERATE = "/inference/v1/generate"


class RunningGateway:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.url = device.url

    def ask(
        self, method: str, path: str, body: Any = None, *, token: str = TRAINER, session: str | None = None
    ) -> Answer:
        headers = {"Authorization": f"Bearer {token}"} | ({"X-Session-ID": session} if session else {})
        return self.device.ask(method, path, body, headers=headers)

    def turn(self, token_ids: list[int], session: str | None = None, **sampling: Any) -> Answer:
        wanted = {"logprobs": 1, "ignore_eos": True} | sampling
        body = {"token_ids": token_ids, "sampling_params": wanted}
        return self.ask("POST", GENERATE, body, token=AGENT, session=session)

    def pool(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", "/v1/pool").json
        return found

    def members(self, **wanted: Any) -> list[str]:
        return [m["name"] for m in self.pool()["members"] if all(m[key] == value for key, value in wanted.items())]

    def has_open(self, count: int) -> None:
        eventually(lambda: len(self.members(state="open")) == count)


@contextmanager
def gateway(model: Path, *overrides: str) -> Iterator[RunningGateway]:
    arguments = ["-m", "tests.integration.gateway_process", str(model), "port=0", *overrides]
    device = devices.start(arguments, model, variables=TOKENS)
    try:
        yield RunningGateway(device)
    finally:
        devices.end(device)


@contextmanager
def worker(model: Path, url: str, name: str, *more: str) -> Iterator[Device]:
    """A dedicated worker of this gateway."""
    arguments = ["-m", "rose", "serve", "--lend", str(model), "--rollout-port", "0", "--device", devices.DEVICE]
    arguments += ["--kv-memory-mb", "64", "--gateway", url, "--worker-name", name, *more]
    device = devices.start(arguments, model, variables=TOKENS)
    try:
        yield device
    finally:
        devices.end(device)


class Stream:
    """A streamed turn, read as it comes."""

    def __init__(self, found: RunningGateway, session: str, token_ids: list[int], **sampling: Any) -> None:
        wanted = {"logprobs": 1, "ignore_eos": True} | sampling
        body = {"token_ids": token_ids, "sampling_params": wanted, "stream": True}
        self._connection = http.client.HTTPConnection(devices.HOST, found.device.port, timeout=devices.PATIENCE_S)
        headers = {"Authorization": f"Bearer {AGENT}", "X-Session-ID": session, "Content-Type": "application/json"}
        self._connection.request("POST", GENERATE, json.dumps(body), headers)
        self._response = self._connection.getresponse()
        assert self._response.status == 200, self._response.read()
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[str] = []
        self.finish_reason: str | None = None

    def read(self, tokens: int | None = None) -> None:
        """Until there are so many tokens, or to the end."""
        while tokens is None or len(self.token_ids) < tokens:
            line = self._response.readline()
            if line.strip() == b"data: [DONE]" or not line:
                self._connection.close()
                return
            if line.startswith(b"data: "):
                self._take(json.loads(line.removeprefix(b"data: ")))

    def leave(self) -> None:
        self._connection.close()

    def _take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        [choice] = chunk["choices"]
        self.token_ids += choice["token_ids"]
        self.logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
        for span in choice["weight_versions"]:
            self.versions += [span["version"]] * (span["end"] - span["start"])
        self.finish_reason = choice["finish_reason"] or self.finish_reason
