"""From the lines of a run to its figures."""

from __future__ import annotations

import pytest
from tests.unit.launch_lines import run_lines, served, step

from rose.cost.settings import CostSettings
from rose.launch.figures import attainment, compared, geometric_interval, ideal_ratio, percentile, summary_of, within


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


def test_the_ideal():
    assert ideal_ratio(0.0, 0.8, 1.0) == 1.0
    assert ideal_ratio(1.0, 1.0, 1.0) == 2.0
    assert ideal_ratio(0.7, 0.8, 1.0) == pytest.approx(1 / (0.3 + 0.7 / 1.8))


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
    rows = [served(Moment(3.0 * number + 1.0)) for number in range(1000)]
    assert len(within(rows, steps)) == 1000
    assert Moment.compared < 20 * len(rows)


def test_percentiles_are_values_that_were_seen():
    assert percentile([3.0, None, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0], 99) == 1.0
    assert percentile([None], 99) is None
