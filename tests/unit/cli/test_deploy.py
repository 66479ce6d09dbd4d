"""`rose deploy k8s`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from rose.cli.main import main
from rose.weights.keys import read_key

SIDECAR = ["--set", "sidecar.deployment=chat", "--set", "sidecar.namespace=serving"]


def secrets_in(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def test_it_prints_objects_of_the_values_and_no_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("name: lake\nworkers: {gpus: 0, engine: embedded}\n")
    assert main(["deploy", "k8s", "--values", str(file), "--set", "namespace=rl"]) == 0
    printed = capsys.readouterr().out
    objects = list(yaml.safe_load_all(printed))
    assert {each["metadata"]["namespace"] for each in objects} == {"rl"}
    assert "lake-gateway" in {each["metadata"]["name"] for each in objects}
    assert not [each for each in objects if each["kind"] == "Secret"]


def test_it_writes_one_file_per_part_and_the_patch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    assert main(["deploy", "k8s", "--out", str(folder), *SIDECAR]) == 0
    written = {str(path.relative_to(folder)) for path in folder.rglob("*.yaml")}
    parts = {f"{name}.yaml" for name in ("gateway", "relay", "workers", "trainer", "policies")}
    assert written == parts | {f"patch/{name}.yaml" for name in ("flags", "sidecar", "kustomization")}
    assert f"kubectl apply -f {folder}" in capsys.readouterr().out


def test_secrets_go_to_a_new_private_file_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "secrets.yaml"
    assert main(["deploy", "k8s", "--out", str(tmp_path / "out"), "--secrets", str(file), *SIDECAR]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    control, worker, beside = secrets_in(file)
    assert (worker["metadata"]["namespace"], beside["metadata"]["namespace"]) == ("rose", "serving")
    assert worker["stringData"] == beside["stringData"]
    secret = control["stringData"]["ROSE_RELAY_SECRET"].encode()
    assert worker["stringData"]["ROSE_RELAY_READ_KEY"] == read_key(secret).text()
    tokens = [value for each in (control, worker) for value in each["stringData"].values()]
    assert len(set(tokens)) == len(tokens) == 8
    others = capsys.readouterr().out + "".join(path.read_text() for path in (tmp_path / "out").rglob("*.yaml"))
    assert not [token for token in tokens if token in others]
    before = file.read_text()
    assert main(["deploy", "k8s", "--secrets", str(file)]) != 0
    assert file.read_text() == before


@pytest.mark.parametrize(
    "arguments, what",
    [
        (SIDECAR, "add --out DIR"),
        (["--values", "no/such/file.yaml"], "cannot be read"),
        (["--set", "gatway.port=1"], "nearest known one is `gateway.port`"),
        (["--out", "/proc/none"], "check --out"),
        (["--secrets", "/proc/none"], "check --secrets"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "k8s", *arguments]) != 0
    printed = capsys.readouterr()
    assert what in printed.err
    assert printed.out == ""


def test_a_folder_that_is_a_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("")
    assert main(["deploy", "k8s", "--out", str(tmp_path / "out")]) != 0
    assert "check --out" in capsys.readouterr().err
