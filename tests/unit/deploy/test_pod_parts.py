"""What every pod has: the secrets of its role only, no root, bounded memory."""

from __future__ import annotations

from dataclasses import replace

from rose.deploy import pod_parts
from rose.deploy.deploy_values import DeployValues

VALUES = DeployValues()


def test_workers_get_the_read_key_and_never_the_signing_secret():
    variables = {each["name"]: each for each in pod_parts.worker_variables(VALUES)}
    source = variables["ROSE_RELAY_SECRET"]["valueFrom"]["secretKeyRef"]
    assert source == {"name": VALUES.worker_secret, "key": "ROSE_RELAY_READ_KEY"}
    assert not {"ROSE_TRAINER_TOKEN", "ROSE_OPERATOR_TOKEN", "ROSE_AGENT_TOKEN"} & set(variables)
    for key in pod_parts.CONTROL_SECRETS:
        source = pod_parts.secret_variable(VALUES, key)["valueFrom"]["secretKeyRef"]
        assert source["name"] == VALUES.control_secret


def test_a_container_limits_memory_and_gpus_and_only_asks_for_cpu():
    own = replace(VALUES.workers, cpu="3", memory="8Gi", gpus=1)
    resources = pod_parts.container(VALUES, "worker", ["rose"], [], own, [])["resources"]
    assert resources["limits"] == {"memory": "8Gi", VALUES.gpu_resource: "1"}
    assert resources["requests"] == {"cpu": "3", **resources["limits"]}
    none = pod_parts.container(VALUES, "worker", ["rose"], [], replace(own, gpus=0), [])
    assert none["resources"]["limits"] == {"memory": "8Gi"}


def test_pods_run_as_one_user_without_privileges():
    template = pod_parts.pod_template(VALUES, "worker", {"name": "worker"}, [])["spec"]
    assert template["securityContext"]["runAsNonRoot"] and template["securityContext"]["runAsUser"] == pod_parts.USER
    assert template["automountServiceAccountToken"] is False
    assert "imagePullSecrets" not in template
    private = replace(VALUES, image=replace(VALUES.image, pull_secret="registry"))
    made = pod_parts.pod_template(private, "worker", {"name": "worker"}, [])["spec"]
    assert made["imagePullSecrets"] == [{"name": "registry"}]


def test_a_process_may_take_its_time_to_start_and_is_restarted_when_it_hangs():
    found = pod_parts.probes({"tcpSocket": {"port": 1}}, 10, 600)
    assert found["startupProbe"]["failureThreshold"] * found["startupProbe"]["periodSeconds"] == 600
    assert found["livenessProbe"]["failureThreshold"] == 6
