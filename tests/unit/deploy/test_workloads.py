"""The processes of a deployment, as pods."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose.deploy import workloads
from rose.deploy.deploy_values import DeployValues

VALUES = DeployValues()


def kinds(objects):
    return [each["kind"] for each in objects]


def command(objects, kind):
    [found] = [each for each in objects if each["kind"] == kind]
    [container] = found["spec"]["template"]["spec"]["containers"]
    return container["command"]


def test_the_gateway_is_one_pod_with_a_ledger_in_a_volume():
    made = workloads.gateway(VALUES)
    [stateful] = [each for each in made if each["kind"] == "StatefulSet"]
    assert stateful["spec"]["replicas"] == 1 and len(stateful["spec"]["volumeClaimTemplates"]) == 1
    words = command(made, "StatefulSet")
    assert words[:2] == ["rose", "gateway"] and words[words.index("--ledger") + 1].startswith("/state/")


def test_an_object_store_needs_no_relay():
    assert "StatefulSet" in kinds(workloads.relay(VALUES))
    assert workloads.relay(replace(VALUES, relay=replace(VALUES.relay, address="s3://bucket/weights"))) == []


@pytest.mark.parametrize(
    "engine, words", [("vllm", ["rose", "lend", "vllm"]), ("embedded", ["rose", "serve", "--lend"])]
)
def test_workers_have_the_command_of_their_engine(engine, words):
    values = replace(VALUES, workers=replace(VALUES.workers, engine=engine, gpus=0))
    assert workloads.worker_command(values)[: len(words)] == words
    assert not [word for word in workloads.worker_command(values) if "TOKEN" in word]


@pytest.mark.parametrize("kind, made", [("none", []), ("job", ["Job"]), ("jobset", ["JobSet"]), ("rayjob", ["RayJob"])])
def test_the_trainer_is_what_its_kind_says(kind, made):
    trainer = replace(VALUES.trainer, kind=kind)
    assert [
        each for each in kinds(workloads.trainer(replace(VALUES, trainer=trainer))) if each.endswith(("Job", "Set"))
    ] == made
