"""How much host memory and time it takes to publish from every rank of FSDP2, beside gathering on rank 0.

    python benchmarks/publish_sharded.py --json FILE

    sharded    rose.adapters.fsdp: each rank pushes its own shard
    gathered   all ranks gather one tensor after the other, and rank 0 publishes what the iterator yields

Each way runs in processes of its own, `RANKS` of them with gloo, on the same model: fp32 numbers that FSDP2 shards by
rows. Memory is by how much the peak of a rank's resident memory is above what it was before the publisher was made,
after a full snapshot and two deltas; time is the slowest rank's for the last delta.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rose.adapters.fsdp import ShardedPublisher
from rose.models.model_spec import read_spec
from rose.models.presets import write_preset
from rose.models.tensors import expected_tensors
from rose.weights.codec.codec_kernels import warm_up
from rose.weights.publish import Publisher
from rose.weights.shards import Tensor

SECRET = b"the secret of a benchmark"
PRESET, RANKS, WAYS = "qwen3-25m", (2, 4), ("sharded", "gathered")
MEMORY_TARGET = 0.9  # of gathered
LAYERS, LAYERS_QUICK = 48, 12  # of the largest preset: 151 and 38 million numbers
SCALE, STEP = 0.02, 2e-7  # of weights, and of what a step adds: about one number of a hundred changes in bf16
VERSIONS = 3
COLUMNS = ("ranks", "way", "rank", "peak_mb", "peak_over_model", "pushed_mb", "delta_mb", "delta_s")


class Module(nn.Module):
    """A tree of parameters with the names of a checkpoint."""

    def add(self, name: str, shape: tuple[int, ...], dice: torch.Generator) -> None:
        first, dot, rest = name.partition(".")
        if not dot:
            self.register_parameter(name, nn.Parameter(torch.empty(shape).normal_(0.0, SCALE, generator=dice)))
            return
        if first not in self._modules:
            self.add_module(first, Module())
        child: Any = self._modules[first]
        child.add(rest, shape, dice)


def sharded_model(shapes: dict[str, tuple[int, ...]]) -> Any:
    model, dice = Module(), torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        model.add(name, shape, dice)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    layers: Any = model.model.layers
    for layer in layers.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class NoGateway:
    """What `ShardedPublisher` uses of a pool, without a gateway to tell."""

    def __init__(self, folder: Path, layers: int) -> None:
        self.spec = replace(read_spec(folder / PRESET), layers=layers)
        self.folder, self.relay, self.run, self.secret = self, str(folder / "relay"), "r", SECRET
        self.path = folder / PRESET

    def ask(self, call: Any) -> None:
        """Announce no version: no worker takes part."""


def rank_of(way: str, rank: int, ranks: int, layers: int, folder: Path) -> None:
    """Run one rank, and leave its figures in the folder."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    warm_up(to_encode=True)
    pool: Any = NoGateway(folder, layers)
    shapes = expected_tensors(pool.spec)
    model = sharded_model(shapes)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before_mb, seconds, published = memory_mb("VmRSS"), 0.0, []
    if way == "sharded":
        publisher: Any = ShardedPublisher(model, pool)
    elif rank == 0:
        tensors = [Tensor(name, shape) for name, shape in shapes.items()]
        publisher = Publisher(None, pool.relay, run="r", secret=SECRET, tensors=tensors)
    dice = torch.Generator().manual_seed(1 + rank)
    for version in range(1, VERSIONS + 1):
        distributed.barrier()
        began_s = time.perf_counter()
        if way == "sharded":
            published.append(publisher.publish(version))
        else:
            whole = ((name, value.full_tensor().detach()) for name, value in model.named_parameters())
            published += [publisher.publish_stream(version, whole)] if rank == 0 else [None for _ in whole][:0]
        seconds = time.perf_counter() - began_s
        for value in model.parameters():
            local = value.detach().to_local()
            local.add_(torch.empty(local.shape).normal_(0.0, STEP, generator=dice))
    figures = {"rank": rank, "peak_mb": round(memory_mb("VmHWM") - before_mb, 1), "delta_s": round(seconds, 3)}
    figures |= {"pushed_mb": mb(published[:1]), "delta_mb": mb(published[-1:])}
    figures["model_mb"] = sum(Tensor(name, shape).size_bytes for name, shape in shapes.items()) / 1e6
    (folder / f"rank-{rank}.json").write_text(json.dumps(figures))
    distributed.barrier()
    os._exit(0)


def mb(published: list[Any]) -> float:
    return round(sum(new.pushed_bytes for new in published) / 1e6, 2)


def memory_mb(field: str) -> float:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) / 1e3


def measure(way: str, ranks: int, layers: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_preset(PRESET, folder / PRESET)
        command = [sys.executable, __file__, "--rank", way]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), str(layers), name],
                env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(ranks)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"a rank of {way} failed")
        rows = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    slowest = max(row["delta_s"] for row in rows)
    for row in rows:
        row |= {"ranks": ranks, "way": way, "delta_s": slowest}
        row["peak_over_model"] = round(row["peak_mb"] / row["model_mb"], 3)
    return rows


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        way, rank, ranks, layers, folder = sys.argv[2:]
        rank_of(way, int(rank), int(ranks), int(layers), Path(folder))
    options, begun = harness.parser(__doc__ or "").parse_args(), harness.machine()
    layers = LAYERS_QUICK if options.quick else LAYERS
    rows = [row for ranks in RANKS for way in WAYS for row in measure(way, ranks, layers)]
    harness.print_table(rows, COLUMNS)
    bars = []
    for ranks in RANKS:
        peaks = {way: max(row["peak_mb"] for row in rows if (row["ranks"], row["way"]) == (ranks, way)) for way in WAYS}
        what = f"{ranks} ranks: the highest peak of sharded over that of gathered"
        bars.append(harness.wanted(what, round(peaks["sharded"] / peaks["gathered"], 3), MEMORY_TARGET, at_most=True))
    return harness.finish(options, "publish_sharded", rows, bars, begun, layers=layers)


if __name__ == "__main__":
    sys.exit(main())
