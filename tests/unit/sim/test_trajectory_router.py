"""The paper's routing rule with a limit on trajectories."""

from __future__ import annotations

from dataclasses import replace

from rose.core.routing_rules import Place, TurnView, Wait
from rose.core.worker_table import WorkerView
from rose.sim.trajectory_router import TrajectoryRouter

OWN = WorkerView("own", True, max_concurrency=64, kv_tokens=100_000, prefill_tok_s=1e4, decode_tok_s=100.0)
LENT = replace(OWN, name="lent", is_dedicated=False, slack_s=0.1)


def place(router: TrajectoryRouter, name: str, turn_id: str) -> str | None:
    turn = TurnView(name, "g", 100, 100)
    decision = router.choose(turn, 0.0)
    if isinstance(decision, Wait):
        return None
    assert isinstance(decision, Place)
    router.on_placed(turn_id, turn, decision.worker, 0.0)
    return decision.worker


def test_a_trajectory_keeps_its_place_between_turns() -> None:
    router = TrajectoryRouter(limit=1)
    router.put_worker(OWN)
    assert place(router, "a", "a.0") == "own" and place(router, "b", "b.0") is None
    router.on_ended("a.0", "ended", 10, 1.0)
    assert place(router, "b", "b.0") is None  # its environment runs, the place stays taken
    assert place(router, "a", "a.1") == "own"
    router.on_ended("a.1", "ended", 10, 2.0)
    router.on_finished("a", "g", 2, 20)
    assert place(router, "b", "b.0") == "own"


def test_dedicated_workers_fill_first_then_those_with_slack() -> None:
    router = TrajectoryRouter(limit=2)
    for worker in (OWN, LENT):
        router.put_worker(worker)
    assert [place(router, name, name) for name in "abcde"] == ["own", "own", "lent", "lent", None]


def test_trajectories_of_a_lost_worker_find_another_first() -> None:
    router = TrajectoryRouter(limit=1)
    for worker in (OWN, LENT):
        router.put_worker(worker)
    assert place(router, "a", "a.0") == "own"
    router.on_ended("a.0", "lost", 0, 1.0)
    router.remove_worker("own")
    assert router.rank(TurnView("a")) < router.rank(TurnView("new"))
    assert place(router, "a", "a.1") == "lent"
