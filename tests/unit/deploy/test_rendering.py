"""The objects of every kind of deployment: valid for Kubernetes, with commands, metrics and Secrets that exist."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.needs import needs
from tests.unit.deploy.value_sets import VALUE_SETS, values_of

from rose.cli.deploy import new_secrets, to_yaml
from rose.cli.main import CommandParser
from rose.deploy.cluster_policies import ALERTS, WAITING
from rose.deploy.rendering import render

SOURCES = Path(__file__).parents[3] / "src" / "rose"
KUBERNETES = ("1.34", "1.37")  # the oldest with all kinds that are used, and the newest
CUSTOM = {  # kinds that Kubernetes does not have: (group, keys of spec that their definitions require or know)
    "JobSet": ("jobset.x-k8s.io", {"failurePolicy", "replicatedJobs"}),
    "RayJob": ("ray.io", {"entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "rayClusterSpec"}),
    "ScaledObject": (
        "keda.sh",
        {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "advanced", "triggers"},
    ),
    "PodMonitor": ("monitoring.coreos.com", {"selector", "podMetricsEndpoints"}),
    "PrometheusRule": ("monitoring.coreos.com", {"groups"}),
}
EVERY = pytest.mark.parametrize("name", VALUE_SETS)


def objects_of(name: str) -> list[dict[str, Any]]:
    return [each for objects in render(values_of(name)).values() for each in objects]


def inside(tree: Any, key: str) -> Iterator[Any]:
    """Yield every value under this key, however deep."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key:
                yield value
            yield from inside(value, key)
    elif isinstance(tree, list):
        for value in tree:
            yield from inside(value, key)


def pods_in(tree: Any) -> list[dict[str, Any]]:
    """Return every pod spec in a tree."""
    return [each for each in inside(tree, "spec") if "containers" in each]


def parse(command: list[str]) -> None:
    """Read a `rose` command line as `rose` does; an unknown flag ends the process."""
    module = importlib.import_module(f"rose.cli.{command[1]}")
    parser = CommandParser(prog=f"rose {command[1]}", allow_abbrev=False)
    module.configure(parser)
    parser.parse_args(command[2:])


@needs("deploy-tests")
@pytest.mark.parametrize("version", KUBERNETES)
@EVERY
def test_objects_are_valid_for_kubernetes(name: str, version: str) -> None:
    import kubernetes_validate

    values = values_of(name)
    known = [each for each in [*objects_of(name), *new_secrets(values)] if each["kind"] not in CUSTOM]
    assert known
    for each in yaml.safe_load_all(to_yaml(known)):
        kubernetes_validate.validate(each, version, strict=True)


@needs("deploy-tests")
def test_an_unknown_field_is_found_by_the_schemas() -> None:
    import kubernetes_validate

    [service] = [each for each in objects_of("default") if each["metadata"]["name"] == "rose-gateway"][:1]
    service["spec"]["portz"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, KUBERNETES[-1], strict=True)


def test_every_custom_kind_is_rendered_with_the_keys_of_its_definition() -> None:
    found = {each["kind"]: each for name in VALUE_SETS for each in objects_of(name) if each["kind"] in CUSTOM}
    assert found.keys() == CUSTOM.keys()
    for kind, each in found.items():
        assert (each["apiVersion"].partition("/")[0], set(each["spec"])) == CUSTOM[kind]


@EVERY
def test_names_are_unique_and_in_their_namespace(name: str) -> None:
    places = [(each["kind"], each["metadata"]["namespace"], each["metadata"]["name"]) for each in objects_of(name)]
    assert len(places) == len(set(places))
    namespaces = {namespace for kind, namespace, _ in places if kind != "ResourceClaimTemplate"}
    assert namespaces == {values_of(name).namespace}


@EVERY
def test_every_command_of_rose_is_read_by_its_parser(name: str) -> None:
    commands = list(inside(objects_of(name), "command"))
    own = [command for command in commands if command and command[0] == "rose"]
    assert {"gateway", "relay"} - {command[1] for command in own} in (set(), {"relay"})
    for command in own:
        parse(command)


