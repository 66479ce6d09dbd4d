"""The doctor looks, never raises, and always says what to do."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

import pytest

from rose.cli import doctor

ROOT = Path(__file__).parents[2]


def test_every_finding_says_what_to_do_when_it_is_not_ok():
    findings = list(doctor.examine())
    assert len({finding.name for finding in findings}) == len(findings)
    assert [finding for finding in findings if not finding.is_ok and not finding.remedy] == []


def test_the_machine_that_runs_the_tests_can_run_the_engine(capsys):
    assert doctor.run(argparse.Namespace()) == 0
    said = capsys.readouterr().out
    assert "can run here" in said and "rose demo" in said


def test_something_essential_missing_fails_and_names_it(monkeypatch, capsys):
    monkeypatch.setitem(doctor.DEPENDENCIES, "no-such-package-anywhere", True)
    assert doctor.run(argparse.Namespace()) == 1
    said = capsys.readouterr().out
    assert re.search(r"MISSING +no-such-package-anywhere +not installed\n.*try: pip install", said)


def test_something_optional_missing_does_not_fail(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "BROWSERS", ("no-such-browser",))
    assert doctor.run(argparse.Namespace()) == 0
    assert re.search(r"absent +chromium +not found\n.*try: apt-get", capsys.readouterr().out)


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
    assert finding.is_ok and "exact" in finding.found
    monkeypatch.setattr("rose.weights.codec.apply", lambda payload, destination: None)
    assert not doctor.codec().is_ok
    monkeypatch.setattr("rose.weights.codec.kernels.warm_up", lambda kind, to_encode: 1 / 0)
    broken = doctor.codec()
    assert not broken.is_ok and "ZeroDivisionError" in broken.found and "pip install" in broken.remedy


def test_the_vllm_environment_is_looked_for(tmp_path):
    assert not doctor.vllm_environment(tmp_path).is_ok
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert doctor.vllm_environment(tmp_path).is_ok
