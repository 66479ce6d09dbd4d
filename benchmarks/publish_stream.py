"""What it costs to publish weights that an iterator yields one by one, instead of tensors that stay: time and memory.

    python benchmarks/publish_stream.py --json FILE

    resident   the publisher reads a dict of tensors that stays where it is
    streamed   an iterator yields the same tensors, one at a time
    gathered   the iterator joins two halves of each tensor first, as a sharded trainer does; its time is included
    copied     the iterator fills a dict on the host, and the publisher reads that (what streaming replaces)

The ways take turns on the same weights, which change by one step between repeats, and the order rotates. Time is from
the call until workers can fetch the version. A ratio is taken within a repeat. Memory is measured in a process of its
own for each way: by how much the peak of its resident memory is above that of reading all tensors without a publisher,
over the size of the model in bf16. There, tensors are made when they are read, as if they came from a GPU; so the one
tensor at hand is in both peaks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import torch

from rose.weights.codec.codec_kernels import warm_up
from rose.weights.publish import PublishedVersion, Publisher
from rose.weights.relay.filesystem import FilesystemRelay
from rose.weights.shards import Tensor

SECRET = b"the secret of a benchmark"
PARAMETERS, PARAMETERS_QUICK = 400_000_000, 100_000_000
REPEATS, REPEATS_QUICK = 7, 3
VERSIONS_OF_MEMORY = 3  # a full snapshot and two deltas
HIDDEN = 1024
EMBEDDING_SHARE = 0.2  # of all parameters, in one tensor
LAYER_ROWS = 4096
SCALE, STEP = 0.02, 2e-7  # of weights, and of what a step adds: about one number of a hundred changes in bf16
GROWTH = 4e-5  # of all weights from version to version, which changes about as many
TIME_TARGET, MEMORY_TARGET = 1.15, 0.8  # of resident, and of copied
COLUMNS = ("dtype", "way", "publish_s", "ratio_time", "ratio_time_low", "ratio_time_high", "sent_mb", "peak_mb",
           "peak_over_model")  # fmt: skip

Weights = dict[str, torch.Tensor]
Publish = Callable[[int], PublishedVersion]


def shapes(parameters: int) -> dict[str, tuple[int, int]]:
    embedding = int(parameters * EMBEDDING_SHARE) // HIDDEN
    layers = (parameters - embedding * HIDDEN) // (LAYER_ROWS * HIDDEN)
    return {"embed": (embedding, HIDDEN), **{f"layer.{n:03}": (LAYER_ROWS, HIDDEN) for n in range(layers)}}


def make(name: str, shape: tuple[int, int], dtype: torch.dtype, version: int = 0) -> torch.Tensor:
    """Return one tensor of a version, the same whenever it is made; without a second tensor of its size."""
    dice, made = torch.Generator().manual_seed(hash_of(name)), torch.empty(shape, dtype=dtype)
    for rows in made.split(LAYER_ROWS):
        rows.copy_(torch.empty(rows.shape).normal_(0.0, SCALE, generator=dice).mul_(1 + version * GROWTH))
    return made


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode(), "little") % (1 << 40)


class Ways:
    """The ways to publish the same weights, each with a publisher and a run of its own."""

    def __init__(self, weights: Weights, relay: Path) -> None:
        self._weights, self._relay = weights, relay
        self._host = {name: torch.empty(tensor.shape, dtype=torch.bfloat16) for name, tensor in weights.items()}
        self._halves: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.publishers = {way: self._publisher(way) for way in ("resident", "streamed", "gathered", "copied")}

    def _publisher(self, way: str) -> Publisher:
        tensors = [Tensor(name, tuple(tensor.shape)) for name, tensor in self._weights.items()]
        source = {"resident": self._weights, "copied": self._host}.get(way)
        relay = FilesystemRelay(self._relay, durable=False)
        return Publisher(source, relay, run=way, secret=SECRET, tensors=tensors, anchor_every=1000)

    def split(self) -> None:
        self._halves = {name: torch.tensor_split(tensor, 2) for name, tensor in self._weights.items()}

    def publish(self, way: str, version: int) -> PublishedVersion:
        publisher = self.publishers[way]
        if way == "streamed":
            return publisher.publish_stream(version, self._weights.items())
        if way == "gathered":
            return publisher.publish_stream(version, ((name, torch.cat(part)) for name, part in self._halves.items()))
        if way == "copied":
            for name, tensor in self._weights.items():
                self._host[name].copy_(tensor)
        return publisher.publish(version).result()


def measure_time(parameters: int, dtype: torch.dtype, repeats: int, relay: Path) -> list[dict[str, Any]]:
    """Return a row per way."""
    masters = {name: make(name, shape, torch.float32) for name, shape in shapes(parameters).items()}
    weights = masters if dtype == torch.float32 else {name: value.to(dtype) for name, value in masters.items()}
    ways = Ways(weights, relay)
    ways.split()
    names, seconds, sent = list(ways.publishers), {way: [] for way in ways.publishers}, {}
    for repeat in range(repeats + 1):
        for way in names[repeat % len(names) :] + names[: repeat % len(names)]:
            began_s = time.perf_counter()
            published = ways.publish(way, repeat + 1)
            took_s = time.perf_counter() - began_s
            ways.publishers[way].wait()
            if repeat:  # the first is a full snapshot
                seconds[way].append(took_s)
                sent[way] = published.size_bytes / 1e6
        step(masters, weights, repeat)
    for publisher in ways.publishers.values():
        publisher.close()
    return [row_of(way, dtype, seconds, sent) for way in names]


def step(masters: Weights, weights: Weights, number: int) -> None:
    dice = torch.Generator().manual_seed(number)
    for name, master in masters.items():
        master.add_(torch.empty(master.shape).normal_(0.0, STEP, generator=dice))
        if weights[name] is not master:
            weights[name].copy_(master)


def row_of(way: str, dtype: torch.dtype, seconds: dict[str, list[float]], sent: dict[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "way": way, "sent_mb": round(sent[way], 2)}
    row["publish_s"] = round(harness.median_and_spread(seconds[way])[0], 4)
    ratios = [mine / theirs for mine, theirs in zip(seconds[way], seconds["resident"])]
    harness.put_ratio(row, "ratio_time", ratios)
    return row


def measure_memory(way: str, parameters: int, dtype: torch.dtype, relay: Path) -> None:
    """Print how much higher the peak of resident memory is than without a publisher, in bytes."""
    found, kind = shapes(parameters), torch.bfloat16
    warm_up(to_encode=True)
    for _ in stream(found, dtype, 0):
        pass
    before = memory_of("VmHWM")
    tensors = [Tensor(name, shape) for name, shape in found.items()]
    host = {name: torch.zeros(shape, dtype=kind) for name, shape in found.items()} if way == "copied" else None
    options = {"run": way, "secret": SECRET, "tensors": tensors, "anchor_every": 1000}
    with Publisher(host, FilesystemRelay(relay, durable=False), **options) as publisher:
        for version in range(VERSIONS_OF_MEMORY):
            if host is None:
                publisher.publish_stream(version + 1, stream(found, dtype, version))
                continue
            for name, tensor in stream(found, dtype, version):
                host[name].copy_(tensor)
            publisher.publish(version + 1).result()
    print(json.dumps(memory_of("VmHWM") - before))


def stream(found: dict[str, tuple[int, int]], dtype: torch.dtype, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in found.items():
        yield name, make(name, shape, dtype, version)


def memory_of(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise AssertionError(field)


def peak_of(way: str, parameters: int, dtype: torch.dtype) -> int:
    with tempfile.TemporaryDirectory() as relay:
        command = [sys.executable, __file__, "--memory-of", way, "--parameters", str(parameters), "--relay", relay]
        done = subprocess.run([*command, "--dtype", str(dtype).removeprefix("torch.")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def main() -> int:
    options = harness.parser(__doc__ or "")
    options.add_argument("--parameters", type=int)
    options.add_argument("--repeats", type=int)
    options.add_argument("--memory-of", help=argparse.SUPPRESS)
    options.add_argument("--dtype", help=argparse.SUPPRESS)
    options.add_argument("--relay", type=Path, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    parameters = arguments.parameters or (PARAMETERS_QUICK if arguments.quick else PARAMETERS)
    if arguments.memory_of:
        measure_memory(arguments.memory_of, parameters, getattr(torch, arguments.dtype), arguments.relay)
        return 0
    begun, repeats = harness.machine(), arguments.repeats or (REPEATS_QUICK if arguments.quick else REPEATS)
    warm_up(to_encode=True)
    rows = []
    model_bytes = 2 * sum(a * b for a, b in shapes(parameters).values())
    for dtype in (torch.float32, torch.bfloat16):
        with tempfile.TemporaryDirectory() as relay:
            rows += measure_time(parameters, dtype, repeats, Path(relay))
        for row in rows[-3:]:
            if row["way"] in ("streamed", "copied"):
                peak = peak_of(row["way"], parameters, dtype)
                row |= {"peak_mb": round(peak / 1e6), "peak_over_model": round(peak / model_bytes, 3)}
    harness.print_table(rows, COLUMNS)
    peaks = {(row["dtype"], row["way"]): row.get("peak_mb") for row in rows}
    bars = []
    for row in rows:
        if row["way"] == "streamed":
            what = f"{row['dtype']}: time of streamed over resident"
            bars.append(harness.wanted(what, row["ratio_time"], TIME_TARGET, at_most=True))
            what = f"{row['dtype']}: peak of streamed over copied"
            over = round(row["peak_mb"] / peaks[row["dtype"], "copied"], 3)
            bars.append(harness.wanted(what, over, MEMORY_TARGET, at_most=True))
    return harness.finish(arguments, "publish_stream", rows, bars, begun, parameters=parameters, repeats=repeats)


if __name__ == "__main__":
    sys.exit(main())
