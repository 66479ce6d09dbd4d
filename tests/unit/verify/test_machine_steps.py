"""The machine step writes down what there is, and finds the settings under which two engines cannot share a GPU."""

from __future__ import annotations

import asyncio
import sys

import pytest

from rose.verify import machine_steps
from rose.verify.kit_results import KitSettings
from rose.verify.step_context import NotApplicable, StepContext

GPU = {"GPU": "NVIDIA H800", "compute mode": "Default", "MIG": "Disabled"}


def result_of(monkeypatch, tmp_path, device="cuda:0", others=frozenset(), is_mps=False, **changes):
    monkeypatch.setattr(machine_steps, "gpu_facts", lambda index: GPU | changes)
    monkeypatch.setattr(machine_steps, "processes_on_gpu", lambda index: set(others))
    monkeypatch.setattr(machine_steps, "has_mps", lambda: is_mps)
    settings = KitSettings(device=device, vllm_python=sys.executable)
    context = StepContext(settings, tmp_path, None, {}, print)  # type: ignore[arg-type]
    asyncio.run(machine_steps.machine(context))
    return context.findings.result("machine", 1.0)


@pytest.mark.parametrize(
    "mode, outcome", [("Default", "passed"), ("Exclusive_Process", "failed"), ("Prohibited", "failed")]
)
def test_the_compute_mode_must_let_two_processes_use_the_gpu(monkeypatch, tmp_path, mode, outcome):
    result = result_of(monkeypatch, tmp_path, **{"compute mode": mode})
    assert result.outcome == outcome and result.facts["GPU"] == "NVIDIA H800"


def test_mig_mps_and_other_processes_are_noted(monkeypatch, tmp_path):
    notes = result_of(monkeypatch, tmp_path, others={5, 6}, is_mps=True, MIG="Enabled").notes
    assert [
        any(word in note for note in notes) for word in ("MIG is on", "2 other processes", "An MPS daemon runs")
    ] == [True] * 3


def test_a_cpu_device_is_said_to_be_a_trial(monkeypatch, tmp_path):
    result = result_of(monkeypatch, tmp_path, device="cpu:0")
    assert "says nothing about a GPU" in result.notes[0] and "GPU" not in result.facts and result.outcome == "passed"


def test_without_a_gpu_the_facts_are_kept_and_nothing_has_passed(monkeypatch, tmp_path):
    monkeypatch.setenv("ROSE_CUDA_DRIVER", str(tmp_path / "absent.so"))
    monkeypatch.setattr(machine_steps, "gpu_facts", lambda index: {})
    context = StepContext(KitSettings(vllm_python="true"), tmp_path, None, {}, print)  # type: ignore[arg-type]
    with pytest.raises(NotApplicable, match="no GPU"):
        asyncio.run(machine_steps.machine(context))
    assert context.findings.facts["ROSE"] and context.findings.checks == []
