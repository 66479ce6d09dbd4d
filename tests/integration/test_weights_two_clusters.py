"""Trainer and workers in two networks with a thin link between them, which is cut while weights are on their way."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.contract.relays import SECRET
from tests.integration.devices import eventually

from rose.weights.chain import RetryPolicy
from rose.weights.publish import Publisher
from rose.weights.receive import Receiver

ROOT = Path(__file__).parents[2]
RUN = "far-away"
PATIENCE = RetryPolicy(limit_s=60, wait_s_max=0.5)
SHAPE = (1000, 1000)  # 2 MB of bf16; whole and encoded about 1.4 MB, three seconds on the link
RATE = "4mbit"
CUT_S = 1.5
HOST = "10.213.9.1"


class TwoClusters:
    """A network namespace for each, and a pair of virtual cards between them."""

    def __init__(self) -> None:
        self.trainer, self.workers = (f"rose-test-{side}{os.getpid()}" for side in "tw")
        self._card = "rose0"

    def make(self) -> None:
        for side in (self.trainer, self.workers):
            _sh("netns", "add", side)
            _sh("-n", side, "link", "set", "lo", "up")
        _sh("link", "add", self._card, "netns", self.trainer, "type", "veth", "peer", "name", self._card, "netns",
            self.workers)  # fmt: skip
        for side, address in ((self.trainer, HOST), (self.workers, "10.213.9.2")):
            _sh("-n", side, "address", "add", f"{address}/24", "dev", self._card)
            _sh("-n", side, "link", "set", self._card, "up")
            shape = ["tc", "qdisc", "add", "dev", self._card, "root", "tbf", "rate", RATE, "burst", "32k"]
            _sh("netns", "exec", side, *shape, "latency", "100ms")

    def remove(self) -> None:
        for side in (self.trainer, self.workers):
            subprocess.run(["ip", "netns", "del", side], capture_output=True, timeout=30)

    def cut(self) -> None:
        _sh("-n", self.workers, "link", "set", self._card, "down")

    def mend(self) -> None:
        _sh("-n", self.workers, "link", "set", self._card, "up")

    def carried_bytes(self) -> int:
        """To the workers so far."""
        place = f"/sys/class/net/{self._card}/statistics/rx_bytes"
        return int(_sh("netns", "exec", self.workers, "cat", place))

    @contextlib.contextmanager
    def start(self, side: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        command = ["ip", "netns", "exec", side, sys.executable, "-m", *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
            try:
                yield process
            finally:
                process.kill()


def _sh(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30).stdout


@pytest.fixture
def clusters() -> Iterator[TwoClusters]:
    made = TwoClusters()
    try:
        made.make()
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", "") or str(error)
        if not isinstance(error, FileNotFoundError):
            made.remove()
            assert "not permitted" in why or "denied" in why, why  # a wrong command is no reason to skip
        pytest.skip(f"no network namespaces here: {why}")
    yield made
    made.remove()


def ask(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def call(process: subprocess.Popen[str]) -> str:
    ask(process)
    return answer(process)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_link_that_is_cut_in_mid_transfer_costs_time_and_nothing_else(clusters, tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    server = ["rose", "relay", "up", "--folder", str(tmp_path / "relay"), "--secret-file", str(tmp_path / "secret")]
    here = "tests.integration.test_weights_two_clusters"
    with contextlib.ExitStack() as stack:
        relay = stack.enter_context(clusters.start(clusters.trainer, *server, "--listen", f"{HOST}:0"))
        address = answer(relay).split(" at ")[1].split(";")[0]
        trainer = stack.enter_context(clusters.start(clusters.trainer, here, "publish", address))
        worker, joins = (
            stack.enter_context(clusters.start(clusters.workers, here, "receive", address)) for _ in range(2)
        )
        assert [answer(end) for end in (trainer, worker, joins)] == ["ready"] * 3
        assert call(trainer) == call(worker) != ""
        before = clusters.carried_bytes()
        published = call(trainer)
        assert call(worker) == published
        delta = clusters.carried_bytes() - before
        assert delta < 200_000, "a delta is small"
        ask(joins)
        eventually(lambda: clusters.carried_bytes() - before - delta > 500_000)
        clusters.cut()
        time.sleep(CUT_S)  # how long it lasts; nobody waits for it
        clusters.mend()
        assert answer(joins) == published
        assert call(trainer) == call(worker) == call(joins)


def publish_when_asked(address: str) -> None:
    draw = np.random.default_rng(0)
    state = {"weight": (draw.standard_normal(SHAPE) * 0.02).astype(np.float32)}
    publisher = Publisher(state, address, run=RUN, secret=SECRET, retry=PATIENCE)
    print("ready", flush=True)
    for version, _ in enumerate(sys.stdin, start=1):
        state["weight"] += draw.standard_normal(SHAPE).astype(np.float32) * np.float32(1e-6)
        print(publisher.publish(version).result().hash, flush=True)


def receive_when_asked(address: str) -> None:
    receiver = Receiver(address, RUN, secret=SECRET, retry=PATIENCE)
    print("ready", flush=True)
    for _ in sys.stdin:
        received = receiver.fetch()
        assert received is not None
        receiver.installed(received)
        print(received.hash, flush=True)


if __name__ == "__main__":
    (publish_when_asked if sys.argv[1] == "publish" else receive_when_asked)(sys.argv[2])
