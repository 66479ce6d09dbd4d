"""What surrounds the workloads: disruption budgets, network policies, scalers and monitoring.

Scalers and alerts use only metrics that the gateway and the workers have; a test reads both pages and compares.
"""

from __future__ import annotations

from rose.deploy.deploy_values import DeployValues
from rose.deploy.pod_parts import INSTANCE, Object, new_object, selector

WAITING = "vllm:num_requests_waiting"
CALM_S = 300  # before a scaler removes a worker: longer than a training step in which no turn waits
ALERTS = {  # name -> expression, summary; an alert is raised after five minutes
    "RoseLedgerTrouble": (
        "rose_gateway_ledger_trouble == 1",
        "The ledger's volume cannot be written; turns are refused.",
    ),
    "RoseNoWorkers": (
        "rose_gateway_members == 0 and rose_gateway_trajectories > 0",
        "Trajectories are open and no worker is in the pool.",
    ),
    "RoseWeightsBehind": (
        "min_over_time(rose_weights_workers_behind[10m]) > 0",
        "For ten minutes some worker has not run the newest weights. GET /v1/pool says why.",
    ),
    "RoseWeightsFailures": ("increase(rose_weights_failures_total[15m]) > 0", "Workers fail to fetch weights."),
    "RoseBreaches": (
        'increase(rose_slo_breaches_total{kind=~"ttft|tpot"}[15m]) > 0',
        "Lending cost users a deadline that serving alone would have met. `rose lend pause` stops lending.",
    ),
    "RoseBreakerTrips": ("increase(rose_breaker_trips_total[15m]) > 0", "The circuit breaker stopped lending."),
    "RoseEngineRestarts": ("increase(rose_engine_restarts_total[15m]) > 2", "A rollout engine dies again and again."),
}


def disruption_budgets(values: DeployValues) -> list[Object]:
    """Return a budget for the workers, and one by which the gateway and the relay never move at the same time."""
    either = {"key": "app.kubernetes.io/component", "operator": "In", "values": ["gateway", "relay"]}
    control = {"matchLabels": {INSTANCE: values.name}, "matchExpressions": [either]}
    budgets: list[tuple[str, int | str, Object]] = [("control", 1, control)]
    budgets.append(("worker", "25%", {"matchLabels": selector(values, "worker")}))
    found = []
    for component, most, chosen in budgets:
        spec = {"maxUnavailable": most, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": chosen}
        found.append(new_object(values, "policy/v1", "PodDisruptionBudget", component, spec))
    return found


def network_policies(values: DeployValues) -> list[Object]:
    """Return who may connect to what. Workers connect to the gateway and not the other way round."""
    if not values.network_policies:
        return []
    clients = [{"namespaceSelector": {}, "podSelector": {"matchLabels": {INSTANCE: values.name}}}]
    namespace = {"kubernetes.io/metadata.name": values.monitoring.namespace}
    scraping = [{"namespaceSelector": {"matchLabels": namespace}}]
    allowed: dict[str, list[Object]] = {
        "gateway": [{"from": clients + scraping, "ports": [{"port": "http"}]}],
        "relay": [{"from": clients, "ports": [{"port": "relay"}]}],
        "worker": [{"from": scraping, "ports": [{"port": "rollouts"}]}],
    }
    if values.relay.address:
        del allowed["relay"]
    found = []
    for component, rules in allowed.items():
        chosen = {"matchLabels": selector(values, component)}
        spec = {"podSelector": chosen, "policyTypes": ["Ingress"], "ingress": rules}
        found.append(new_object(values, "networking.k8s.io/v1", "NetworkPolicy", component, spec))
    return found


def scaler(values: DeployValues) -> list[Object]:
    """Return what sets the number of workers by the turns that wait at the gateway."""
    own, target, waiting = values.workers, f"{values.name}-worker", str(values.workers.waiting_turns)
    gateway_pod = {"namespace": values.namespace, "pod": f"{values.name}-gateway-0"}
    calm = {"scaleDown": {"stabilizationWindowSeconds": CALM_S}}
    if own.scaler == "hpa":
        metric = {"name": WAITING, "selector": {"matchLabels": gateway_pod}}
        wanted = {"metric": metric, "target": {"type": "AverageValue", "averageValue": waiting}}
        spec: Object = {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target}}
        spec |= {"minReplicas": own.min_replicas, "maxReplicas": own.max_replicas, "behavior": calm}
        spec["metrics"] = [{"type": "External", "external": wanted}]
        return [new_object(values, "autoscaling/v2", "HorizontalPodAutoscaler", "worker", spec)]
    if own.scaler == "keda":
        chosen = ", ".join(f'{label}="{value}"' for label, value in gateway_pod.items())
        query = {"serverAddress": own.prometheus, "query": f"sum({WAITING}{{{chosen}}})", "threshold": waiting}
        spec = {"scaleTargetRef": {"name": target}, "triggers": [{"type": "prometheus", "metadata": query}]}
        spec |= {"minReplicaCount": own.min_replicas, "maxReplicaCount": own.max_replicas}
        spec["advanced"] = {"horizontalPodAutoscalerConfig": {"behavior": calm}}
        return [new_object(values, "keda.sh/v1alpha1", "ScaledObject", "worker", spec)]
    return []


def monitoring(values: DeployValues) -> list[Object]:
    """Return PodMonitors and alerts, as the values ask for them."""
    api, found = "monitoring.coreos.com/v1", []
    if values.monitoring.pod_monitors:
        scrapes = [("gateway", "http", values.control_secret, "ROSE_OPERATOR_TOKEN")]
        if values.workers.engine == "embedded":  # vLLM's agents show theirs on the loopback only
            scrapes.append(("worker", "rollouts", values.worker_secret, "ROSE_ROLLOUT_TOKEN"))
        for component, port, secret, key in scrapes:
            endpoint: Object = {"port": port, "path": "/metrics", "interval": "15s"}
            endpoint["authorization"] = {"credentials": {"name": secret, "key": key}}
            spec: Object = {"selector": {"matchLabels": selector(values, component)}, "podMetricsEndpoints": [endpoint]}
            found.append(new_object(values, api, "PodMonitor", component, spec))
    if values.monitoring.rules:
        rules = [
            {"alert": name, "expr": expression, "for": "5m", "annotations": {"summary": summary}}
            for name, (expression, summary) in ALERTS.items()
        ]
        groups = {"groups": [{"name": values.name, "rules": rules}]}
        found.append(new_object(values, api, "PrometheusRule", "alerts", groups))
    for each in found:
        each["metadata"]["labels"] |= values.monitoring.labels
    return found
