"""A lent device as an owner starts it: `rose serve MODEL --lend ROLLOUT_MODEL`, three processes, two ports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration import devices
from tests.integration.devices import Answer, Device

ROLLOUT_TOKEN, OWNER_TOKEN = "a-token-for-rollouts", "a-token-for-the-owner"
ARGUMENTS = ["--port", "0", "--rollout-port", "0", "--kv-memory-mb", "64", "--set", "engine.max_context_tokens=1024"]
ARGUMENTS += ["--set", "lend.max_context_tokens=1024", "--device", devices.DEVICE]


class LentDevice:
    """Both doors of a running device."""

    def __init__(self, serving: Device, rollout_port: int) -> None:
        self.serving = serving
        self.rollouts = Device(serving.process, serving.lines, rollout_port, "frozenlake-1m")

    def lending(self, action: str = "", body: Any = None, token: str = OWNER_TOKEN) -> Answer:
        path, headers = "/rose/lending" + (f"/{action}" if action else ""), {"Authorization": f"Bearer {token}"}
        return self.serving.ask("POST" if action else "GET", path, body, headers=headers)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.lending().json
        return found

    def rollout(self, token_ids: list[int], token: str = ROLLOUT_TOKEN, **sampling: Any) -> Answer:
        body = {"token_ids": token_ids, "sampling_params": {"ignore_eos": True, **sampling}}
        return self.rollouts.ask("POST", "/inference/v1/generate", body, headers={"Authorization": f"Bearer {token}"})

    def metrics(self, *, of: str = "serving") -> str:
        device = self.serving if of == "serving" else self.rollouts
        return device.ask("GET", "/metrics", headers={"Authorization": f"Bearer {ROLLOUT_TOKEN}"}).body.decode()

    def process(self, module: str) -> int:
        """The child process that runs this module."""
        for pid in devices.children_of(self.serving.process.pid):
            if module in Path(f"/proc/{pid}/cmdline").read_bytes().decode():
                return pid
        raise AssertionError(f"no process runs {module}")


@contextmanager
def lent(serving_model: Path, rollout_model: Path, *more: str) -> Iterator[LentDevice]:
    arguments = ["-m", "rose", "serve", str(serving_model), "--lend", str(rollout_model), *ARGUMENTS, *more]
    tokens = {"ROSE_ROLLOUT_TOKEN": ROLLOUT_TOKEN, "ROSE_OWNER_TOKEN": OWNER_TOKEN}
    serving = devices.start(arguments, serving_model, variables=tokens)
    try:
        yield LentDevice(serving, _rollout_port(serving))
    finally:
        devices.end(serving)


def _rollout_port(serving: Device) -> int:
    assert serving.process.stdout is not None
    for line in serving.process.stdout:
        serving.lines.append(line)
        found = re.search(r"lending to \S+ at http://[^:]+:(\d+)", line)
        if found:
            return int(found[1])
    raise AssertionError(f"it does not lend: {serving.lines}")


def tokens_of(answer: Answer) -> list[int]:
    found: list[int] = json.loads(answer.body)["choices"][0]["token_ids"]
    return found
