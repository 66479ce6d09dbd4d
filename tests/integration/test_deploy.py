"""The commands of a deployment without GPUs, taken from its objects and run as processes on this machine.

Each gets the variables of its container, from Secrets as `rose deploy k8s --secrets` makes them, and each is ready when
the probes of its container say so. Then the trainer's own command takes a step over gateway, relay and worker.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib import request

import pytest
from tests.integration import devices

from rose.cli.deploy import new_secrets
from rose.config.loading import load_settings
from rose.config.yaml_text import as_override
from rose.deploy.cluster_policies import ALERTS, WAITING
from rose.deploy.deploy_values import EXAMPLE_TRAINER, DeployValues, check_values
from rose.deploy.rendering import render
from rose.models.presets import write_preset
from rose.openai.http_server import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

EXAMPLES = devices.ROOT / "examples"
SCRAPED = (("rose-control", "ROSE_OPERATOR_TOKEN"), ("rose-worker", "ROSE_ROLLOUT_TOKEN"))  # as the PodMonitors say
Object = dict[str, Any]


class Deployment:
    """The containers of a deployment, with ports, folders and names of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rollout_port = folder, free_port()
        write_preset("frozenlake-1m", folder / "models" / "rollout", seed=0)
        overrides = [f"gateway.port={free_port()}", f"relay.port={free_port()}", "workers.engine=embedded"]
        overrides += ["workers.gpus=0", "workers.kv_memory_mb=64", "trainer.gpus=0"]
        overrides += [as_override("trainer.command", [*EXAMPLE_TRAINER, "1"])]  # one step
        self.values = check_values(load_settings(DeployValues, None, overrides))
        secrets = {each["metadata"]["name"]: each["stringData"] for each in new_secrets(self.values)}
        self.tokens: dict[str, dict[str, str]] = secrets
        self.objects = {name: objects[-1] for name, objects in render(self.values).items()}

    def container(self, part: str) -> Object:
        found: Object = self.objects[part]["spec"]["template"]["spec"]["containers"][0]
        return found

    def here(self, text: str, part: str) -> str:
        """Return what a text of the objects is on this machine."""
        text = text.replace("0.0.0.0", "127.0.0.1").replace("cpu:0", devices.DEVICE)
        text = re.sub(rf"{self.values.name}-(gateway|relay)\.{self.values.namespace}\.svc", "127.0.0.1", text)
        text = re.sub(r"^8001$", str(self.rollout_port), text)
        text = text.replace("/opt/rose/examples", str(EXAMPLES)).replace("/models", str(self.folder / "models"))
        return text.replace("/state", str(self.folder / part))

    def variables(self, part: str) -> dict[str, str]:
        """Return the variables of the container, as its Secrets and fields fill them in."""
        found = {}
        for each in self.container(part)["env"]:
            source = each.get("valueFrom", {}).get("secretKeyRef")
            value = self.tokens[source["name"]][source["key"]] if source else each.get("value", f"{part}-0")
            found[each["name"]] = value
        return found

    def command(self, part: str) -> list[str]:
        variables, command = self.variables(part), self.container(part)["command"]
        words = [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word) for word in command]
        first = [sys.executable, "-m", "rose"] if words[0] == "rose" else [sys.executable]
        return [*first, *(self.here(word, part) for word in words[1:])]

    def start(self, part: str) -> subprocess.Popen[bytes]:
        (self.folder / part).mkdir(exist_ok=True)
        known = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS", "XDG_CACHE_HOME") if name in os.environ}
        paths = {"PYTHONPATH": devices.environment()["PYTHONPATH"]}
        with (self.folder / f"{part}.log").open("wb") as log:
            own = {name: self.here(value, part) for name, value in self.variables(part).items()}
            environment = own | paths | known | {"HOME": str(Path.home())}  # kernels compiled by this machine are there
            return subprocess.Popen(
                self.command(part), stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=self.folder / part
            )

    def passes(self, part: str, probe: Object) -> bool:
        """Return whether a probe of the container passes now."""
        ports = {"http": self.values.gateway.port, "relay": self.values.relay.port, "rollouts": self.rollout_port}
        action = probe.get("httpGet") or probe["tcpSocket"]
        port = ports[action["port"]]
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=devices.PATIENCE_S):
                if "tcpSocket" in probe:
                    return True
            with request.urlopen(f"http://127.0.0.1:{port}{action['path']}", timeout=devices.PATIENCE_S):
                return True
        except OSError:  # an answer of 401 or 503 is one too
            return False

    def metrics(self, port: int, token: str) -> str:
        asked = request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {token}"})
        with request.urlopen(asked, timeout=devices.PATIENCE_S) as response:
            text: str = response.read().decode()
            return text


@contextmanager
def running(deployment: Deployment, part: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a container's command until all its probes pass, and end it afterwards."""
    process, log = deployment.start(part), deployment.folder / f"{part}.log"
    probes = [value for name, value in deployment.container(part).items() if name.endswith("Probe")]
    assert len(probes) >= 2
    start = deployment.container(part)["startupProbe"]
    deadline_s = time.monotonic() + start["periodSeconds"] * start["failureThreshold"]
    try:
        while not all(deployment.passes(part, probe) for probe in probes):
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(devices.PATIENCE_S)
        finally:
            process.kill()
            process.wait()


def test_the_commands_of_a_deployment_work_together(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    with ExitStack() as stack:
        for part in ("gateway", "relay", "workers"):
            stack.enter_context(running(deployment, part))
        trainer = deployment.start("trainer")
        stack.callback(trainer.wait)
        stack.callback(trainer.kill)
        assert trainer.wait(300) == 0, "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
        assert "of games won" in (tmp_path / "trainer.log").read_text()
        operator, rollouts = (deployment.tokens[name][key] for name, key in SCRAPED)
        gateway = deployment.metrics(deployment.values.gateway.port, operator)
        assert "rose_gateway_members 1.0" in gateway
        used = {name for expression, _ in ALERTS.values() for name in re.findall(r"rose_[a-z_]+", expression)}
        of_devices = {"rose_slo_breaches_total", "rose_breaker_trips_total", "rose_engine_restarts_total"}
        assert {name for name in used | {WAITING} if name not in gateway} == of_devices
        assert "rose_weights_received_versions_total" in deployment.metrics(deployment.rollout_port, rollouts)
    tokens = [token for known in deployment.tokens.values() for token in known.values()]
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert not [token for token in tokens if token in logs]
