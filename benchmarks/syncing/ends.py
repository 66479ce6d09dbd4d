"""One end of the transfer as a process: `python -m syncing.ends publish|receive PARAMETERS SEED`.

Reads one JSON command per line and answers with one line. Both ends make the same weights, so a receiver holds the
base of the first delta as a worker would: it runs on those tensors, stepping in a thread of its own, and swaps between
two steps. Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from deltas.updates import synthetic

from rose.weights.codec import codec_kernels as kernels
from rose.weights.publish import Publisher
from rose.weights.receive import Received, Receiver
from rose.weights.relay.opening import RelayAccess, open_relay
from syncing.codecs import codec_of
from syncing.links import Throttled
from syncing.stores import SECRET

NOISE = 3e-7  # moves about 1.2 % of bf16 weights of scale 0.02
PERIOD = 20_000_000  # the weights repeat after this many, which no codec here can see, and are made in seconds
COLUMNS = 4000
TENSOR_ROWS = 6250  # 25 million numbers, about a matrix of a 7B
STEP_S = 0.002


class Weights:
    """bf16 tensors that go to and fro between two states: every step changes the same share of them."""

    def __init__(self, parameters: int, seed: int) -> None:
        base, new = synthetic(min(PERIOD, parameters), NOISE, seed)
        self.bits = np.resize(base, parameters)
        places = np.flatnonzero(base != new)
        self._places, self._other = places, [new[places], base[places]]
        self._period = len(base)
        self.changed_share = len(places) / len(base)
        rows = parameters // COLUMNS
        whole = self.bits.reshape(rows, COLUMNS)
        self.tensors = {
            f"layer.{n:03}.weight": whole[first : first + TENSOR_ROWS]
            for n, first in enumerate(range(0, rows, TENSOR_ROWS))
        }

    def step(self) -> None:
        for first in range(0, len(self.bits), self._period):
            part = self.bits[first : first + self._period]
            part[self._places] = self._other[0]
        self._other.reverse()


class Memory:
    """The peak of this process's memory beyond what it had when the mark was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before_kb = self._read("VmRSS")

    def peak_extra_mb(self) -> float:
        return (self._read("VmHWM") - self._before_kb) / 1024

    def _read(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1])


def relay_of(command: dict[str, Any]) -> Any:
    options = tuple(command.get("object_options", {}).items())
    return open_relay(command["address"], RelayAccess(secret=SECRET.encode(), object_options=options))


class PublishEnd:
    def __init__(self, parameters: int, seed: int) -> None:
        self.weights = Weights(parameters, seed)
        self.publisher: Publisher | None = None
        self.memory = Memory()
        self.version = 0

    def open(self, command: dict[str, Any]) -> dict[str, Any]:
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None
        self.memory, self.version = Memory(), 1
        self.publisher = Publisher(
            self.weights.tensors, relay_of(command), run=command["run"], secret=SECRET.encode(), anchor_every=10_000,
            codec=codec_of(command["method"]),
        )  # fmt: skip
        self.publisher.publish(1)
        self.publisher.wait()
        return {"changed_share": self.weights.changed_share}

    def publish(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.publisher is not None
        self.weights.step()
        self.version += 1
        begin_s = time.monotonic()
        published = self.publisher.publish(self.version).result()
        return {"begin_s": begin_s, "end_s": time.monotonic(), "seconds": published.seconds, "hash": published.hash,
                "bytes": published.size_bytes, "peak_extra_mb": self.memory.peak_extra_mb()}  # fmt: skip

    def republish(self, command: dict[str, Any]) -> dict[str, Any]:
        """The newest version whole, for who holds nothing."""
        assert self.publisher is not None
        self.publisher.republish().result()
        return {}

    def settle(self, command: dict[str, Any]) -> dict[str, Any]:
        """Let the housekeeping end, so that it does not disturb whoever receives."""
        assert self.publisher is not None
        self.publisher.wait()
        return {}


class ReceiveEnd:
    def __init__(self, parameters: int, seed: int) -> None:
        self.parameters, self.seed = parameters, seed
        self.receiver: Receiver | None = None
        self.engine = Engine()
        self.relay: Any = None

    def open(self, command: dict[str, Any]) -> dict[str, Any]:
        """Join a run. Unless it is to be a late joiner, it begins on the weights that the run begins with."""
        self.engine.take(None)
        self.receiver = None
        initial = None if command.get("late") else Weights(self.parameters, self.seed).tensors
        self.relay = Throttled(relay_of(command))
        self.receiver = Receiver(
            self.relay, command["run"], secret=SECRET.encode(), initial=initial, codec=codec_of(command["method"])
        )
        del initial
        if not command.get("late"):
            self.fetch(command)
        self.memory = Memory()
        return {}

    def fetch(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.receiver is not None
        self.relay.mbit_s = command.get("throttle_mbit_s")
        before_s = os.times().system
        received = self.receiver.fetch()
        kernel_s = os.times().system - before_s
        assert received is not None, "there was nothing to fetch"
        pause_s = self.engine.take(received)
        end_s = time.monotonic()
        self.receiver.installed(received)
        return {"end_s": end_s, "pause_s": pause_s, "seconds": received.seconds, "bytes": received.size_bytes,
                "hash": received.hash, "peak_extra_mb": self.memory.peak_extra_mb() if hasattr(self, "memory") else 0,
                "kernel_s": kernel_s}  # fmt: skip

    def prepare(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.receiver is not None
        begin_s = time.monotonic()
        self.receiver.prepare()
        return {"prepare_s": time.monotonic() - begin_s}


class Engine:
    """A thread that steps on the tensors it has: reads some of every one of them, then looks whether there are new."""

    def __init__(self) -> None:
        self._tensors: dict[str, Any] = {}
        self._offer: tuple[Received | None] | None = None
        self._taken = threading.Event()
        self._pause_s = 0.0
        threading.Thread(target=self._loop, daemon=True).start()

    def take(self, received: Received | None) -> float:
        """Offer new weights; returns how long the engine stood still for them."""
        self._taken.clear()
        self._offer = (received,)
        self._taken.wait()
        return self._pause_s

    def _loop(self) -> None:
        total = 0
        while True:
            for tensor in self._tensors.values():
                total += int(tensor[0].sum())
            time.sleep(STEP_S)
            if self._offer is not None:
                begin_s = time.perf_counter()
                received, self._offer = self._offer[0], None
                self._tensors = {} if received is None else dict(received.tensors)
                self._pause_s = time.perf_counter() - begin_s
                self._taken.set()


def warm_up() -> None:
    """Load what is compiled, which is done once in the life of a process."""
    kernels.warm_up(to_encode=True)
    for method in ("ours", "coo", "full"):
        codec, base = codec_of(method), np.arange(100_000, dtype=np.uint16)
        new = base ^ (base % 7 == 0)
        held = base.copy()
        codec.apply(codec.encode(base, new, "BF16"), held)
        codec.apply(codec.encode_full(new, "BF16"), held)
        assert np.array_equal(held, new)


def main() -> None:
    kind, parameters, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    warm_up()
    end = PublishEnd(parameters, seed) if kind == "publish" else ReceiveEnd(parameters, seed)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(end, command["do"])(command)), flush=True)


if __name__ == "__main__":
    main()
