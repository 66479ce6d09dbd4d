"""Keeping a process running: restarts with back-off and limits, the reason of its end, and a bounded shutdown.

The serving front, the agent of vLLM and a device's sidecar keep a child running, and do different things between two
runs. This module has what they share, and imports nothing of a device.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

EXPONENT_MAX = 30  # more doublings than any longest pause allows
POLL_S = 0.2  # between two polls of a process whose end is waited for without a thread


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The limits of restarts. The pause doubles with every quick death; a run of `healthy_s` starts a new count."""

    pause_first_s: float
    pause_longest_s: float
    healthy_s: float
    deaths_max: float = math.inf  # quick deaths in a row before giving up


class RestartCounter:
    """The quick deaths in a row of one process."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.deaths = 0
        self._counted = 0

    def is_quick(self, lived_s: float) -> bool:
        return lived_s < self._policy.healthy_s

    def pause_after(self, lived_s: float, *, counts: bool = True) -> float | None:
        """Return how long to pause after a run of this length, or None to give up.

        A death that does not count lengthens the pause only.
        """
        if not self.is_quick(lived_s):
            self.deaths = self._counted = 0
        self.deaths += 1
        self._counted += counts
        if self._counted >= self._policy.deaths_max:
            return None
        return min(self._policy.pause_longest_s, self._policy.pause_first_s * 2 ** min(self.deaths - 1, EXPONENT_MAX))


async def keep_running(
    run_once: Callable[[], Awaitable[str]], policy: RestartPolicy, on_exit: Callable[[str, float], None]
) -> str:
    """Call `run_once` again and again until it returns no reason or too many runs were short; return the last reason.

    `on_exit` receives the reason of each end and the pause before the next run.
    """
    counter = RestartCounter(policy)
    while True:
        began_s = time.monotonic()
        reason = await run_once()
        pause_s = counter.pause_after(time.monotonic() - began_s) if reason else None
        if pause_s is None:
            return reason
        on_exit(reason, pause_s)
        await asyncio.sleep(pause_s)


class ChildProcess:
    """A child process with a name for messages; with `is_group`, the leader of a process group."""

    def __init__(self, process: subprocess.Popen[bytes], name: str, *, is_group: bool = False) -> None:
        self._process, self._name, self._is_group = process, name, is_group

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End it at once, with its group."""
        self._signal(signal.SIGKILL)

    async def ended(self) -> None:
        """Wait for its end, without a thread."""
        while self.is_running:
            await asyncio.sleep(POLL_S)

    async def exit_reason(self, grace_s: float) -> str:
        """Wait for its end, kill it after `grace_s`, and return why it ended."""
        await asyncio.to_thread(self._wait, grace_s)
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"left with code {code}"
        return f"{self._name} {how}"

    async def stop(self, grace_s: float) -> None:
        """Ask it to exit, and after `grace_s` kill it and its group."""
        self._signal(signal.SIGTERM)
        await asyncio.to_thread(self._wait, grace_s)
        self._signal(signal.SIGKILL)

    def _wait(self, grace_s: float) -> None:
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if not self._is_group:
            self._process.send_signal(number)  # does nothing once the process was waited for
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
