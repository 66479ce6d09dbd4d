"""The doctor looks, never raises, and always says what to do."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import socket
import tomllib
from pathlib import Path

import pytest

from rose.cli import doctor

ROOT = Path(__file__).parents[3]


def test_every_finding_says_what_to_do_when_it_is_not_ok():
    findings = list(doctor.examine())
    assert len({finding.name for finding in findings}) == len(findings)
    assert [finding for finding in findings if not finding.is_ok and not finding.remedy] == []


def test_the_machine_that_runs_the_tests_can_run_the_engine(capsys):
    assert doctor.run(argparse.Namespace()) == 0
    said = capsys.readouterr().out
    assert "can run here" in said and "Next: rose run" in said


def test_something_essential_missing_fails_and_names_it(monkeypatch, capsys):
    monkeypatch.setitem(doctor.DEPENDENCIES, "no-such-package-anywhere", True)
    assert doctor.run(argparse.Namespace()) == 1
    said = capsys.readouterr().out
    assert re.search(r"MISSING +no-such-package-anywhere +not installed\n.*try: pip install", said)


def test_something_optional_missing_does_not_fail(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/no/such/folder")
    assert doctor.run(argparse.Namespace()) == 0
    assert re.search(
        r"absent +GPU +no NVIDIA driver answers.*\n.*try: on a machine with an NVIDIA GPU", capsys.readouterr().out
    )


def test_it_knows_every_dependency_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(doctor.DEPENDENCIES) == {re.split(r"[<>=~]", name)[0] for name in project["dependencies"]}
    assert project["requires-python"] == ">=" + ".".join(map(str, doctor.PYTHON_MINIMUM))


@pytest.mark.parametrize(
    "cpuinfo, is_ok",
    [
        ("flags\t\t: fpu avx avx2 fma\n", True),
        ("flags\t\t: fpu sse2\n", False),
        ("Features\t: fp asimd\n", True),
        ("", False),
    ],
)
def test_cpu_features(tmp_path, cpuinfo, is_ok):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    finding = doctor.cpu_features(tmp_path / "cpuinfo")
    assert finding.is_ok is is_ok and not finding.is_essential


@pytest.mark.parametrize("meminfo, is_ok", [("MemAvailable: 4000000 kB\n", True), ("MemAvailable: 9 kB\n", False)])
def test_memory(tmp_path, meminfo, is_ok):
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\n" + meminfo)
    assert doctor.memory(tmp_path / "meminfo").is_ok is is_ok


def test_a_missing_proc_file_is_no_crash(tmp_path):
    assert not doctor.memory(tmp_path / "absent").is_ok


def test_another_system_is_said_plainly(monkeypatch):
    monkeypatch.setattr(doctor.sys, "platform", "darwin")
    finding = doctor.system()
    assert not finding.is_ok and finding.is_essential and "Linux" in finding.remedy


def test_a_kernel_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert not doctor.compile_cache().is_ok
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert doctor.compile_cache().is_ok


def test_the_weight_codec_is_compiled_and_tried(monkeypatch):
    finding = doctor.codec()
    assert finding.is_ok and "exact" in finding.result
    monkeypatch.setattr("rose.weights.codec.apply", lambda payload, destination: None)
    assert not doctor.codec().is_ok
    monkeypatch.setattr("rose.weights.codec.codec_kernels.warm_up", lambda kind, to_encode: 1 / 0)
    broken = doctor.codec()
    assert not broken.is_ok and "ZeroDivisionError" in broken.result and "pip install" in broken.remedy


def test_serving_engines_are_looked_for_here_and_in_their_environment(tmp_path, monkeypatch):
    installed = {"sglang": "0.5.23"}

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    assert doctor.serving_engines(tmp_path).result == "sglang 0.5.23"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert str(tmp_path) in doctor.serving_engines(tmp_path).result
    installed.clear()
    absent = doctor.serving_engines(tmp_path / "none")
    assert not absent.is_ok and not absent.is_essential and "docs/vllm.md" in absent.remedy


def test_gpus_are_those_of_the_drivers_tool(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB, 580.95'\necho 'NVIDIA H100, 81559 MiB, 580.95'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert doctor.gpus().result == "2: NVIDIA H100, 81559 MiB, 580.95"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert not doctor.gpus().is_ok


def test_ports_in_use_are_named_with_their_command(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr(doctor, "DEFAULT_PORTS", {port: "rose serve"})
        taken = doctor.ports()
    assert not taken.is_ok and taken.result == f"in use: {port} (rose serve)" and not taken.is_essential


def test_little_shared_memory_is_said(tmp_path, monkeypatch):
    assert doctor.shared_memory(tmp_path).is_ok
    monkeypatch.setattr(doctor, "SHARED_MEMORY_MINIMUM_MB", 1 << 40)
    assert not doctor.shared_memory(tmp_path).is_ok
    assert "cannot be used" in doctor.shared_memory(tmp_path / "absent").result


def test_a_kv_pool_is_made_and_the_reason_is_given_without_a_gpu(monkeypatch):
    monkeypatch.setenv("ROSE_CUDA_DRIVER", "/no/such/driver.so")
    finding = doctor.kv_pool()
    assert finding.is_ok and not finding.is_essential
    assert finding.result == "of host memory: yes; of a GPU's: no (no CUDA driver)"


def test_a_kv_pool_of_a_gpu_is_found_by_its_driver(monkeypatch, standin):
    monkeypatch.setenv("ROSE_CUDA_DRIVER", str(standin.path))
    assert doctor.kv_pool().result.endswith("of a GPU's: yes, in pages of 2 MiB")


def test_a_kv_pool_that_cannot_be_made_is_no_crash(monkeypatch):
    monkeypatch.setattr(doctor.tempfile, "TemporaryDirectory", lambda: (_ for _ in ()).throw(OSError("full")))
    finding = doctor.kv_pool()
    assert not finding.is_ok and "full" in finding.result and finding.remedy
