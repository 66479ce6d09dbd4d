"""Values that cannot be right are refused with a sentence and a next step."""

from __future__ import annotations

import pytest

from rose.config.loading import load_settings
from rose.deploy.deploy_values import DeployValues, check_values
from rose.errors import ConfigError

RAYJOB = "trainer.kind=rayjob"


@pytest.mark.parametrize(
    "overrides, what, hint",
    [
        (["gatway.port=9000"], "unknown setting `gatway`", "nearest known one is `gateway.port`"),
        (["workers.replica=2"], "unknown setting `workers.replica`", "workers.replicas"),
        (["gateway.settings.max_stalenes=1"], "unknown setting `max_stalenes`", "max_staleness"),
        (["gateway.settings.max_staleness=-1"], "must be between 0 and 1000", "default is 0"),
        (["gateway.settings.ledger=/x"], "cannot set ledger", "leave it out"),
        (["gateway.port=80"], "must be between 1024 and 65535", "8002"),
        (["workers.memory=much"], "like 500m, 2 or 4Gi", "32Gi"),
        (["workers.replicas=many"], "must be a whole number", "1"),
        (["workers.engine=sglang"], "must be one of vllm, embedded", "vllm"),
        (["workers.engine=embedded"], "uses no GPU", "workers.gpus: 0"),
        (["workers.scaler=keda", "workers.min_replicas=9"], "above `max_replicas`, 8", "raise max_replicas"),
        (["trainer.ranks=2"], "a Job is one rank", "jobset"),
        (["trainer.command=[]"], "has no command", "set trainer.command"),
        ([RAYJOB], "has no Ray", "set trainer.image"),
        (["name=Rose"], "small letters", "rose"),
        (["model.folder=../other"], "like qwen3/8b", "rollout"),
        (["relay.address=tcp://host:1"], "like s3://bucket/folder", "relay elsewhere"),
        (["sidecar.deployment=rose-worker", "sidecar.namespace=rose"], "is ROSE's own", "your vLLM server"),
        (["sidecar.user=-1"], "must be between 0", "0"),
    ],
)
def test_a_wrong_value_is_refused_with_a_next_step(overrides: list[str], what: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_values(load_settings(DeployValues, None, overrides))
    assert what in refused.value.what
    assert hint in (refused.value.hint or "")


def test_settings_of_the_gateway_are_overrides_in_a_stable_order() -> None:
    overrides = ["gateway.settings.wait_s=2.5", "gateway.settings.router=cost", "gateway.settings.obey_priority=true"]
    values = check_values(load_settings(DeployValues, None, overrides))
    assert values.gateway_overrides == ["obey_priority=true", 'router="cost"', "wait_s=2.5"]


def test_addresses_are_those_of_the_services() -> None:
    values = load_settings(DeployValues, None, ["name=lake", "namespace=rl", "gateway.port=9000"])
    assert values.gateway_url == "http://lake-gateway.rl.svc:9000"
    assert values.relay_url == "http://lake-relay.rl.svc:7070"
