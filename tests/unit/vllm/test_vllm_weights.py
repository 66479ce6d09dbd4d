"""Weights are staged from a folder in a thread, and committed by patches inside one of vLLM's update sessions."""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.unit import vllm_stubs

from rose.errors import ModelError


class Model(torch.nn.Module):
    """Two parameters, loaded by name."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.two = torch.nn.Parameter(torch.zeros(5), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    return vllm_stubs.install(monkeypatch)["vllm_weights"]


def worker_of(module: Any, model: Model) -> Any:
    worker = module.RoseWorker()
    worker.weight_transfer_engine = module.RoseWeights(model)
    return worker


def folder_of(path: Path, **tensors: torch.Tensor) -> str:
    path.mkdir()
    for name, tensor in tensors.items():
        save_file({name: tensor}, path / f"{name}.safetensors")
    return str(path)


def stage(worker: Any, version: str, folder: str) -> Any:
    progress = worker.stage_weights(version, folder)
    deadline_s = time.monotonic() + 20
    while progress["busy"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
        progress = worker.staged_weights()
    return progress


def test_a_staged_version_is_committed_once(module: Any, tmp_path: Path) -> None:
    model = Model()
    worker = worker_of(module, model)
    engine = worker.weight_transfer_engine
    folder = folder_of(tmp_path / "v1", one=torch.ones(4, 3), two=torch.tensor([0.0, 2.0, 0.0, 0.0, 0.0]))
    progress = stage(worker, "v1", folder)
    assert progress == {"busy": False, "version": "v1", "numbers": 13, "failure": ""}
    assert not model.one.any(), "staging changes nothing"
    engine.update_weights({"version": "v1"})
    assert model.one.all() and model.two[1] == 2.0
    with pytest.raises(ModelError, match="is not staged"):
        engine.update_weights({"version": "v1"})


def test_a_failed_staging_keeps_what_was_staged_before(module: Any, tmp_path: Path) -> None:
    worker = worker_of(module, Model())
    stage(worker, "v1", folder_of(tmp_path / "v1", one=torch.ones(4, 3), two=torch.ones(5)))
    progress = stage(worker, "v2", folder_of(tmp_path / "v2", one=torch.full((4, 3), float("nan")), two=torch.ones(5)))
    assert "not finite" in progress["failure"] and progress["version"] == "v1"


def test_a_folder_without_weights_is_a_failure(module: Any, tmp_path: Path) -> None:
    progress = worker_of(module, Model()).stage_weights("v1", str(tmp_path))
    assert progress["failure"] == f"there are no weights (*.safetensors) in {tmp_path}"


class Cache:
    """A KV cache on a CPU: blocks of two pages in mapped memory."""

    def __init__(self, blocks: int, kind: str = "cpu") -> None:
        size_bytes = (blocks + 1) * 2 * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.write(b"x" * len(self.memory))
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.device = SimpleNamespace(type=kind)

    def stride(self, dimension: int) -> int:
        return 2 * mmap.PAGESIZE

    def element_size(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()


@pytest.mark.parametrize("kind, pages", [("cpu", 4), ("cuda", 0)])
def test_memory_of_kv_blocks_is_returned_on_a_cpu(module: Any, kind: str, pages: int) -> None:
    cache, worker = Cache(4, kind), module.RoseWorker()
    worker.model_runner = SimpleNamespace(kv_caches=[cache])
    assert worker.return_kv_blocks([(1, 3)]) == pages * mmap.PAGESIZE
    size = 2 * mmap.PAGESIZE
    assert cache.memory[:size].count(b"x") == size, "other blocks keep their contents"
    assert cache.memory[size : 3 * size].count(b"x") == (2 * size if kind == "cuda" else 0)
