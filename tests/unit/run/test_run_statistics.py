"""Statistics of a run, against records made by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.unit.launch_lines import (
    allocation_of,
    attainment,
    compared,
    records,
    requests,
    run_lines,
    served,
    step,
    summary_of,
    within,
)

from rose.core.provision import Cycle, allocation_overhead_s
from rose.cost.bill import CostSettings
from rose.run import run_statistics
from rose.run.run_records import AskedRecord
from rose.run.run_statistics import count_from_asking, geometric_interval, percentile


def test_a_whole_run():
    found = summary_of(run_lines(), [served(100 + second / 2) for second in range(80)])
    assert (found["success_before"], found["success_after"]) == (0.09, 0.6)
    assert (found["lost"], found["doubled"], found["restarts"]) == (0, 0, 1)
    assert found["turns_by_pool"] == {"dedicated": 1600, "borrowed": 800}
    assert found["rollout_share"] == pytest.approx(4 / 5.1, abs=1e-4), "of the steps without the device"
    assert found["idle_share"] == pytest.approx(1 - 0.62 / 5.1, abs=1e-3)
    assert found["cpu_s_by_role"] == {"agent_borrowed": 1.0, "gateway": 2.0, "trainer": 8.0}
    assert found["control_cpu_ms_per_turn"] == pytest.approx(3000 / 2400)
    assert found["serving_attainment"] == found["serving_attainment_alone"] == 1.0
    assert 0 < found["serving_requests_lent"] < found["serving_requests"] == 80


def test_a_comparison_is_by_pairs_of_neighbours():
    found = summary_of(run_lines(), [])
    assert found["rollout_speedup"] == 2.0
    assert found["throughput_ratio"] == pytest.approx(5.1 / 3.1, abs=1e-3)
    assert found["throughput_ratio_low"] <= found["throughput_ratio"] <= found["throughput_ratio_high"]


def test_time_counts_per_token():
    steps = [step(1, 0.0), step(2, 9.0, is_borrowed=False, rollout_s=4.0, generated_tokens=2400)]
    assert compared(steps)["rollout_speedup"] == 1.0


def test_where_rollouts_never_stop_time_counts_per_token_of_the_pool():
    lines = [step(1, 0.0, pool_tokens=3600), step(2, 9.0, is_borrowed=False, rollout_s=4.0, pool_tokens=2400)]
    assert compared([line | {"in_step": {}} for line in lines])["rollout_speedup"] == 3.0, (
        "a trajectory may end in another step than it was played in"
    )
    assert compared(lines)["rollout_speedup"] == 2.0, "elsewhere surplus that was thrown away counts for nothing"


def test_a_run_has_a_cost_of_a_correct_answer():
    late = [served(103.0, ttft_ms=900.0), served(103.5), served(110.0)]
    prices = CostSettings(breach_usd=1.0, dedicated_usd_per_hour=3600.0)
    found = summary_of(run_lines(), late, prices, headroom_share=0.2)
    bill, correct = found["cost"]["bill"], sum(16 + number for number in (1, 4, 5, 8))
    assert bill["slo_risk"] == 1.0 and bill["headroom"] > 0
    assert bill["dedicated_rollouts"] == pytest.approx(8.0), "four steps with the device, two seconds each"
    assert found["cost_per_correct"] == pytest.approx(found["cost"]["total_usd"] / correct)
    assert found["cost_per_correct_fixed"] == pytest.approx(4 * 5.1 / correct)
    assert found["cost"]["is_consistent"] is True


def test_the_device_knows_its_breaches_best():
    lines = [*run_lines(), {"kind": "lending", "breaches": {"step": 9, "ttft": 2, "tpot": 1}}]
    found = summary_of(lines, [served(103.0, ttft_ms=900.0)], CostSettings(breach_usd=1.0))
    assert found["cost"]["bill"]["slo_risk"] == 3.0


def test_how_a_run_learnt():
    lines = [step(1, 0.0, logprob_gap_mean=0.01, staleness_max=1), step(2, 5.0, logprob_gap_mean=0.03, staleness_max=3)]
    found = summary_of(lines, [])
    assert (found["logprob_gap_mean"], found["staleness_max"], found["weight_sync_s"]) == (0.02, 3, 0.1)


def test_how_many_actions_were_not_understood():
    assert summary_of([step(1, 0.0, invalid_turns=30), step(2, 5.0, invalid_turns=0)], [])["invalid_share"] == 0.05
    assert summary_of([step(1, 0.0)], [])["invalid_share"] is None, "an older run did not write it"


def test_the_time_to_sync_weights_includes_the_workers():
    lines = [step(1, 0.0), step(2, 5.0, verdict="starved"), step(3, 10.0)]
    assert summary_of(lines, [])["weight_sync_s"] == 0.1, "a synchronous run waits itself"
    lines += [{"kind": "sync", "step": number, "took_s": took_s} for number, took_s in ((1, 0.2), (2, 9.0), (3, 0.4))]
    assert summary_of(lines, [])["weight_sync_s"] == pytest.approx(0.4)


def test_the_pause_is_told_by_steps_or_behind_them():
    lines = [step(1, 0.0, pause_s=0.001), step(2, 5.0, pause_s=None)]
    assert summary_of(lines, [])["pause_s"] == 0.001 and summary_of(lines[1:], [])["pause_s"] is None
    lines.append({"kind": "sync", "step": 2, "took_s": 0.1, "pause_s": 0.003})
    assert summary_of(lines, [])["pause_s"] == pytest.approx(0.002)


def test_the_cost_of_coming_and_going_is_in_the_summary():
    moments = {"wanted_s": 103.0, "chosen_s": 103.0, "usable_s": 103.5, "returned_s": 106.0, "released_s": 106.0}
    lines = [*run_lines(2, compare=False), {"kind": "allocation", "number": 1, "name": "a", **moments}]
    found = summary_of(lines, [])
    assert found["borrow_cycles"] == 1 and found["allocation_overhead_share"] == pytest.approx(0.5 / 6.2)
    assert summary_of(run_lines(), [])["allocation_overhead_share"] is None


def test_without_both_kinds_of_steps_there_is_no_ratio():
    assert summary_of(run_lines(compare=False), [])["throughput_ratio"] is None


def test_a_run_that_was_stopped_at_once_has_figures_too():
    found = summary_of([], [])
    assert (found["steps"], found["success_before"], found["control_cpu_ms_per_turn"]) == (0, None, None)


def test_few_pairs_have_no_interval():
    assert geometric_interval([1.2, 1.4])[1:] == (None, None)
    middle, low, high = geometric_interval([1.2, 1.3, 1.4, 1.5])
    assert low is not None and high is not None and 1.2 <= low <= middle <= high <= 1.5


def test_serving_is_judged_by_its_arrival():
    rows = [served(100.5), served(101.5, ttft_ms=900), served(105.0)]
    assert attainment(within(rows, [step(1, 100.0)])) == 0.5
    assert attainment([]) is None


def test_requests_within_steps_in_whatever_order_and_over_each_other():
    """A run that was resumed may have steps of another clock."""
    steps = [step(3, 200.0), step(1, 100.0, rollout_s=50.0), step(2, 110.0)]
    moments = [99.9, 100.0, 111.0, 140.0, 150.0, 150.1, 199.9, 202.0, 203.0]
    found = within([served(moment) for moment in moments], steps)
    assert [row["at_s"] for row in found] == [100.0, 111.0, 140.0, 150.0, 202.0]
    assert within([served(1.0)], []) == []


class Moment(float):
    """Counts how often it is compared."""

    compared = 0

    def __le__(self, other):
        Moment.compared += 1
        return float(self) <= other

    def __lt__(self, other):
        Moment.compared += 1
        return float(self) < other

    def __ge__(self, other):
        Moment.compared += 1
        return float(self) >= other


def test_a_week_of_requests_is_not_held_against_every_step():
    steps = [step(number, 3.0 * number) for number in range(1000)]
    [request] = requests([served(0.0)])
    rows = [msgspec.structs.replace(request, at_s=Moment(3.0 * number + 1.0)) for number in range(1000)]
    assert len(run_statistics.within(rows, records(steps))) == 1000
    assert Moment.compared < 20 * len(rows)


def test_percentiles_are_values_that_were_seen():
    assert percentile([3.0, None, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0], 99) == 1.0
    assert percentile([None], 99) is None


def test_of_a_run_by_the_newest_record_of_every_cycle() -> None:
    def line(**changes: Any) -> dict[str, Any]:
        return {"kind": "allocation", "number": 7, "name": "a", "wanted_s": 20.0, "chosen_s": 20.0} | changes

    steps = [step(1, 10.0, step_s=5.0), step(2, 100.0, step_s=10.0)]
    sample = {"kind": "sample", "at_s": 3.0, "turns": {}}
    lines = [*steps, line(), line(activated_s=21.0, synced_s=22.0, usable_s=22.0), sample]
    assert allocation_of(lines) == {"allocation_overhead_share": pytest.approx(0.02), "borrow_cycles": 0}
    assert allocation_of(lines[2:]) == {"allocation_overhead_share": None, "borrow_cycles": 0}, "without a step"
    assert allocation_of(steps)["allocation_overhead_share"] is None, "nothing was borrowed"


def test_time_counts_from_asking_the_owner_not_from_when_the_gateway_hears() -> None:
    cycles = [
        Cycle(1, "a", 1.0, 1.0, "", 1.0, 1.0, 1.0, 10.2, 10.2),
        Cycle(2, "a", 20.3, 20.3, "", 20.4, 20.4, 20.4, 30.1, 30.2),
        Cycle(3, "a", 50.0, 50.0, "", 50.0, 50.0, 50.0),
    ]
    asked = [
        {"at_s": 10.0, "is_lent": False},
        {"at_s": 20.0, "is_lent": True},
        {"at_s": 30.0, "is_lent": False},
        {"at_s": 40.0, "is_lent": True},
        {"at_s": 41.0, "is_lent": False},  # before it had heard of the last: no cycle came of it
        {"at_s": 49.9, "is_lent": True},
    ]
    count_from_asking(cycles, [AskedRecord(**one) for one in asked])
    assert [(cycle.wanted_s, cycle.returned_s) for cycle in cycles] == [(1.0, 10.0), (20.0, 30.0), (49.9, None)]
    assert allocation_overhead_s(cycles, 0.0, 100.0) == pytest.approx(0.2 + 0.4 + 0.2 + 0.1)


def test_a_run_counts_what_it_asked() -> None:
    lines: list[dict[str, Any]] = [
        step(1, 0.0, step_s=100.0),
        {"kind": "asked", "at_s": 20.0, "is_lent": True},
        {"kind": "allocation", "number": 1, "name": "a", "wanted_s": 20.5, "chosen_s": 20.5, "usable_s": 21.0},
    ]
    assert allocation_of(lines)["allocation_overhead_share"] == pytest.approx(0.01)


def test_a_device_is_back_when_its_owner_says_so_too() -> None:
    cycles = [Cycle(1, "a", 1.0, 1.0, "", 1.0, 1.0, 1.0, 10.1, 10.1)]
    count_from_asking(cycles, [AskedRecord(at_s=10.0, is_lent=False, answered_s=10.4)])
    assert (cycles[0].returned_s, cycles[0].released_s) == (10.0, 10.4)


def test_only_what_was_given_back_in_time_is_a_cycle() -> None:
    def line(number: int, **changes: Any) -> dict[str, Any]:
        known = {"kind": "allocation", "number": number, "name": "a", "wanted_s": 1.0, "chosen_s": 1.0, "usable_s": 1.0}
        return known | changes

    steps = [{"kind": "step", "began_s": 0.0, "step_s": 100.0}]
    back, late = line(1, returned_s=9.0, released_s=9.5), line(2, returned_s=101.0, released_s=102.0)
    early = line(0, wanted_s=-9.0, chosen_s=-9.0, usable_s=-9.0, returned_s=-5.0, released_s=-4.5)
    found = allocation_of([*steps, early, back, late, line(3)])
    assert found == {"allocation_overhead_share": pytest.approx(0.005), "borrow_cycles": 1}


def test_each_attempt_of_a_run_has_its_own_clock_and_its_own_numbers() -> None:
    def attempt(began_s: float) -> list[dict[str, Any]]:
        moments = {"wanted_s": began_s + 1, "chosen_s": began_s + 1, "usable_s": began_s + 2}
        back = {"returned_s": began_s + 20, "released_s": began_s + 21}
        cycle = {"kind": "allocation", "number": 1, "name": "a", **moments, **back}
        return [{"kind": "step", "began_s": began_s, "step_s": 50.0}, cycle]

    found = allocation_of([*attempt(1000.0), {"kind": "resume", "step": 1}, *attempt(3.0)])
    assert found == {"allocation_overhead_share": pytest.approx(0.04), "borrow_cycles": 2}
