"""A whole deployment as Kubernetes objects, by part."""

from __future__ import annotations

from rose.deploy.cluster_policies import disruption_budgets, monitoring, network_policies, scaler
from rose.deploy.deploy_values import DeployValues
from rose.deploy.pod_parts import Object
from rose.deploy.vllm_sidecar import claim_template
from rose.deploy.workloads import gateway, relay, trainer, workers

PARTS = {
    "gateway": (gateway,),
    "relay": (relay,),
    "workers": (workers, scaler),
    "trainer": (trainer,),
    "policies": (disruption_budgets, network_policies),
    "monitoring": (monitoring,),
    "sidecar": (claim_template,),
}


def render(values: DeployValues) -> dict[str, list[Object]]:
    """Return the objects of a deployment by part; parts without objects are left out."""
    parts = {name: [each for make in makers for each in make(values)] for name, makers in PARTS.items()}
    return {name: objects for name, objects in parts.items() if objects}
