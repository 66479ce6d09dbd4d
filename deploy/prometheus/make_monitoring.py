"""Write the alert rules for Prometheus and the dashboards for Grafana.

    python deploy/prometheus/make_monitoring.py

The rules are the alerts of `rose deploy k8s`. A test compares the files with
what this writes, and every metric in them with the metrics of the sources.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from rose.deploy.cluster_policies import ALERTS

DEPLOY = Path(__file__).parents[1]
SECONDS, TOKENS_PER_S, SHARE, COUNT = "s", "short", "percentunit", "short"
WIDTH, HEIGHT = 12, 8  # of a panel; a dashboard has 24 columns
BY_DEVICE = "instance"

Panel = tuple[str, str, list[tuple[str, str]]]  # title, unit, pairs of expression and legend


def _quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket[5m])))"


OWNER: list[Panel] = [
    (
        "First token of users, P50 and P99",
        SECONDS,
        [(_quantile(share, "vllm:time_to_first_token_seconds"), f"P{share * 100:g}") for share in (0.5, 0.99)],
    ),
    (
        "Time per token of users, P50 and P99",
        SECONDS,
        [
            (_quantile(share, "vllm:request_time_per_output_token_seconds"), f"P{share * 100:g}")
            for share in (0.5, 0.99)
        ],
    ),
    ("Requests, by model", COUNT, [
        ("sum by (model_name) (vllm:num_requests_running)", "{{model_name}} running"),
        ("sum by (model_name) (vllm:num_requests_waiting)", "{{model_name}} waiting"),
    ]),
    (
        "Deadlines that lending cost users, per 5 minutes",
        COUNT,
        [("sum by (kind) (increase(rose_slo_breaches_total[5m]))", "{{kind}}")],
    ),
    ("Share of the time lent, by device", SHARE, [
        (f"sum by ({BY_DEVICE}) (rate(rose_lent_seconds_total[5m]))", "{{instance}}"),
    ]),
    (
        "Devices that lend, and devices whose gate is open",
        COUNT,
        [("sum(rose_lending)", "lend"), ("sum(rose_gate_open)", "gate open")],
    ),
    ("Circuit breaker and restarts, per hour", COUNT, [
        ("sum(increase(rose_breaker_trips_total[1h]))", "breaker trips"),
        ("sum(increase(rose_engine_restarts_total[1h]))", "engine restarts"),
    ]),
    ("How much longer requests live than alone", COUNT, [("max(rose_lending_stretch)", "worst device")]),
    ("KV memory, pages", COUNT, [
        ("sum(rose_serving_pages)", "serving"),
        ("sum(rose_rollout_pages)", "rollouts"),
        ("sum(rose_rollout_pages_max)", "rollouts may hold"),
    ]),
    ("Rollouts evicted, per second", COUNT, [("sum(rate(rose_rollout_evictions_total[5m]))", "evictions")]),
]  # fmt: skip
TRAINING: list[Panel] = [
    ("Tokens of rollouts per second, by device", TOKENS_PER_S, [
        (f"sum by ({BY_DEVICE}) (rate(rose_rollout_tokens_total[5m]))", "{{instance}}"),
    ]),
    ("Turns per second, by outcome", COUNT, [("sum by (what) (rate(rose_gateway_turns_total[5m]))", "{{what}}")]),
    ("Trajectories finished, per minute", COUNT, [
        ("sum(rate(rose_gateway_trajectories_finished_total[5m])) * 60", "finished"),
    ]),
    ("Trajectories held", COUNT, [("sum(rose_gateway_trajectories)", "held")]),
    ("Workers and borrowed devices", COUNT, [
        ("sum(rose_gateway_members)", "workers"),
        ("sum(rose_gateway_borrowed)", "borrowed"),
    ]),
    ("Versions that workers are behind", COUNT, [
        ("max(rose_weights_lag_versions)", "most"),
        ("sum(rose_weights_workers_behind)", "workers behind"),
    ]),
    ("Weights: time by phase, P99", SECONDS, [
        ("histogram_quantile(0.99, sum by (le, phase) (rate(rose_weights_seconds_bucket[15m])))", "{{phase}}"),
    ]),
    ("Weights: pause of generation, P99", SECONDS, [(_quantile(0.99, "rose_weights_pause_seconds"), "pause")]),
    ("Weights: failures and refusals, per hour", COUNT, [
        ("sum by (kind) (increase(rose_weights_failures_total[1h]))", "{{kind}}"),
        ("sum(increase(rose_weights_refused_total[1h]))", "refused"),
    ]),
    ("Ledger: memory of turns and write-ahead log", "bytes", [
        ("sum(rose_gateway_kept_bytes)", "turns"),
        ("sum(rose_gateway_ledger_wal_bytes)", "write-ahead log"),
    ]),
]  # fmt: skip


def dashboard(uid: str, title: str, panels: list[Panel]) -> dict[str, Any]:
    """Return a dashboard with two panels in a row; Grafana asks for the data source when it is imported."""
    source = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    shown = []
    for number, (name, unit, queries) in enumerate(panels):
        place = {"x": number % 2 * WIDTH, "y": number // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT}
        targets = [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(queries)
        ]
        defaults = {"unit": unit, "min": 0}
        shown.append(
            {"id": number + 1, "type": "timeseries", "title": name, "datasource": source, "gridPos": place,
             "fieldConfig": {"defaults": defaults, "overrides": []}, "targets": targets}
        )  # fmt: skip
    asked = {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}
    return {
        "__inputs": [asked], "uid": uid, "title": title, "tags": ["rose"], "timezone": "utc", "refresh": "10s",
        "schemaVersion": 39, "time": {"from": "now-1h", "to": "now"}, "panels": shown,
    }  # fmt: skip


def rules() -> dict[str, Any]:
    """Return the alert rules: those of the PrometheusRule that `rose deploy k8s` and the chart render."""
    alerts = [
        {"alert": name, "expr": expression, "for": "5m", "annotations": {"summary": summary}}
        for name, (expression, summary) in ALERTS.items()
    ]
    return {"groups": [{"name": "rose", "rules": alerts}]}


def files() -> dict[Path, str]:
    """Return the text of every file, by its path."""
    head = "# Written by deploy/prometheus/make_monitoring.py.\n"
    found = {DEPLOY / "prometheus" / "rules.yaml": head + yaml.safe_dump(rules(), sort_keys=False, width=120)}
    for name, title, panels in (
        ("owner", "ROSE: what lending does to serving", OWNER),
        ("training", "ROSE: rollouts and weights", TRAINING),
    ):
        text = json.dumps(dashboard(f"rose-{name}", title, panels), indent=1)
        found[DEPLOY / "grafana" / f"{name}.json"] = f"{text}\n"
    return found


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
