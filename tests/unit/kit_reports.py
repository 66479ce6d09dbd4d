"""Reports and results of a verification kit, made up for tests."""

from __future__ import annotations

from rose.verify.kit_results import KitCheck, KitFigure, KitReport, KitSettings, StepResult


def latencies(suffix: str = "", scale: float = 1.0) -> tuple[KitFigure, ...]:
    return (
        KitFigure(f"attainment{suffix}", 99.5, "%", 1000, 98.8, 99.8),
        KitFigure(f"TTFT P50{suffix}", 20.0 * scale, "ms", 1000, 19.0 * scale, 21.0 * scale),
        KitFigure(f"TTFT P99{suffix}", 90.0 * scale, "ms", 1000, 80.0 * scale, None),
        KitFigure(f"TPOT P50{suffix}", 8.0, "ms", 1000, 7.9, 8.1),
        KitFigure(f"TPOT P99{suffix}", 14.0, "ms", 1000, 13.0, 17.0),
    )


def full_report(**changes: object) -> KitReport:
    alone = StepResult(
        "serving-alone", "passed", seconds=320.0, figures=latencies(" in run 1") + latencies(" in run 2")
    )
    tokens = KitFigure("rollout tokens per second", 1234.5, "tokens/s", 900)
    results = (
        StepResult("machine", "passed", seconds=1.5, facts={"GPU": "a <GPU>"}, notes=("a note & more",)),
        StepResult("page-calls", "not run", "no GPU"),
        alone,
        StepResult("idle", "passed", seconds=150.0, figures=(*latencies(scale=1.1), tokens)),
        StepResult(
            "kill-rollouts",
            "failed",
            "serving answered every request: 9 of 10",
            61.0,
            (KitCheck("serving answered every request", False, "9 of 10; 1 x failed: the answer broke off"),),
        ),
    )
    report = KitReport("0.1.0", "2026-11-19 05:00", KitSettings(), results, 540.0, 1.0)
    return KitReport(**{name: getattr(report, name) for name in KitReport.__struct_fields__} | changes)  # type: ignore[arg-type]
