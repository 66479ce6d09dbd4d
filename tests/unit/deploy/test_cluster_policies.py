"""Who may connect to what, and what scales and watches the workers."""

from __future__ import annotations

from dataclasses import replace

from rose.deploy.cluster_policies import disruption_budgets, monitoring, network_policies, scaler
from rose.deploy.deploy_values import DeployValues

VALUES = DeployValues()


def by_name(objects):
    return {each["metadata"]["name"]: each["spec"] for each in objects}


def test_nothing_connects_to_workers_but_prometheus():
    policies = by_name(network_policies(VALUES))
    assert set(policies) == {"rose-gateway", "rose-relay", "rose-worker"}
    [rule] = policies["rose-worker"]["ingress"]
    assert [set(source) for source in rule["from"]] == [{"namespaceSelector"}]
    assert all(policy["policyTypes"] == ["Ingress"] for policy in policies.values())


def test_a_relay_elsewhere_has_no_policy_here():
    elsewhere = replace(VALUES, relay=replace(VALUES.relay, address="s3://bucket/weights"))
    assert "rose-relay" not in by_name(network_policies(elsewhere))
    assert network_policies(replace(VALUES, network_policies=False)) == []


def test_gateway_and_relay_are_never_moved_at_the_same_time():
    budgets = by_name(disruption_budgets(VALUES))
    assert budgets["rose-control"]["maxUnavailable"] == 1
    [chosen] = budgets["rose-control"]["selector"]["matchExpressions"]
    assert chosen["values"] == ["gateway", "relay"]


def test_a_scaler_follows_the_turns_that_wait():
    assert scaler(VALUES) == []
    for kind, lowest, highest in (
        ("hpa", "minReplicas", "maxReplicas"),
        ("keda", "minReplicaCount", "maxReplicaCount"),
    ):
        workers = replace(VALUES.workers, scaler=kind, min_replicas=2, max_replicas=9, waiting_turns=5)
        [made] = scaler(replace(VALUES, workers=workers))
        assert (made["spec"][lowest], made["spec"][highest]) == (2, 9)
        assert made["spec"]["scaleTargetRef"]["name"] == "rose-worker" and "num_requests_waiting" in str(made)


def test_prometheus_gets_tokens_by_reference_only():
    watched = replace(VALUES, monitoring=replace(VALUES.monitoring, pod_monitors=True, rules=True))
    made = monitoring(watched)
    assert {each["kind"] for each in made} == {"PodMonitor", "PrometheusRule"}
    for each in made:
        for endpoint in each["spec"].get("podMetricsEndpoints", []):
            assert set(endpoint["authorization"]["credentials"]) == {"name", "key"}
