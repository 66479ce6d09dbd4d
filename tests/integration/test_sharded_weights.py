"""A real sharded trainer publishes, workers at other tensor-parallel degrees receive, and the bytes are equal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.contract.chain_ends import Member, equal, shard
from tests.integration.sharded_trainer import RULES, TENSORS, VERSIONS

from rose.core.versions import VersionId
from rose.weights.layouts import fuse, tensor_parallel
from rose.weights.relay.filesystem import FilesystemRelay

ROOT = Path(__file__).parents[2]


def train(folder: Path, ranks: int, degree: int) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "USE_LIBUV": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.integration.sharded_trainer"]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(degree), str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0] * ranks, "\n".join(said)[-4000:]


@pytest.mark.parametrize(
    "ranks, degree",
    [
        pytest.param(2, 1, id="fsdp2"),
        pytest.param(4, 1, id="fsdp4", marks=pytest.mark.slow),
        pytest.param(4, 2, id="fsdp2-over-tp2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(360)
def test_bytes_are_equal_at_every_worker(tmp_path, ranks, degree):
    train(tmp_path, ranks, degree)
    relay = FilesystemRelay(tmp_path / "relay")
    versions = [dict(np.load(tmp_path / f"whole-{number}.npz")) for number in range(1, VERSIONS + 1)]
    assert not equal(versions[0], versions[1])
    for other in (1, 2, 3):
        worker = fuse(tensor_parallel(TENSORS, RULES, other), ["up.weight"], "gate_up.weight")
        for placements in worker:
            member = Member(relay, tensors=TENSORS, placements=placements, weights=versions[0])
            newest = member.sync()
            assert newest.version == VERSIONS
            assert equal(member.arrays, shard(versions[-1], placements))
            joined = Member(relay, tensors=TENSORS, placements=placements)
            joined.reader.refresh()
            joined.reader.bring(joined.staging, VersionId(newest.epoch, 2))
            assert equal(joined.arrays, shard(versions[1], placements))
