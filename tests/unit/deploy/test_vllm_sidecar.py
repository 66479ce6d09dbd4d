"""The patch of an existing vLLM Deployment: what it adds, that kustomize takes it, and that its loop ends."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.deploy.test_rendering import parse
from tests.unit.deploy.value_sets import values_of

from rose.cli.deploy import to_yaml
from rose.deploy.vllm_sidecar import AGAIN, lend_command, patch_files

KUBECTL = shutil.which("kubectl")
SERVING: dict[str, Any] = {  # as an operator may have it
    "name": "vllm",
    "image": "vllm/vllm-openai:v0.32.0",
    "args": ["--model", "/data/chat", "--port", "8000"],
    "env": [{"name": "HF_HOME", "value": "/data"}],
    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    "resources": {"limits": {"nvidia.com/gpu": "1", "memory": "64Gi"}, "requests": {"nvidia.com/gpu": "1"}},
}
PATCHED = ["sidecar", "sidecar by DRA"]


def deployment(namespace: str) -> dict[str, Any]:
    pod = {"metadata": {"labels": {"app": "chat"}}, "spec": {"containers": [SERVING], "volumes": [{"name": "data"}]}}
    spec = {"replicas": 2, "selector": {"matchLabels": {"app": "chat"}}, "template": pod}
    metadata = {"name": "chat", "namespace": namespace}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def patched(name: str, folder: Path) -> dict[str, Any]:
    values = values_of(name)
    for file, content in patch_files(values).items():
        (folder / file).write_text(to_yaml([content]))
    (folder / "deployment.yaml").write_text(to_yaml([deployment(values.sidecar.namespace)]))
    built = subprocess.run([str(KUBECTL), "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr
    [whole] = yaml.safe_load_all(built.stdout)
    found: dict[str, Any] = whole["spec"]["template"]
    return found


@pytest.mark.parametrize("name", PATCHED)
def test_the_agents_command_is_read_by_its_parser(name: str) -> None:
    command = lend_command(values_of(name))
    parse(command)
    agent = patch_files(values_of(name))["sidecar.yaml"]["spec"]["template"]["spec"]["containers"][1]  # type: ignore[call-overload]
    assert agent["command"] == ["sh", "-c", AGAIN, "rose-lend", *command]
    assert not {"livenessProbe", "readinessProbe", "startupProbe"} & agent.keys()  # the pod's readiness is serving's


@pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl, which has kustomize")
@pytest.mark.parametrize("name", PATCHED)
def test_kustomize_adds_the_agent_and_leaves_serving_as_it_was(name: str, tmp_path: Path) -> None:
    values, template = values_of(name), patched(name, tmp_path)
    containers = {each["name"]: each for each in template["spec"]["containers"]}
    serving, agent = containers["vllm"], containers["rose-lend"]
    assert serving["args"][:4] == SERVING["args"]
    assert serving["args"][4:] == ["--scheduler-cls=rose.vllm.AsyncServingScheduler", *values.sidecar.serving_flags]
    assert {"name": "HF_HOME", "value": "/data"} in serving["env"]
    assert {each["mountPath"] for each in serving["volumeMounts"]} == {"/data", "/rose"}
    assert template["spec"]["shareProcessNamespace"]
    assert template["metadata"]["labels"] == {"app": "chat", "rose/instance": "rose"}
    assert serving["securityContext"]["runAsUser"] == agent["securityContext"]["runAsUser"] == values.sidecar.user
    boards = {each["name"]: each["value"] for each in serving["env"]}["ROSE_BOARDS"].removeprefix("/rose")
    assert {each["name"]: each.get("value") for each in agent["env"]}["ROSE_BOARDS"] == f"/dev/shm{boards}"
    assert serving["resources"]["limits"]["memory"] == "64Gi"
    if values.sidecar.gpu == "dra":
        claims = [{"name": "rose-gpu"}]
        assert serving["resources"]["claims"] == agent["resources"]["claims"] == claims
        assert "nvidia.com/gpu" not in str(serving["resources"])
        assert template["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] == "rose-lend"
    else:
        assert serving["resources"] == SERVING["resources"]
        assert agent["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_the_loop_starts_an_agent_again_and_ends_with_it(tmp_path: Path) -> None:
    """The agent ends at once while vLLM starts; on SIGTERM the loop hands it on and ends."""
    (tmp_path / "sleep").write_text("#!/bin/sh\nexit 0\n")  # no pause between two starts
    agent = tmp_path / "agent"
    agent.write_text(
        '#!/bin/sh\n[ -e "$0.up" ] || { touch "$0.up"; echo "$@"; exit 1; }\n'
        "/bin/sleep 600 & trap 'echo ended; kill $!; exit 0' TERM\n"
        'echo "$@"; wait\n'
    )
    for file in ("sleep", "agent"):
        (tmp_path / file).chmod(0o755)
    command = ["sh", "-c", AGAIN, "rose-lend", str(agent), "a b"]
    loop = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    try:
        assert loop.stdout is not None
        assert [loop.stdout.readline() for _ in range(2)] == ["a b\n"] * 2
        loop.send_signal(signal.SIGTERM)
        assert loop.wait(60) == 0
        assert "ended" in loop.stdout.read()
    finally:
        loop.kill()
        loop.wait()
