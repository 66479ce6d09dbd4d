"""Lines of a made-up run, for what reads them."""

from __future__ import annotations

from typing import Any

Line = dict[str, Any]


def step(number: int, began_s: float, *, is_borrowed: bool = True, rollout_s: float = 2.0, **changes: Any) -> Line:
    found = {
        "kind": "step",
        "step": number,
        "is_borrowed": is_borrowed,
        "began_s": began_s,
        "rollout_s": rollout_s,
        "train_s": 1.0,
        "publish_s": 0.1,
        "step_s": rollout_s + 1.1,
        "version": str(number),
        "trajectories": 64,
        "successes": 16 + number,
        "turns": 300,
        "generated_tokens": 1200,
        "turns_by_pool": {"dedicated": 100, "borrowed": 200} if is_borrowed else {"dedicated": 300, "borrowed": 0},
        "cpu_s": {"engine_borrowed": 2.5 if is_borrowed else 0.62},
        "groups_kept": 8,
        "groups_total": 11,
        "verdict": "updated",
    }
    return found | changes


def served(at_s: float, ttft_ms: float = 20.0, tpot_ms: float = 5.0) -> Line:
    return {"at_s": at_s, "ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "attained": ttft_ms <= 500 and tpot_ms <= 150}


def run_lines(steps: int = 8, *, compare: bool = True) -> list[Line]:
    """A run of `steps` steps that began at second 100; half of them without the device, if it compares."""
    lines: list[Line] = [{"kind": "evaluation", "step": 0, "success_rate": 0.09, "began_s": 100.0, "took_s": 2.0}]
    lines.append({"kind": "costs", "when": "begin", "turns": 1000, "roles": {"gateway": 1.0, "trainer": 0.5}})
    at_s = 102.0
    for number in range(1, steps + 1):
        is_borrowed = not compare or number % 4 in (0, 1)
        found = step(number, at_s, is_borrowed=is_borrowed, rollout_s=2.0 if is_borrowed else 4.0)
        turns = {"dedicated": 100 * number, "borrowed": 150 * number}
        lines.append({"kind": "sample", "at_s": at_s, "turns": turns, "running": {}, "version": "1"})
        lines.append(found)
        at_s += found["step_s"]
    lines.append({"kind": "evaluation", "step": steps, "success_rate": 0.6, "began_s": at_s, "took_s": 2.0})
    roles = {"gateway": 3.0, "agent_borrowed": 1.0, "trainer": 8.5}
    lines.append({"kind": "costs", "when": "end", "turns": 3400, "roles": roles})
    lines.append({"kind": "death", "at_s": 110.0, "role": "dedicated", "code": -9, "is_restarted": True})
    lines.append({"kind": "balance", "begun": 512, "returned": 512, "written_off": 0, "lost": 0, "doubled": 0})
    return lines
