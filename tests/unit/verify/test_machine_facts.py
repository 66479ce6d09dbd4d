"""What is there is found by the tools that are there; what is missing has a reason, and nothing is started."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from rose.verify import machine_facts
from rose.verify.kit_results import KitSettings
from rose.verify.machine_facts import Capabilities, capabilities, gpu_facts, has_mps, host_facts, versions

NVIDIA_SMI = """#!/bin/sh
case "$2" in
  --query-gpu=name) echo "NVIDIA H800" ;;
  --query-gpu=compute_mode) echo "Default" ;;
  --query-gpu=mig.mode.current) echo "Disabled" ;;
  --query-gpu=memory.total) echo "81559 MiB" ;;
  --query-compute-apps=pid) echo "12"; echo "345" ;;
  --query-gpu=*) echo "Field is not a valid field to query." ;;
esac
"""


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine with neither tool, driver nor daemon."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("ROSE_CUDA_DRIVER", str(tmp_path / "absent.so"))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))
    (tmp_path / "bin").mkdir()
    return tmp_path


@pytest.fixture
def with_tool(bare):
    tool = bare / "bin" / "nvidia-smi"
    tool.write_text(NVIDIA_SMI)
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return bare


def test_a_machine_without_anything_has_a_reason_for_everything(bare):
    found = capabilities(KitSettings(vllm_python=str(bare / "python")))
    assert set(found.missing) >= {"driver", "gpu", "mps", "vllm"}
    assert found.why_not(("gpu", "vllm")) == "no GPU"
    assert found.why_not(("vllm",)) == f"rose and vllm cannot be imported by {bare / 'python'}"
    assert "never starts one" in found.why_not(("mps",)) and found.why_not(()) == ""


def test_a_reason_is_given_once():
    assert (
        Capabilities({"vllm": "no x", "mps": "no x", "pool": "no y"}).why_not(("vllm", "mps", "pool")) == "no x; no y"
    )


def test_nvidia_smi_is_asked_field_by_field(with_tool):
    expected = {"GPU": "NVIDIA H800", "compute mode": "Default", "MIG": "Disabled", "memory": "81559 MiB"}
    assert gpu_facts(0) == expected
    assert machine_facts.processes_on_gpu(0) == {12, 345}
    assert "gpu" not in capabilities(KitSettings(vllm_python=sys.executable)).missing


def test_a_cpu_device_has_no_gpu_whatever_the_machine_has(with_tool):
    assert "the device is cpu:0" in capabilities(KitSettings(device="cpu:0")).missing["gpu"]


def test_an_mps_daemon_is_found_by_its_pipe(bare):
    assert not has_mps()
    (bare / "mps").mkdir()
    (bare / "mps" / "control").touch()
    assert has_mps()


def test_versions_come_from_the_interpreter_that_is_named(bare):
    found = versions(sys.executable)
    assert "torch" in found and "rose" in found["has"].split()
    assert versions(str(bare / "absent")) == {} and versions("true") == {}


def test_host_facts_have_no_name_of_the_host():
    facts = host_facts()
    assert facts["cores"] == str(len(os.sched_getaffinity(0)))
    assert not any(os.uname().nodename == value for value in facts.values())
    assert not Path(facts["processor"]).is_absolute()
