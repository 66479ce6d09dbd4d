"""The serving engine starts as an owner would start it: one more flag, its room left, no secret in its environment."""

from __future__ import annotations

import asyncio
import stat
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from rose.errors import Unavailable
from rose.verify.kit_results import KitSettings
from rose.verify.machine_facts import gpu_index
from rose.verify.serving_process import ServingProcess, device_environment, scheduler_for, serving_command

GPU, CPU = KitSettings(device="cuda:1", vllm_python="python"), KitSettings(device="cpu:0-1", vllm_python="python")


def flags(settings: KitSettings) -> dict[str, str]:
    command = serving_command(settings, Path("model"), 8000, scheduler_for(settings))
    return {name: value for name, value in pairwise(command) if name.startswith("--")}


def test_on_a_gpu_scheduling_is_asynchronous_and_memory_is_left():
    assert flags(GPU)["--scheduler-cls"] == "rose.vllm.AsyncServingScheduler"
    assert float(flags(GPU)["--gpu-memory-utilization"]) <= 0.6 and "--dtype" not in flags(GPU)
    assert device_environment(GPU) == {"CUDA_VISIBLE_DEVICES": "1"} and flags(GPU)["--tensor-parallel-size"] == "1"


def test_a_group_of_gpus_serves_with_tensor_parallelism():
    group = replace(GPU, device="cuda:2-3")
    assert flags(group)["--tensor-parallel-size"] == "2"
    assert device_environment(group) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert gpu_index(group) == 2


def test_on_a_cpu_scheduling_is_synchronous_and_prompts_are_computed_whole():
    assert flags(CPU)["--scheduler-cls"] == "rose.vllm.ServingScheduler"
    assert flags(CPU)["--max-num-batched-tokens"] == flags(CPU)["--max-model-len"]
    assert "--no-enable-chunked-prefill" in serving_command(CPU, Path("model"), 8000, "x")
    assert device_environment(CPU)["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("settings", [GPU, CPU])
def test_the_wrong_scheduler_is_the_one_for_the_other_kind(settings):
    assert {scheduler_for(settings), scheduler_for(settings, wrong=True)} == {
        "rose.vllm.ServingScheduler",
        "rose.vllm.AsyncServingScheduler",
    }


def test_it_listens_on_this_machine_only():
    assert flags(GPU)["--host"] == "127.0.0.1"


@pytest.fixture
def failing(tmp_path):
    """An interpreter that says what it was started with, and fails."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport os, sys\nprint('token', os.environ.get('ROSE_WORKER_TOKEN'))\n"
                      "print('ValueError: no memory for', sys.argv[-1])\nsys.exit(3)\n")  # fmt: skip
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def test_an_engine_that_does_not_start_is_told_with_the_end_of_its_log(failing, tmp_path, monkeypatch):
    monkeypatch.setenv("ROSE_WORKER_TOKEN", "a-secret")
    settings = KitSettings(device="cuda:0", vllm_python=failing)

    async def start() -> ServingProcess:
        serving = ServingProcess(settings, tmp_path, tmp_path / "log", extra=("--last",))
        try:
            with pytest.raises(Unavailable, match="ValueError: no memory for --last"):
                await serving.until_ready()
            assert await serving.until_ended(10.0)
        finally:
            await serving.close()
        return serving

    serving = asyncio.run(start())
    assert "token None" in serving.log_text() and not serving.is_running