def test_a_wrong_flag_is_found() -> None:
    with pytest.raises(SystemExit):
        parse(["rose", "gateway", "/models/rollout", "--ledgr", "x"])


@EVERY
def test_tokens_are_references_to_secrets_that_can_be_made(name: str) -> None:
    values = values_of(name)
    made = {each["metadata"]["name"]: set(each["stringData"]) for each in new_secrets(values)}
    references = list(inside(objects_of(name), "secretKeyRef")) + list(inside(objects_of(name), "credentials"))
    assert references
    assert all(reference["key"] in made[reference["name"]] for reference in references)
    for variable in (each for pod in pods_in(objects_of(name)) for each in pod["containers"][0]["env"]):
        assert ("TOKEN" in variable["name"] or "SECRET" in variable["name"]) == ("secretKeyRef" in str(variable))


@EVERY
def test_a_container_gets_only_the_secrets_of_its_role(name: str) -> None:
    keys = {
        pod["containers"][0]["name"]: {each["key"] for each in inside(pod, "secretKeyRef")}
        for pod in pods_in(objects_of(name))
    }
    assert not keys["gateway"] & {"ROSE_RELAY_SECRET", "ROSE_RELAY_READ_KEY", "ROSE_OWNER_TOKEN"}
    assert keys.get("relay", {"ROSE_RELAY_SECRET"}) == {"ROSE_RELAY_SECRET"}
    assert not keys["worker"] & {"ROSE_RELAY_SECRET", "ROSE_TRAINER_TOKEN", "ROSE_AGENT_TOKEN", "ROSE_OPERATOR_TOKEN"}


@EVERY
def test_pods_are_not_root_and_have_every_volume_that_they_mount(name: str) -> None:
    for pod in pods_in(objects_of(name)):
        [process] = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert process["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        claimed = {"state"} if process["name"] in ("gateway", "relay") else set()
        volumes = {each["name"] for each in pod["volumes"]} | claimed
        assert {each["name"] for each in process["volumeMounts"]} == volumes
        assert process["resources"]["limits"]["memory"] == process["resources"]["requests"]["memory"]


@EVERY
def test_selectors_and_ports_meet_the_pods(name: str) -> None:
    found = objects_of(name)
    workloads = [each for each in found if each["kind"] in ("StatefulSet", "Deployment")]
    pods = [each["spec"]["template"] for each in workloads]
    for each in found:
        chosen = each["spec"].get("selector", {}) if each["kind"] == "Service" else None
        if chosen:
            [pod] = [pod for pod in pods if chosen.items() <= pod["metadata"]["labels"].items()]
            names = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
            assert {port["targetPort"] for port in each["spec"]["ports"]} <= names


def metrics_of_the_sources() -> set[str]:
    """Return the names of metrics in the sources, as Prometheus shows them."""
    texts = {path: path.read_text() for path in SOURCES.rglob("*.py") if "deploy" not in path.parts}
    names = {name for text in texts.values() for name in re.findall(r'"((?:rose_|vllm:)[a-z_]+)"', text)}
    gateway = texts[SOURCES / "gateway" / "gateway_server.py"]
    names |= {f"rose_gateway_{name}" for name in re.findall(r'\("(?:gauge|counter)", "([a-z_]+)"', gateway)}
    figures = re.findall(r'figure\("gauge", "([a-z_]+)"', texts[SOURCES / "openai" / "http_metrics.py"])
    return names | {f"vllm:{name}" for name in figures} | {f"{name}_total" for name in names}


def test_alerts_and_scalers_use_metrics_that_exist() -> None:
    used = {name for expression, _ in ALERTS.values() for name in re.findall(r"rose_[a-z_]+", expression)} | {WAITING}
    assert len(used) > 4
    assert used <= metrics_of_the_sources()
    assert all(WAITING in str(each) for each in objects_of("no GPU") if each["kind"] == "ScaledObject")
