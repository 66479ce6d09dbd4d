"""Parts that every pod of a deployment has: labels, containers, variables, volumes and security.

Each container gets only the secrets of its role (SECURITY.md), by reference. Processes run as one user, not as root,
and where nothing but ROSE runs the root file system is read-only. HOME is an emptyDir: kernels are compiled there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rose.deploy.deploy_values import DeployValues

Object = dict[str, Any]

USER = 10001  # of deploy/docker
PORT_OWNER, PORT_ROLLOUTS = 8011, 8001
INSTANCE = "rose/instance"  # label of pods that the NetworkPolicies let in
CONTROL_SECRETS = ("ROSE_AGENT_TOKEN", "ROSE_TRAINER_TOKEN", "ROSE_OPERATOR_TOKEN", "ROSE_RELAY_SECRET")
WORKER_SECRETS = ("ROSE_WORKER_TOKEN", "ROSE_ROLLOUT_TOKEN", "ROSE_OWNER_TOKEN", "ROSE_RELAY_READ_KEY")
MODEL_MOUNT: Object = {"name": "models", "mountPath": "/models", "readOnly": True}
STATE_MOUNT: Object = {"name": "state", "mountPath": "/state"}
SHARED_MOUNT: Object = {"name": "shared", "mountPath": "/dev/shm"}
WRITABLE: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
SEALED: Object = {"securityContext": {**WRITABLE, "readOnlyRootFilesystem": True}}


def selector(values: DeployValues, component: str) -> dict[str, str]:
    return {INSTANCE: values.name, "app.kubernetes.io/component": component}


def labels(values: DeployValues, component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "rose", **selector(values, component)}


def new_object(values: DeployValues, api: str, kind: str, component: str, spec: Object, suffix: str = "") -> Object:
    """Return an object in the deployment's namespace, named after its component."""
    name = f"{values.name}-{suffix or component}"
    metadata = {"name": name, "namespace": values.namespace, "labels": labels(values, component)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def secret_variable(values: DeployValues, key: str, variable: str = "") -> Object:
    """Return a variable that is taken from the Secret that has this key."""
    secret = values.worker_secret if key in WORKER_SECRETS else values.control_secret
    return {"name": variable or key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def worker_variables(values: DeployValues) -> list[Object]:
    """Return the variables of a worker, whose ROSE_RELAY_SECRET is the read key."""
    name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    own = [secret_variable(values, key) for key in WORKER_SECRETS[:3]]
    return [name, *own, secret_variable(values, "ROSE_RELAY_READ_KEY", "ROSE_RELAY_SECRET")]


def plain_variable(name: str, value: str) -> Object:
    return {"name": name, "value": value}


def container(
    values: DeployValues, name: str, command: Sequence[str], variables: list[Object], own: Any, mounts: list[Object]
) -> Object:
    """Return a container with the resources that its values say: only memory is limited."""
    gpus = getattr(own, "gpus", 0)
    limits = {"memory": own.memory, **({values.gpu_resource: str(gpus)} if gpus else {})}
    return {
        "name": name,
        "image": f"{values.image.repository}:{values.image.tag}",
        "imagePullPolicy": values.image.pull_policy,
        **({"command": list(command)} if command else {}),
        "env": [plain_variable("HOME", "/tmp"), *variables],
        "resources": {"requests": {"cpu": own.cpu, **limits}, "limits": limits},
        "securityContext": WRITABLE,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *mounts],
    }


def model_volume(values: DeployValues) -> Object:
    return {"name": "models", "persistentVolumeClaim": {"claimName": values.model.claim, "readOnly": True}}


def shared_volume(size: str) -> Object:
    return {"name": "shared", "emptyDir": {"medium": "Memory", "sizeLimit": size}}


def pod_template(values: DeployValues, component: str, process: Object, volumes: list[Object]) -> Object:
    """Return the template of a component's pods."""
    ids = {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"}
    spec: Object = {
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, **ids, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [process],
        "volumes": [{"name": "tmp", "emptyDir": {}}, *volumes],
    }
    if values.image.pull_secret:
        spec["imagePullSecrets"] = [{"name": values.image.pull_secret}]
    return {"metadata": {"labels": labels(values, component)}, "spec": spec}


def claim_spec(values: DeployValues, storage: str, mode: str = "ReadWriteOnce") -> Object:
    named = {"storageClassName": values.storage_class} if values.storage_class else {}
    return {"accessModes": [mode], **named, "resources": {"requests": {"storage": storage}}}


def probes(action: Object, period_s: int, starts_within_s: int) -> Object:
    """Return the probes of a container, which restart what hangs.

    They ask for what needs no token. /health is none: it is 503 on a full disk, and a restart would not mend that.
    """
    tried: Object = {**action, "periodSeconds": period_s, "timeoutSeconds": period_s // 2}
    start = {**tried, "failureThreshold": starts_within_s // period_s}
    return {"startupProbe": start, "livenessProbe": {**tried, "failureThreshold": 6}}
