"""Devices as an owner would start them, `rose serve`, one process tree each.

Engines are pinned to the device's core by `rose serve` itself; every other process of the tree is moved to the other
cores, so that a user's bytes never wait behind a step and no step waits behind HTTP. A device that nothing is asked of
sleeps: several can stand by on one core, each with its own mode, and only one of them is used at a time.

Where there is one device for both models, serving and rollouts are two addresses of it. `halves` is two devices on one
core with half of the memory each, which the kernel lets run in turns.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from coserving.processes import CORES, DEVICE_CORE, OTHER_CORES, Cores, cpu_s, family, is_pinned, may_use, move
from rose.errors import Unavailable

START_S_MAX = 180.0
DRAIN_S_MAX = 30.0
ANSWER_S_MAX = 15.0
STOP_S_MAX = 20.0
READY = re.compile(r" is ready at (http://\S+?)(?:/v1)?/?\s*$")
ROLLOUT = re.compile(r"lending to .* at (http://[^\s/]+)")
STEP_SECONDS = "rose_step_seconds_total"
BREACHES, TRIPS = "rose_slo_breaches_total", "rose_breaker_trips_total"
LATE_TTFT, LATE_TPOT = (f'{BREACHES}{{kind="{kind}"}}' for kind in ("ttft", "tpot"))
AMBIGUOUS = f'{BREACHES}{{kind="ambiguous"}}'
LENDING = "rose_lending"  # 1 while it is lent, 0 while the owner or the breaker stopped it
LENT_TOKENS, EVICTED_TOKENS = "rose_rollout_tokens_total", "rose_rollout_evicted_tokens_total"
UNDER_WAY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a device is started with."""

    serving: Path | None
    rollout: Path | None
    mode: str = "decode"
    ttft_ms: float = 500.0
    tpot_ms: float = 150.0
    kv_memory_mb: int = 512

    def command(self) -> list[str]:
        lend = ["--lend", str(self.rollout), "--rollout-port", "0"] if self.rollout else []
        both = ["--lend-mode", self.mode, "--ttft-ms", f"{self.ttft_ms:g}", "--tpot-ms", f"{self.tpot_ms:g}"]
        if self.mode == "paper":  # uses the whole budgets
            both += ["--set", "lend.slack_share=1.0"]
        return [
            *[sys.executable, "-m", "rose", "serve"],
            *([str(self.serving), "--port", "0"] if self.serving else []),
            *["--device", f"cpu:{DEVICE_CORE}", "--kv-memory-mb", str(self.kv_memory_mb)],
            *lend,
            *(both if self.serving and self.rollout else []),
        ]


class Device:
    """One `rose serve`. Started when made; use `close` in the end."""

    def __init__(self, terms: Terms, log: Path) -> None:
        self.terms = terms
        self.token, self.owner_token = secrets.token_hex(16), secrets.token_hex(16)
        self.url: str | None = None
        self.rollout_url: str | None = None
        self._log = log
        self._changed = threading.Event()
        tokens = {"ROSE_ROLLOUT_TOKEN": self.token, "ROSE_OWNER_TOKEN": self.owner_token}
        with may_use(CORES):  # it checks that it may use its core; the engine pins itself
            self.process = subprocess.Popen(
                terms.command(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | tokens
            )
        threading.Thread(target=self._listen, daemon=True).start()
        self._wait_until_ready()
        members = family(self.process.pid)
        self.engine_pids = [pid for pid in members if is_pinned(pid, DEVICE_CORE)]
        for pid in set(members) - set(self.engine_pids):
            move(pid, OTHER_CORES)

    def counters(self, *, of_rollouts: bool = False) -> dict[str, float]:
        """Everything on the metrics page, summed over labels and with them."""
        url = self.rollout_url if of_rollouts else self.url
        request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {self.token}"})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S_MAX) as response:
                return samples(response.read().decode())
        except OSError as error:
            raise Unavailable(f"{url}/metrics does not answer: {error}", hint=f"see {self._log}") from error

    def engine_cpu_s(self) -> float:
        return sum(cpu_s(pid) for pid in self.engine_pids)

    def wait_until_idle(self) -> None:
        """Nothing under way on either side."""
        deadline_s = time.monotonic() + DRAIN_S_MAX
        while self._under_way():
            if time.monotonic() > deadline_s:
                raise Unavailable(f"requests are still under way after {DRAIN_S_MAX:.0f} s", hint=f"see {self._log}")
            time.sleep(0.1)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _under_way(self) -> float:
        sides = [self.counters()] if self.url else []
        sides += [self.counters(of_rollouts=True)] if self.rollout_url else []
        return sum(side.get(name, 0.0) for side in sides for name in UNDER_WAY)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self._log.open("a") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                if found := ROLLOUT.search(line):
                    self.rollout_url = found[1]
                elif found := READY.search(line):
                    self._is_ready_at(found[1])
                self._changed.set()
        self._changed.set()

    def _is_ready_at(self, url: str) -> None:
        """A device without a serving model has one address, the rollouts'."""
        if self.terms.serving is not None:
            self.url = url
        else:
            self.rollout_url = url

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + START_S_MAX
        while (self.terms.serving and not self.url) or (self.terms.rollout and not self.rollout_url):
            self._changed.clear()
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                self.process.kill()
                end = "\n".join(self._log.read_text().splitlines()[-5:])
                raise Unavailable(f"`{' '.join(self.terms.command())}` did not start:\n{end}", hint=f"see {self._log}")
            self._changed.wait(0.5)


def samples(page: str) -> dict[str, float]:
    """A Prometheus page as numbers: by name, summed over labels, and by name with labels."""
    found: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(page):
        for key in {name, name + labels}:
            found[key] = found.get(key, 0.0) + float(value)
    return found


class Site:
    """The devices of one mode: usually one, which both sides share."""

    def __init__(self, serving: Device, rollout: Device) -> None:
        self.serving = serving
        self.rollout = rollout

    @property
    def is_shared(self) -> bool:
        return self.serving is self.rollout

    def cores(self) -> Cores:
        pids = {pid for device in (self.serving, self.rollout) for pid in device.engine_pids}
        return Cores(DEVICE_CORE, OTHER_CORES, tuple(sorted(pids)))

    def wait_until_idle(self) -> None:
        for device in {self.serving, self.rollout}:
            device.wait_until_idle()

    def close(self) -> None:
        for device in {self.serving, self.rollout}:
            device.close()


def open_site(mode: str, terms: Terms, folder: Path) -> Site:
    """`terms` are those of a lent device; their mode is set here."""
    if mode == "halves":
        half_mb = max(1, terms.kv_memory_mb // 2)
        serving = Device(Terms(terms.serving, None, kv_memory_mb=half_mb), folder / "halves-serving.log")
        rollout = Device(Terms(None, terms.rollout, kv_memory_mb=half_mb), folder / "halves-rollout.log")
        return Site(serving, rollout)
    lend_mode = mode if mode in ("idle", "paper", "alternate", "fcfs") else "decode"
    changed = Terms(terms.serving, terms.rollout, lend_mode, terms.ttft_ms, terms.tpot_ms, terms.kv_memory_mb)
    device = Device(changed, folder / f"{mode}.log")
    return Site(device, device)
