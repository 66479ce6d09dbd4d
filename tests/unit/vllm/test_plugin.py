"""What the plugin does to vLLM, or leaves alone, by modules in its place; and to torch itself, in a process of its own,
since it stays changed."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rose.vllm import plugin

FACTORY = "vllm.distributed.weight_transfer.factory"

STORY = """
import json, os
import torch
from torch import distributed
from rose.vllm.plugin import _share_gloo_device

def threads_of_a_group():
    before = len(os.listdir("/proc/self/task"))
    group = distributed.new_group([0], backend="gloo")
    distributed.all_reduce(torch.ones(2), group=group)
    return len(os.listdir("/proc/self/task")) - before

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
found = [threads_of_a_group()]
for _ in range(2):  # vLLM loads plugins more than once
    _share_gloo_device()
found += [threads_of_a_group() for _ in range(3)]
print(json.dumps(found))
distributed.destroy_process_group()  # else threads of Gloo may outlive what they use, and abort the process
"""


def test_process_groups_of_one_share_a_gloo_device() -> None:
    done = subprocess.run([sys.executable, "-c", STORY], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    before, first, second, third = json.loads(done.stdout)
    assert first == before, "the first group makes the device"
    assert second == third == before - 1


class Vllm:
    """As much of it, and of torch, as the plugin touches."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.registry: dict[str, tuple[str, str]] = {}
        factory = SimpleNamespace(_registry=self.registry, register_engine=self.register_engine)
        self.linear = SimpleNamespace(dispatch_cpu_unquantized_gemm="vLLM's own")
        self.groups: Any = module("torch.distributed.distributed_c10d", ProcessGroupGloo=type("Gloo", (), {}))
        self.spinning = type("SpinCondition", (), {"record_read": vars})
        self.summing: Any = type("CpuCommunicator", (), {"_all_group_ranks_share_shm_group_name": lambda self: True})
        self.plain = (self.linear.dispatch_cpu_unquantized_gemm, self.groups.ProcessGroupGloo)
        for name, content in {
            FACTORY: {"WeightTransferEngineFactory": factory},
            "vllm.model_executor.layers": {"utils": self.linear},
            "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
            "vllm.distributed.device_communicators.shm_broadcast": {"SpinCondition": self.spinning},
            "vllm.distributed.device_communicators.cpu_communicator": {"CpuCommunicator": self.summing},
        }.items():
            patch.setitem(sys.modules, name, module(name, **content))
        patch.setitem(sys.modules, self.groups.__name__, self.groups)

    def register_engine(self, name: str, module: str, kind: str) -> None:
        assert name not in self.registry, "vLLM takes a name once"
        self.registry[name] = (module, kind)

    @property
    def now(self) -> tuple[Any, Any]:
        return self.linear.dispatch_cpu_unquantized_gemm, self.groups.ProcessGroupGloo


def module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(content)
    return made


def test_a_serving_engine_gets_only_the_weight_transfer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.ROLLOUT_VARIABLE, raising=False)
    vllm = Vllm(monkeypatch)
    for _ in range(2):  # vLLM loads plugins more than once
        plugin.register()
    assert vllm.registry == {"rose": ("rose.vllm.vllm_weights", "RoseWeights")}
    assert vllm.now == vllm.plain
    assert vllm.spinning.record_read is vars and vllm.summing()._all_group_ranks_share_shm_group_name()


def test_the_ranks_of_a_rollout_engine_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.ROLLOUT_VARIABLE, "1")
    vllm = Vllm(monkeypatch)
    plugin.register()
    condition: Any = vllm.spinning()
    condition.last_read = 1.0
    condition.record_read()
    assert condition.last_read == 1.0, "vLLM spins for a second after it"
    assert not vllm.summing()._all_group_ranks_share_shm_group_name(), "sums in shared memory spin"


def test_a_rollout_engine_keeps_its_weights_and_shares_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.ROLLOUT_VARIABLE, "1")
    vllm = Vllm(monkeypatch)
    for _ in range(2):
        plugin.register()
    dispatch, gloo = vllm.now
    assert dispatch != vllm.plain[0]
    assert issubclass(gloo, vllm.plain[1]) and hasattr(gloo, "rose_device")


def test_an_unsupported_vllm_serves_on_and_logs_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(plugin.ROLLOUT_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, FACTORY, None)
    with caplog.at_level(logging.WARNING, logger="vllm.rose"):
        plugin.register()
    [line] = caplog.messages
    assert "0.32.x" in line and FACTORY in line


def test_an_unsupported_vllm_does_not_start_a_rollout_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.ROLLOUT_VARIABLE, "1")
    monkeypatch.setitem(sys.modules, FACTORY, None)
    with pytest.raises(ImportError):
        plugin.register()
