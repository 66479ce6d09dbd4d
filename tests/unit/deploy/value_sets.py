"""Values of deployments of every kind, which several tests render."""

from __future__ import annotations

from typing import Any

from rose.config.loading import apply_layer
from rose.deploy.deploy_values import DeployValues, check_values

MONITORED = {"pod_monitors": True, "rules": True, "labels": {"release": "prometheus"}}
VALUE_SETS: dict[str, dict[str, Any]] = {
    "default": {},
    "sidecar": {"sidecar": {"deployment": "chat", "namespace": "serving"}, "trainer": {"kind": "none"}},
    "sidecar by DRA": {"sidecar": {"deployment": "chat", "gpu": "dra", "user": 2000}, "workers": {"scaler": "hpa"}},
    "jobset": {"trainer": {"kind": "jobset", "ranks": 2, "retries": 3}, "storage_class": "fast"},
    "rayjob": {
        "trainer": {"kind": "rayjob", "ranks": 3, "image": "trainer-with-ray:1"},
        "relay": {"address": "s3://bucket/folder"},
        "network_policies": False,
    },
    "no GPU": {
        "name": "lake",
        "namespace": "rl",
        "image": {"repository": "registry.example/rose", "tag": "0.1.0-cpu", "pull_secret": "registry"},
        "gateway": {"settings": {"max_staleness": 2, "router": "cost", "wait_s": 2.5, "max_waiting": 1048576}},
        "workers": {
            "engine": "embedded",
            "gpus": 0,
            "cpu": "1",
            "memory": "4Gi",
            "shared_memory": "1Gi",
            "scaler": "keda",
        },
        "trainer": {"gpus": 0, "memory": "8Gi"},
        "monitoring": MONITORED,
    },
    "vLLM on CPUs": {"workers": {"gpus": 0, "replicas": 3}, "trainer": {"gpus": 0}, "monitoring": MONITORED},
}


def values_of(name: str) -> DeployValues:
    return check_values(apply_layer(DeployValues(), VALUE_SETS[name], name))
