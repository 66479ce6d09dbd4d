"""The scheduling benchmark: its baseline routers, and that the batch model finishes and counts all work."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from scheduling import traffic, trajectories
from scheduling.baselines import BASELINES, ROUTERS, make_router

from rose.core.router import Router
from rose.core.routing_rules import ROUTER_KINDS, Place, TurnView, Wait
from rose.core.slo import Budgets
from rose.core.worker_table import WorkerView
from rose.engines.profiles import load_profile
from rose.sim.batch_cluster import BatchCluster
from rose.sim.lent_timeline import BIN_S, LentTimeline, SaturatedDevice

NOW_S = 100.0
A = WorkerView(
    "a", is_dedicated=True, max_concurrency=32, kv_tokens=100_000, prefill_tok_s=10_000.0, decode_tok_s=100.0
)
B = replace(A, name="b")
LENT = replace(A, name="lent", is_dedicated=False, slack_s=0.1)
ROLLOUT = load_profile("h800-qwen3-8b")


def made(name: str, *workers: WorkerView, turns: dict[str, int] | None = None) -> Router:
    router = make_router(name)
    for worker in workers:
        router.put_worker(worker)
    for worker_name, count in (turns or {}).items():
        for number in range(count):
            router.on_placed(f"{worker_name} {number}", TurnView("", None, 100, 100), worker_name, 0.0)
    return router


def chosen(router: Router, turn: TurnView) -> str | None:
    decision = router.choose(turn, NOW_S)
    return decision.worker if isinstance(decision, Place) else None


def play(router: Router, trajectory: str, worker: str, tokens: int) -> None:
    router.on_placed(trajectory, TurnView(trajectory, None, tokens, 100), worker, NOW_S - 2)
    router.on_ended(trajectory, "ended", 10, NOW_S - 1)


def test_the_benchmark_compares_what_users_can_choose_and_the_baselines() -> None:
    assert (*ROUTER_KINDS, "least", "sticky") == ROUTERS


@pytest.mark.parametrize("name", BASELINES)
def test_room_is_memory_for_the_baselines(name: str) -> None:
    small, large = replace(A, kv_tokens=1000), replace(B, kv_tokens=2000)
    router = made(name, small, large, turns={"a": 1, "b": 1})
    assert chosen(router, TurnView("", None, 900, 100)) == "b"
    assert chosen(router, TurnView("", None, 9000, 100)) is None


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_prefer_dedicated_workers_then_names(name: str) -> None:
    turn = TurnView("t", "g", 1000, 100)
    assert chosen(made(name, LENT, B, A), turn) == "a"
    assert chosen(made(name, replace(A, is_open=False), B, turns={"b": 3}), turn) == "b"
    assert chosen(made(name, replace(A, max_concurrency=1), turns={"a": 1}), turn) is None
    assert chosen(made(name, A), TurnView("t", None, 999_999, 1)) == "a"


def test_least_ignores_prefixes() -> None:
    router = made("least", A, B, turns={"b": 3})
    play(router, "t", "b", 20_000)
    assert chosen(router, TurnView("t", None, 20_100, 100)) == "a"


def test_least_lets_turns_leave_a_blocked_worker_after_two_seconds() -> None:
    router = made("least", A, LENT)
    router.on_placed("1", TurnView("long", None, 40_000, 100), "lent", 50.0)
    router.put_worker(replace(LENT, blocked_since_s=NOW_S))
    assert router.migration_candidates(NOW_S + 1.9) == []
    assert [stray.turn_id for stray in router.migration_candidates(NOW_S + 2.1)] == ["1"]


def test_sticky_waits_for_its_worker_and_gives_the_reason() -> None:
    router = made("sticky", A, replace(B, max_concurrency=2), turns={"b": 1})
    play(router, "t", "b", 500)
    assert chosen(router, TurnView("t", None, 600, 10)) == "b"
    router.on_placed("more", TurnView("", None, 10, 10), "b", NOW_S)
    decision = router.choose(TurnView("t", None, 600, 10), NOW_S)
    assert isinstance(decision, Wait) and not decision.is_for_all and "`b`" in decision.reason
    router.remove_worker("b")
    assert chosen(router, TurnView("t", None, 600, 10)) == "a"


@pytest.fixture(scope="module")
def timeline() -> LentTimeline:
    arrivals = traffic.load(None, 0).piece(0.0, 20.0, 0.5)
    serving = load_profile("h800-qwen2.5-7b")
    return SaturatedDevice(serving, ROLLOUT, Budgets(0.5, 0.15), arrivals, 20.0, 0, lends=True).run()


def test_a_saturated_device_lends_time_and_memory(timeline: LentTimeline) -> None:
    assert 0 < timeline.lent_s < timeline.span_s
    assert timeline.attainment > 0.9 and max(timeline.kv_tokens) > 0
    for lent_s in (0.1, 3.0, 1.5 * timeline.lent_s):
        assert timeline.lent_by(timeline.when_lent(lent_s)) == pytest.approx(lent_s)
    later = timeline.shifted(5.0)
    assert later.shares[0] == timeline.shares[round(5.0 / BIN_S)] and later.lent_s == pytest.approx(timeline.lent_s)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_batch_ends_with_every_turn_run_once(name: str, timeline: LentTimeline) -> None:
    drawn = trajectories.draw(trajectories.load("none", None, 0), 2, 4, 0.5, 0)
    cluster = BatchCluster(
        make_router(name), ROLLOUT, 1, [timeline], drawn, tries_every_arrival=name == "sticky"
    )  # fmt: skip
    result = cluster.run()
    assert len(result.turn_s) == sum(len(trajectory.turns) for trajectory in drawn)
    assert result.end_s[-1] == result.completion_s and len(result.end_s) == len(drawn)
    assert 0 <= result.cached_tokens <= result.known_tokens <= result.prompt_tokens
    again = BatchCluster(make_router(name), ROLLOUT, 1, [timeline], drawn, tries_every_arrival=name == "sticky").run()
    assert again.turn_s == result.turn_s, "the same seed, the same figures"
