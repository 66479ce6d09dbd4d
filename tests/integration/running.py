"""Runs of `rose run`, started as users start them, and small enough for a test."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.integration.devices import PATIENCE_S, ROOT, environment, eventually

# A model that hardly plays has many groups in which all lose alike; without dynamic sampling each step has its groups.
SMALL = (
    "steps=2",
    "groups.groups=2",
    "groups.size=4",
    "groups.dynamic_sampling=false",
    "evaluation.episodes=8",
    "evaluation.every_steps=2",
    "checkpoint.every_steps=1",
    "checkpoint.keep=1",
    "serving.kv_memory_mb=64",
    "worker.kv_memory_mb=64",
    "train.starved_steps_max=1000",
)


class Run:
    """One run under way; `lines` holds what it said. `before` begins its command, and `variables` are for it alone."""

    before: tuple[str, ...] = ()
    patience_s = PATIENCE_S
    variables: Mapping[str, str] = MappingProxyType({})

    def __init__(self, runs: Path, model: Path, *overrides: str) -> None:
        given = [f"runs={runs}", f"rollout_model={model}", *SMALL, *overrides]
        self._start(runs / "it", "--name", "it", *(word for override in given for word in ("--set", override)))

    @classmethod
    def resumed(cls, folder: Path, *arguments: str) -> Run:
        """The run in this folder, going on."""
        run = cls.__new__(cls)
        run._start(folder, "--resume", str(folder), *arguments)
        return run

    def _start(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*self.before, sys.executable, "-m", "rose", "run", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment() | {"ROSE_TEST_RUN": str(self.folder), **self.variables},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self, seconds: float = 250.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code

    @property
    def words(self) -> str:
        return "".join(self.lines)

    def until_said(self, pattern: str) -> None:
        eventually(lambda: self.has_said(pattern) or self.process.poll() is not None, self.patience_s)
        assert self.has_said(pattern), self.words

    def has_said(self, pattern: str) -> bool:
        return re.search(pattern, self.words) is not None

    def end(self) -> None:
        """Whatever state a test left it in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] == kind]

    def processes(self) -> dict[int, str]:
        """Everything that this run has started and that still runs; they inherit a mark in their environment."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.process.pid and self._is_ours(entry):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def _is_ours(self, entry: Path) -> bool:
        try:
            mine = f"ROSE_TEST_RUN={self.folder}".encode()
            return mine in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)


def processes_of(found: dict[int, str], words: str) -> list[int]:
    """Those whose command line matches; a process that has not become its command yet is not one."""
    return [pid for pid, command in found.items() if re.search(words, command) and "run.child" not in command]


def kill(process_id: int) -> None:
    os.kill(process_id, signal.SIGKILL)


def kill_all(run: Run) -> None:
    """The run and everything it has started, at once."""
    for process_id in (run.process.pid, *run.processes()):
        with contextlib.suppress(ProcessLookupError):
            kill(process_id)
