"""The engines of a kit: which model they run, and that none of them meets an MPS daemon by accident."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from rose.errors import ConfigError
from rose.verify import engine_lab
from rose.verify.engine_lab import EngineLab, model_folder
from rose.verify.kit_results import KitSettings
from rose.verify.rollout_side import lending_of, rollout_engine

CPU, GPU = KitSettings(device="cpu:0", vllm_python="python"), KitSettings(device="cuda:0", vllm_python="python")


def test_a_folder_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(str(tmp_path), "serving", CPU, tmp_path / "kit") == tmp_path


def test_a_preset_is_made_once_and_both_sides_have_other_weights(tmp_path):
    folders = [model_folder("", role, CPU, tmp_path) for role in ("serving", "rollout", "serving")]
    assert folders[0] == folders[2] != folders[1]
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[2] != weights[1]
    assert json.loads((folders[0] / "config.json").read_text())["model_type"] == "qwen3"


def test_another_name_is_refused_with_what_there_is(tmp_path):
    with pytest.raises(ConfigError, match="no model folder") as refusal:
        model_folder("Qwen/Qwen3-0.6B", "serving", CPU, tmp_path)
    assert "qwen3-3m" in str(refusal.value)


def test_engines_on_a_gpu_get_an_mps_folder_without_a_daemon(tmp_path):
    environment = EngineLab(GPU, tmp_path, print).time_slices
    assert os.listdir(environment["CUDA_MPS_PIPE_DIRECTORY"]) == []
    assert EngineLab(CPU, tmp_path, print).time_slices == {}


def test_sizes_of_the_rollout_engine_are_those_of_the_device(tmp_path):
    on_cpu, on_gpu = (rollout_engine(settings, tmp_path, {"A": "b"}) for settings in (CPU, GPU))
    assert on_cpu.kv_memory_mb < on_gpu.kv_memory_mb and on_gpu.environment == {"A": "b"}
    lending = lending_of(GPU, on_gpu, "http://127.0.0.1:1", "decode")
    assert (lending.mode, lending.budgets.ttft_s, lending.budgets.tpot_s) == ("decode", 0.5, 0.15)


class FakeServing:
    """A serving process that is running until it is closed."""

    started: list[FakeServing]

    def __init__(self, settings, model, log, *, scheduler=None, environment=None, extra=()):
        self.environment, self.extra, self.is_running = dict(environment), tuple(extra), True
        FakeServing.started.append(self)

    async def until_ready(self):
        return None

    async def close(self):
        self.is_running = False


@pytest.fixture
def lab(monkeypatch, tmp_path):
    FakeServing.started = []
    monkeypatch.setattr(engine_lab, "ServingProcess", FakeServing)
    return EngineLab(CPU, tmp_path, lambda text: None)


def test_a_serving_engine_is_shared_until_it_dies_or_other_terms_are_wanted(lab):
    async def steps():
        first = await lab.serving()
        assert await lab.serving() is first
        first.is_running = False
        second = await lab.serving()
        third = await lab.serving({"ROSE_KV_POOL": "auto"})
        fourth = await lab.serving({"ROSE_KV_POOL": "auto"}, ["--flag"])
        assert not second.is_running and not third.is_running and fourth.extra == ("--flag",)
        await lab.close()
        assert not fourth.is_running

    asyncio.run(steps())
    assert len(FakeServing.started) == 4


def test_starts_are_reported_once(lab):
    asyncio.run(lab.serving())
    assert list(lab.take_starts()) == ["serving engine"] and lab.take_starts() == {}
