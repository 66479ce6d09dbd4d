"""Single placements, and what the router remembers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from rose.core.router import Router
from rose.core.routing_rules import NO_VERSION, ROUTER_KINDS, Place, RouterKind, RoutingCosts, TurnView, Wait
from rose.core.versions import VersionDemand
from rose.core.worker_table import WorkerView
from rose.errors import ConfigError

NOW_S = 100.0
RATES = {"prefill_tok_s": 10_000.0, "decode_tok_s": 100.0}
A = WorkerView("a", is_dedicated=True, max_concurrency=32, kv_tokens=100_000, **RATES)  # type: ignore[arg-type]
B = replace(A, name="b")
LENT = replace(A, name="lent", is_dedicated=False, slack_s=0.1)
TURN = TurnView("t", "g", 1000, 100)


def made(kind: RouterKind, *workers: WorkerView, turns: dict[str, int] | None = None) -> Router:
    """A router with these workers, and so many short untracked turns on some of them."""
    router = Router(kind)
    for worker in workers:
        router.put_worker(worker)
    for name, count in (turns or {}).items():
        for number in range(count):
            router.on_placed(f"{name} {number}", TurnView("", None, 100, 100), name, 0.0)
    return router


def chosen(router: Router, turn: TurnView = TURN, now_s: float = NOW_S) -> str | None:
    decision = router.choose(turn, now_s)
    return decision.worker if isinstance(decision, Place) else None


def play(router: Router, trajectory: str, worker: str, tokens: int, group: str | None = None) -> None:
    """One turn of so many tokens, begun and ended."""
    router.on_placed(trajectory, TurnView(trajectory, group, tokens, 100), worker, NOW_S - 2)
    router.on_ended(trajectory, "ended", 10, NOW_S - 1)


@pytest.mark.parametrize("kind", ROUTER_KINDS)
@pytest.mark.parametrize(
    "story, workers, turns, worker",
    [
        ("dedicated before borrowed on a tie", [LENT, A], {}, "a"),
        ("then by name", [B, A], {}, "a"),
        ("a closed worker is left alone", [replace(A, is_open=False), B], {"b": 3}, "b"),
        ("so is one that just refused", [replace(A, closed_until_s=NOW_S + 1), B], {"b": 3}, "b"),
        ("until the time it asked for", [replace(A, closed_until_s=NOW_S), LENT], {}, "a"),
        (
            "and one whose gate has been shut for long",
            [LENT, replace(LENT, name="k", blocked_since_s=90.0)],
            {},
            "lent",
        ),
        ("a worker without a seat left takes nothing", [replace(A, max_concurrency=1), B], {"a": 1}, "b"),
        ("nobody", [], {}, None),
        ("all full", [replace(A, max_concurrency=1)], {"a": 1}, None),
    ],
)
def test_every_rule_respects_refusals_and_ties(
    kind: RouterKind, story: str, workers: list[WorkerView], turns: dict[str, int], worker: str | None
) -> None:
    assert chosen(made(kind, *workers, turns=turns)) == worker, story


def test_room_is_memory() -> None:
    small, large = replace(A, kv_tokens=1000), replace(B, kv_tokens=2000)
    router = made("cost", small, large, turns={"a": 1, "b": 1})
    assert chosen(router, TurnView("", None, 900, 100)) == "b"
    assert chosen(router, TurnView("", None, 9000, 100)) is None, "nobody has room beside what runs"


@pytest.mark.parametrize("kind", ROUTER_KINDS)
def test_an_idle_worker_takes_any_length(kind: RouterKind) -> None:
    assert chosen(made(kind, A), TurnView("t", None, 999_999, 1)) == "a"


@pytest.mark.parametrize("kind", ROUTER_KINDS)
def test_the_prefix_holder_is_chosen_even_if_busier(kind: RouterKind) -> None:
    router = made(kind, A, B, turns={"b": 3})
    play(router, "t", "b", 20_000)
    assert chosen(router, TurnView("t", None, 20_100, 100)) == "b"


def test_paper_fills_dedicated_workers_to_sixteen_turns_first() -> None:
    router = made("paper", A, LENT, turns={"a": 15})
    assert chosen(router) == "a"
    router.on_placed("one more", TURN, "a", NOW_S)
    assert chosen(router, TurnView("other", None, 10, 10)) == "lent"
    router.put_worker(replace(LENT, slack_s=0.0))
    decision = router.choose(TurnView("other", None, 10, 10), NOW_S)
    assert isinstance(decision, Place) and decision.reason == "the least loaded"


def test_cost_spreads_turns_that_paper_would_pile_up() -> None:
    assert chosen(made("cost", A, LENT, turns={"a": 12})) == "lent"


def test_the_reported_last_worker_counts_only_before_a_placement() -> None:
    router = made("cost", A, B)
    assert chosen(router, TurnView("t", None, 20_000, 10, last_worker="b")) == "b"
    play(router, "t", "a", 20_000)
    assert chosen(router, TurnView("t", None, 20_010, 10, last_worker="b")) == "a"


def test_new_weights_or_a_restart_empty_the_prefix_cache() -> None:
    router = made("cost", A, B, turns={"b": 3})
    play(router, "t", "b", 20_000)
    assert chosen(router, TurnView("t", None, 20_010, 10)) == "b"
    router.put_worker(replace(B, version="2"))
    assert chosen(router, TurnView("t", None, 20_010, 10)) == "a"
    play(router, "u", "b", 20_000)
    router.remove_worker("b")
    router.put_worker(B)
    assert chosen(router, TurnView("u", None, 20_010, 10)) == "a"


def test_an_evicted_or_lost_turn_leaves_no_prefix() -> None:
    for outcome in ("evicted", "lost"):
        router = made("cost", A, B)
        router.on_placed("1", TurnView("t", None, 20_000, 100), "b", NOW_S)
        router.on_ended("1", outcome, 5, NOW_S + 1)  # type: ignore[arg-type]
        assert chosen(router, TurnView("t", None, 20_005, 95), NOW_S + 1) == "a"


def test_a_worker_often_reclaimed_is_avoided_until_that_decays() -> None:
    other = replace(LENT, name="mine")
    router = made("cost", LENT, other)
    for number in range(20):
        router.on_placed(f"{number}", TURN, "lent", NOW_S)
        router.on_ended(f"{number}", "evicted", 0, NOW_S + 1)
        router.on_finished("t", "g", 0, 0)
    busy = TurnView("", None, 3000, 100)
    router.on_placed("there", TurnView("", None, 2000, 100), "mine", NOW_S + 1)
    assert chosen(router, busy, NOW_S + 2) == "mine", "busier, but it stays"
    assert chosen(router, busy, NOW_S + 3600) == "lent", "an hour later it is like any other"


def test_calibration_corrects_a_worker_slower_than_reported() -> None:
    router = made("cost", A, B)
    for number in range(30):
        router.on_placed(f"{number}", TurnView("", None, 1000, 100), "a", NOW_S)
        router.on_ended(f"{number}", "ended", 100, NOW_S + 20)
    assert chosen(router, TurnView("", None, 1000, 100), NOW_S + 21) == "b"


def test_calibration_uses_the_arithmetic_mean() -> None:
    router = made("cost", A)
    predicted_s = router.choose(TurnView("", None, 1000, 100), 0.0).predicted_s  # type: ignore[union-attr]
    for number in range(200):
        router.on_placed(str(number), TurnView("", None, 1000, 100), "a", 100.0 * number)
        taken_s = predicted_s * (4.0 if number % 4 == 3 else 0.25)
        router.on_ended(str(number), "ended", 100, 100.0 * number + taken_s)
    assert 0.8 < float(router._table.calibration[0]) < 1.7, "the mean is 1.2, half of all turns are quicker by far"


def test_new_trajectories_wait_while_all_memory_is_promised() -> None:
    router = made("cost", replace(A, kv_tokens=10_000))
    play(router, "old", "a", 8500)
    router.on_placed("now", TurnView("", None, 100, 10), "a", NOW_S)
    decision = router.choose(TurnView("new", None, 1000, 100), NOW_S)
    assert isinstance(decision, Wait) and not decision.is_for_all and "promised" in decision.reason
    assert chosen(router, TurnView("old", None, 9000, 100)) == "a", "but the one that has its prefix there goes on"
    router.on_ended("now", "ended", 10, NOW_S)
    empty_s = NOW_S + RoutingCosts().empty_s
    assert chosen(router, TurnView("new", None, 1000, 100), empty_s - 0.1) is None
    assert chosen(router, TurnView("new", None, 1000, 100), empty_s + 0.1) == "a", "a worker does not wait for ever"
    router.on_finished("old", None, 1, 10)
    assert chosen(router, TurnView("new", None, 1000, 100)) == "a"


def test_rank_prefers_begun_then_longer_trajectories() -> None:
    router = made("cost", A)
    for number in range(40):
        long = number % 2
        router.on_finished(f"{number}", f"group {number // 4 * 2 + long}", 10, 4000 if long else 200)
    play(router, "begun", "a", 1000, "group 0")
    turns = [TurnView(name, group, 1000, 10) for name, group in (("new", "group 0"), ("long", "group 1"))]
    ranked = sorted([*turns, TurnView("begun", "group 0", 1000, 10)], key=router.rank)
    assert [turn.trajectory for turn in ranked] == ["begun", "long", "new"]
    assert {made("paper", A).rank(turn) for turn in turns} == {0.0}


def test_turns_leave_a_stall_far_longer_than_usual_if_that_costs_less() -> None:
    router = made("cost", A, LENT)
    for turn_id, prompt_tokens in (("1", 100), ("2", 60_000), ("3", 15_000)):
        router.on_placed(turn_id, TurnView(f"of {turn_id}", None, prompt_tokens, 100), "lent", 50.0)
    for number in range(6):  # who would lose while a long prompt is computed there
        router.on_placed(f"there {number}", TurnView("", None, 100, 100), "a", 50.0)
    router.put_worker(replace(LENT, blocked_since_s=NOW_S))
    assert router.migration_candidates(NOW_S + 1.9) == []
    assert [stray.turn_id for stray in router.migration_candidates(NOW_S + 2.1)] == ["1"], "a short prompt costs little"
    assert [stray.turn_id for stray in router.migration_candidates(NOW_S + 14.9)] == ["1"], "three times five seconds"
    assert [stray.turn_id for stray in router.migration_candidates(NOW_S + 15.1)] == ["1", "3"]
    assert [stray.turn_id for stray in router.migration_candidates(NOW_S + 60.0)] == ["1", "2", "3"]
    router.put_worker(replace(LENT, blocked_since_s=NOW_S, is_open=False))
    assert [stray.turn_id for stray in router.migration_candidates(NOW_S + 2.1)] == ["1"], "it reports itself closed"
    router.remove_worker("a")
    assert router.migration_candidates(NOW_S + 60) == [], "there is nowhere to go"


def test_the_usual_stall_is_learned_with_a_bounded_weight() -> None:
    router, shut = made("cost", A, LENT), replace(LENT, blocked_since_s=NOW_S)
    router.on_placed("1", TurnView("t", "g", 30_000, 100), "lent", 50.0)
    for number in range(30):
        router.put_worker(replace(LENT, blocked_since_s=float(number)))
        router.put_worker(replace(LENT, opened_s=number + 1.0))
    router.put_worker(shut)
    assert router.migration_candidates(NOW_S + 2.9) == []
    assert [stray.turn_id for stray in router.migration_candidates(NOW_S + 3.5)] == ["1"]
    router.put_worker(replace(LENT, opened_s=NOW_S + 1000))
    router.put_worker(replace(LENT, blocked_since_s=NOW_S + 1000, opened_s=NOW_S + 1000))
    assert router.migration_candidates(NOW_S + 1008) == []
    assert [stray.turn_id for stray in router.migration_candidates(NOW_S + 1009)] == ["1"]


def test_closing_by_the_owner_is_not_learned_as_a_stall() -> None:
    router = made("cost", A, LENT, turns={"a": 6})
    router.on_placed("1", TurnView("t", None, 15_000, 100), "lent", 0.0)
    for began_s in range(0, 180, 30):
        router.put_worker(replace(LENT, blocked_since_s=began_s + 1.0))  # by serving; then its owner holds it back
        router.put_worker(replace(LENT, blocked_since_s=began_s + 1.0, is_open=False))
        router.put_worker(replace(LENT, opened_s=began_s + 29.0))
    router.put_worker(replace(LENT, blocked_since_s=200.0))
    assert router.migration_candidates(214.9) == []
    assert [stray.turn_id for stray in router.migration_candidates(215.1)] == ["1"], "three times five seconds, as ever"


def test_by_paper_turns_leave_a_blocked_worker_after_two_seconds() -> None:
    router = made("paper", A, LENT)
    router.on_placed("1", TurnView("long", None, 40_000, 100), "lent", 50.0)
    router.put_worker(replace(LENT, blocked_since_s=NOW_S))
    assert router.migration_candidates(NOW_S + 1.9) == []
    assert [stray.turn_id for stray in router.migration_candidates(NOW_S + 2.1)] == ["1"]


def test_a_trajectory_waits_for_a_blocked_holder_unless_that_costs_more() -> None:
    router = made("cost", A, LENT)
    play(router, "t", "lent", 40_000)
    router.put_worker(replace(LENT, blocked_since_s=NOW_S))
    at_home, elsewhere = TurnView("t", None, 40_000, 100), TurnView("u", None, 40_000, 100)
    assert chosen(router, at_home, NOW_S + 3) == "lent"
    assert chosen(router, elsewhere, NOW_S + 3) == "a"
    assert chosen(router, at_home, NOW_S + 30) == "a"
    router.put_worker(replace(LENT, is_open=False, blocked_since_s=NOW_S))
    assert chosen(router, at_home, NOW_S + 3) == "a"


def test_turns_of_a_removed_worker_do_not_count_for_its_successor() -> None:
    router = made("cost", A)
    router.on_placed("1", TURN, "a", NOW_S)
    router.remove_worker("a")
    router.put_worker(replace(A, max_concurrency=1))
    router.on_ended("1", "lost", 0, NOW_S)
    assert chosen(router) == "a"
    router.on_placed("2", TURN, "a", NOW_S)
    assert chosen(router, TurnView("u", None, 10, 10)) is None


def test_one_refusal_stands_for_larger_turns_until_the_next_event() -> None:
    small = replace(A, kv_tokens=10_000)
    router = made("cost", small, turns={"a": 1})
    for number in range(8):
        play(router, f"here {number}", "a", 1100)
    refused = router.choose(TurnView("t", None, 1000, 100), NOW_S)
    assert isinstance(refused, Wait) and "promised" in refused.reason and not refused.is_for_all
    for turn, is_promised in (
        (TurnView("u", None, 2000, 100), True),
        (TurnView("", None, 1000, 100), False),  # alone: promises are for trajectories
        (TurnView("here 3", None, 1200, 100), False),
        (TurnView("v", None, 20_000, 100), False),  # has no room anywhere
        (TurnView("w", None, 500, 100), True),
    ):
        again = router.choose(turn, NOW_S)
        assert (again == refused) is is_promised
        assert again == made_like(router).choose(turn, NOW_S), "as if nothing had been asked before"
    router.on_finished("here 0", None, 1, 10)
    assert chosen(router, TurnView("t", None, 200, 100)) == "a"


def made_like(router: Router) -> Router:
    """The same router, that has not been asked anything."""
    found = copy.deepcopy(router)
    found._forget_choices()
    return found


@pytest.mark.parametrize(
    "workers, words", [([], "no worker has joined"), ([replace(A, is_open=False)], "takes turns"), ([A], "full")]
)
def test_waiting_gives_the_reason(workers: list[WorkerView], words: str) -> None:
    turns = {"a": A.max_concurrency} if words == "full" else {}
    decision = made("cost", *workers, turns=turns).choose(TURN, NOW_S)
    assert isinstance(decision, Wait) and words in decision.reason


@pytest.mark.parametrize("name", ["quick", "least", "sticky"])
def test_an_unknown_or_removed_router_is_refused_with_the_names_that_exist(name: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        Router(name)  # type: ignore[arg-type]
    assert "use cost, paper" in str(caught.value)


def demanding(turn: TurnView = TURN, **demand: Any) -> TurnView:
    return replace(turn, demand=VersionDemand(**demand))


@pytest.mark.parametrize("kind", ROUTER_KINDS)
def test_a_demand_is_met_by_a_worker_with_these_weights_only(kind: RouterKind) -> None:
    old, new = replace(A, version="1", version_number=1), replace(B, version="2", version_number=2)
    router = made(kind, old, new)
    assert chosen(router) == "a"
    assert chosen(router, demanding(version="1")) == "a"
    assert chosen(router, demanding(version="2")) == chosen(router, demanding(number_min=2)) == "b"
    assert router.choose(demanding(version="3"), NOW_S) is NO_VERSION
    assert router.choose(demanding(number_min=3), NOW_S) is NO_VERSION


@pytest.mark.parametrize("kind", ROUTER_KINDS)
def test_a_prefix_under_other_weights_is_no_reason_to_stay(kind: RouterKind) -> None:
    router = made(kind, replace(A, version="1", version_number=1), replace(B, version="2", version_number=2))
    play(router, "t", "a", 1000, "g")
    assert (chosen(router), chosen(router, demanding(version="2"))) == ("a", "b")


@pytest.mark.parametrize("kind", ROUTER_KINDS)
@pytest.mark.parametrize("change", [{"is_open": False}, {"max_concurrency": 1}])
def test_a_demand_that_waits_holds_back_no_other_turn(kind: RouterKind, change: dict[str, Any]) -> None:
    old = replace(A, version="1", version_number=1, **change)
    router = made(kind, old, replace(B, version="2", version_number=2), turns={"a": 1})
    decision = router.choose(demanding(version="1"), NOW_S)
    assert isinstance(decision, Wait) and not decision.is_for_all
    assert chosen(router) == "b"
