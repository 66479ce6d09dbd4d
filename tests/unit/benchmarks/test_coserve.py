"""The parts of the co-serving benchmark that only calculate: who takes part where, loads, figures, bars, resuming."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.load.driver import Record, RequestOutcome
from rose.load.load_report import LatencyBudget
from rose.load.traces import made_trace

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from coserving import bars, calibrate, devices, figures, options, plan, rollouts, running, sending, store, traffic
from coserving.figures import Findings, Place
from coserving.pairing import PairedDifference
from coserving.plan import Piece, Segment
from coserving.processes import DEVICE_CORE, Cores, CoreWatch, Shares
from coserving.store import Measured, Row, Store

SEGMENTS = [Segment(0, 0, 10), Segment(1, 10, 20)]


# Options


@pytest.mark.parametrize("text", ["busy:0.2", "capacity:0.2", "alone99"])
def test_a_load_reads_back(text):
    assert str(options.load_of(text)) == text


@pytest.mark.parametrize("text", ["", "busy", "busy:", "busy:1.5", "busy:x", "capacity:-1", "alone:99", "alone99:1"])
def test_what_is_no_load_is_said(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a load"):
        options.load_of(text)


def asked(tmp_path, *more):
    trace = tmp_path / "azure2023_conv.csv.gz"
    trace.write_bytes(b"rows")
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options.add_options(parser)
    return parser.parse_args(["--trace", str(trace), *more])


def test_modes_keep_their_order_and_the_worst_case_has_its_own(tmp_path):
    assert options.modes_of(asked(tmp_path, "--modes", "paper", "alone_1")) == ("alone_1", "paper")
    assert options.modes_of(asked(tmp_path)) == plan.MODES
    assert options.modes_of(asked(tmp_path, "--worst-case")) == plan.WORST_MODES


def test_a_folder_is_named_after_what_is_in_it(tmp_path):
    assert options.name_of(asked(tmp_path)) == "azure2023_conv-busy0.2-given-qwen3-3m"


# Plan


@given(st.integers(1, 5000), st.floats(0.1, 50))
def test_segments_cover_every_request_once(requests, rate_rps):
    segments = plan.segments_of(requests, rate_rps)
    assert [place for one in segments for place in range(one.begin, one.end)] == list(range(requests))
    assert len(segments) >= min(requests, plan.SEGMENTS_MIN)
    assert min(one.requests for one in segments) >= 1


@given(st.integers(1, 3000), st.integers(10, 3000), st.floats(0.5, 20))
def test_a_mode_sees_as_many_requests_as_wanted_or_all(wanted, requests, rate_rps):
    segments = plan.segments_of(requests, rate_rps)
    chosen = plan.taking_part(wanted, segments)
    assert len(set(chosen)) == len(chosen)
    seen = sum(segments[number].requests for number in chosen)
    assert seen >= min(wanted, requests) - len(chosen)  # sizes differ by one at most


def test_everybody_goes_first_in_turn():
    modes = ["a", "b", "c"]
    assert [plan.rotated(modes, number)[0] for number in range(4)] == ["a", "b", "c", "a"]
    assert all(sorted(plan.rotated(modes, number)) == modes for number in range(4))


def test_rollouts_alone_are_measured_in_every_segment():
    segments = plan.segments_of(1000, 5.0)
    pieces = plan.pieces_of(segments, {"alone_1": 1000, "paper": 100, "rollouts_alone": 300})
    by_mode = {mode: sum(piece.mode == mode for piece in pieces) for mode in ("alone_1", "paper", "rollouts_alone")}
    assert by_mode["rollouts_alone"] == by_mode["alone_1"] == len(segments) > by_mode["paper"] >= 1


@pytest.mark.parametrize(
    "trace, load, mode, requests, wanted",
    [
        ("azure2023_conv", "capacity:0.2", "decode", None, 2500),
        ("azure2023_conv", "capacity:0.2", "idle", None, 1000),
        ("azure2023_conv", "busy:0.2", "alone_2", None, 1000),
        ("azure2023_code", "alone99", "fcfs", None, 300),
        ("azure2023_code", "alone99", "fcfs", 50, 50),
        ("azure2023_code", "alone99", "decode", 5000, 5000),
    ],
)
def test_how_many_requests_a_mode_gets(trace, load, mode, requests, wanted):
    assert plan.requests_wanted(trace, load, mode, requests) == wanted


def test_what_does_not_fit_into_the_time_is_cut_for_all():
    wanted = {mode: plan.requests_wanted("t", "busy:0.2", mode) for mode in plan.MODES}
    assert plan.requests_in_time(wanted, 5.0, 5400.0) == 1.0
    assert 0.0 < plan.requests_in_time(wanted, 0.5, 5400.0) < 0.5
    assert plan.requests_in_time(wanted, 0.5, 1.0) == 0.0


# Traffic


def conversation(count=400):
    chance = np.random.default_rng(1)
    lengths = chance.integers(10, 5000, count), chance.integers(1, 700, count)
    return made_trace("t", np.cumsum(chance.exponential(0.2, count)), *lengths)


def test_the_p99_prompt_is_a_quarter_of_the_context():
    trace = traffic.scaled(conversation(), 4096)
    assert abs(np.percentile(trace.prompt_tokens, 99) - 1024) < 30
    assert (trace.prompt_tokens + trace.output_tokens).max() <= 4096


def test_a_rate_is_the_mean_over_what_is_sent():
    trace = traffic.at_rate(traffic.cut(conversation(), 100, 200), 7.0)
    assert len(trace) == 100 and trace.arrival_s[0] == 0
    assert trace.arrival_s[-1] == pytest.approx(100 / 7.0)


def test_a_sample_has_the_same_mix_and_comes_at_once():
    trace = traffic.sample(conversation(), 50)
    assert len(trace) == 50 and not trace.arrival_s.any()
    assert trace.prompt_tokens.mean() == pytest.approx(conversation().prompt_tokens.mean(), rel=0.3)


def test_a_slice_can_have_the_mix_of_all():
    whole = conversation()
    few = traffic.with_mix(traffic.cut(whole, 0, 50), whole)
    assert few.arrival_s.tolist() == traffic.cut(whole, 0, 50).arrival_s.tolist()
    assert sorted(few.prompt_tokens) == sorted(traffic.sample(whole, 50).prompt_tokens)


def test_the_worst_case_is_near_capacity_and_the_same_for_a_seed():
    first, again, other = (traffic.worst_case(conversation(), 20.0, seed) for seed in (3, 3, 4))
    assert first.arrival_s.tolist() == again.arrival_s.tolist() != other.arrival_s.tolist()
    assert 0.95 - 0.05 < len(first) / (20.0 * traffic.WORST_S) < 1.10 + 0.05
    assert first.arrival_s[-1] < traffic.WORST_S


# Calibration


def test_a_steady_rate_is_that_of_the_middle():
    ends = [*np.linspace(5, 6, 26), *np.linspace(6, 16, 51)[1:], *np.linspace(16, 40, 25)[1:]]
    assert calibrate.steady_rate(ends) == pytest.approx(5.0, rel=0.05)


@given(st.floats(0.02, 0.9), st.floats(0.1, 10))
def test_the_next_rate_is_exact_where_requests_do_not_share_steps(service, rate_rps):
    busy = 1 - math.exp(-rate_rps * service)
    found = calibrate.next_rate(rate_rps, busy, 0.2)
    exact = -math.log(0.8) / service
    assert found == pytest.approx(exact, rel=0.01) or exact / rate_rps > 3.9 or exact / rate_rps < 0.3


def test_the_search_ends_where_attainment_falls_to_the_target():
    found = calibrate.searched(lambda rate: 1.0 - 0.005 * rate, 0.1, 20.0, 4, 0.99)
    assert found == pytest.approx(2.0, rel=0.15)
    assert calibrate.searched(lambda rate: 0.5, 0.1, 20.0, 5, 0.99) == 0.1
    assert 10 < calibrate.searched(lambda rate: 1.0, 0.1, 20.0, 5, 0.99) < 20.0


def test_calibration_finds_the_load_of_a_device_it_can_reckon_with():
    """A device of which one request takes 50 ms, and which saturates at 25 a second."""

    def alone(trace, seed):
        is_burst = not trace.arrival_s.any()
        ends = np.arange(1, len(trace) + 1) / 25 if is_burst else trace.arrival_s + 0.05
        rows = [row(index, at_s, [end - 0.02, end]) for index, (at_s, end) in enumerate(zip(trace.arrival_s, ends))]
        wall_s = float(ends.max())
        busy_s = wall_s * (1 - math.exp(-0.05 * len(trace) / wall_s))
        return calibrate.Trial(wall_s, busy_s, rows)

    said = []
    calibrator = calibrate.Calibrator(alone, conversation(), calibrate.Effort(), 0, said.append)
    found = calibrator.run(options.Load("busy", 0.2), "calibrated")
    assert found.capacity_rps == pytest.approx(25.0, rel=0.01)
    assert found.rate_rps == pytest.approx(-math.log(0.8) / 0.05, rel=0.1)
    assert found.ttft_ms == pytest.approx(60.0, rel=0.01) and found.tpot_ms == pytest.approx(40.0, rel=0.01)
    assert calibrator.rate(options.Load("capacity", 0.2), 25.0) == 5.0
    assert 0.5 * 25 < calibrator.rate(options.Load("alone99"), 25.0) < 25  # it never misses
    assert said and len(said) == len(found.tried)
    known = calibrate.Calibrator(alone, conversation(), calibrate.Effort(), 0, said.append)
    found = known.run(options.Load("alone99"), "given", rate_rps=3.0)
    assert found.rate_rps == 3.0 and {tried["what"] for tried in found.tried} == {"saturated"}, "nothing is searched"


# Store


def row(index, scheduled_s, token_s, outcome="done"):
    ended_s = token_s[-1] if token_s else scheduled_s + 1
    return Row(index, scheduled_s, 10, len(token_s), scheduled_s, ended_s, outcome, "", 0, False, list(token_s))


def test_a_record_survives_the_file_and_moves_to_its_place():
    record = Record(3, 1.5, 10, 2, 1.6, 2.0, outcome=RequestOutcome.DONE)
    record.saw(1, 1.75)
    record.saw(1, 2.0)
    back = sending.record_of(sending.row_of(record), offset_s=100.0, first_index=20)
    assert (back.index, back.scheduled_s, list(back.token_s)) == (23, 101.5, [101.75, 102.0])
    assert back.outcome is RequestOutcome.DONE and back.ended_s == 102.0


def test_what_was_measured_is_found_again(tmp_path):
    mark, piece = {"load": "busy:0.2", "seed": 0}, Piece(SEGMENTS[0], "decode")
    first = Store.open(tmp_path / "run", mark)
    assert not first.has(piece)
    first.write(piece, Measured(wall_s=12.0, rows=[row(0, 0.5, [0.6, 0.7])], rollout_tokens=600.0))
    first.keep("segments", SEGMENTS)
    again = Store.open(tmp_path / "run", mark)
    assert again.has(piece) and not again.has(Piece(SEGMENTS[1], "decode"))
    assert again.read(piece).rollout_tok_s == 50.0
    assert again.kept("segments", list[Segment]) == SEGMENTS
    assert again.kept("calibration", calibrate.Calibration) is None


def test_a_folder_of_another_run_is_refused(tmp_path):
    Store.open(tmp_path, {"load": "busy:0.2", "seed": 0})
    with pytest.raises(ConfigError, match="seed"):
        Store.open(tmp_path, {"load": "busy:0.2", "seed": 1})


# Figures


def measured(waits_s, *, tokens=None, step_s=2.0, wall_s=10.0, breaches=0.0):
    """One request a second, whose first token comes after its wait and whose second 10 ms later."""
    rows = [row(index, float(index), [index + wait_s, index + wait_s + 0.01]) for index, wait_s in enumerate(waits_s)]
    return Measured(wall_s, rows, step_s, step_s, breaches, tokens)


def findings(offset_s=70.0, **modes):
    places = [Place(0.0, 0), Place(offset_s, 10)]
    return Findings({mode: dict(enumerate(pieces)) for mode, pieces in modes.items()}, places, LatencyBudget(0.5, 0.15))


GOOD = [0.1] * 10
BAD = [0.1] * 8 + [0.9] * 2


def full(decode=GOOD, paper=BAD, alone=GOOD):
    return findings(
        alone_1=[measured(alone)] * 2,
        alone_2=[measured(alone)] * 2,
        decode=[measured(decode, tokens=7600.0, step_s=0.5), measured(decode, tokens=8000.0, step_s=0.5)],
        idle=[measured(GOOD, tokens=7000.0)] * 2,
        paper=[measured(paper, tokens=8000.0)],
        rollouts_alone=[Measured(5.0, rollout_tokens=4000.0)] * 2,
    )


def test_a_row_says_its_percentile_and_why_something_is_missing():
    found = figures.row_of(full(), "decode")
    assert found["requests"] == 20 and found["percentile"] == 95 and "P95" in found["reasons"]["percentile"]
    assert found["ttft_p99_ms"] == 100.0 and found["budget_used_ttft"] == 0.2 and found["attainment"] == 1.0
    assert found["rollout_tok_s"] == 780.0 and found["serving_time_share"] == 0.05 and found["breaches"] == 0.0
    alone, dedicated = figures.row_of(full(), "alone_1"), figures.row_of(full(), "rollouts_alone")
    assert alone["rollout_tok_s"] is None and alone["reasons"]["rollout_tok_s"]
    assert dedicated["ttft_p99_ms"] is None and dedicated["reasons"]["ttft_p99_ms"]
    assert dedicated["rollout_tok_s"] == 800.0 and dedicated["serving_time_share"] is None


def test_overall_figures_are_taken_segment_by_segment():
    found = figures.overall_of(full(), 5.0, 25.0)
    assert found["busy_share"] == 0.2 and found["capacity_share"] == 0.2
    assert (found["harvest_share_low"], found["harvest_share"], found["harvest_share_high"]) == (0.95, 0.975, 1.0)
    assert found["no_waste_low"] == 1.0
    assert found["lending_gain"] == pytest.approx(7800 / 7000, abs=0.001)
    assert found["aa_spread"] == 0.0 and found["reasons"] == {} and not found["is_void"]


def test_what_needs_a_mode_that_was_not_run_is_null_with_a_reason():
    found = figures.overall_of(findings(alone_1=[measured(GOOD)]), 5.0, 25.0)
    missing = ("aa_spread", "harvest_share", "no_waste", "lending_gain")
    assert all(found[key] is None and found["reasons"][key] for key in missing)


def test_somebody_else_on_the_core_is_noticed():
    piece, other = measured(GOOD), measured(GOOD, wall_s=30.0)
    piece.cores, other.cores = Shares(0.9, 0.2, 0.4), Shares(0.5, 0.2, 0.0)
    assert figures.row_of(findings(alone_1=[piece, other]), "alone_1")["foreign_share"] == 0.1
    assert figures.row_of(findings(alone_1=[piece, measured(GOOD)]), "alone_1")["foreign_share"] is None


def test_a_difference_is_over_the_requests_both_have():
    lost = bars.losses(full(), ["decode", "paper", "fcfs"])
    assert (lost["decode"].mean, lost["paper"].mean) == (0.0, pytest.approx(-0.2))
    assert lost["fcfs"] is None


def test_the_harvest_of_a_segment_ends_where_the_next_begins():
    """Long answers keep a segment going after its last request; its tokens must not come twice at one time."""
    piece = measured(GOOD, tokens=1000.0, wall_s=90.0)
    piece.rollout_at_s, piece.rollout_total = [0.0, 30.0, 60.0, 90.0], [0.0, 30.0, 60.0, 90.0]
    harvest = findings(decode=[piece, piece]).harvest("decode")
    assert harvest.at_s == [0.0, 30.0, 60.0, 70.0, 100.0, 130.0, 160.0]
    assert harvest.tokens == [0.0, 30.0, 60.0, 60.0, 90.0, 120.0, 150.0]


def test_the_harvest_of_the_run_leaves_warm_ups_out():
    piece = measured(GOOD)
    piece.rollout_at_s, piece.rollout_total = [-2.0, 0.0, 5.0, 10.0, 11.0], [0.0, 100.0, 600.0, 1100.0, 1200.0]
    harvest = findings(decode=[piece, piece]).harvest("decode")
    assert harvest.at_s == [0.0, 5.0, 10.0, 70.0, 75.0, 80.0]
    assert harvest.tokens == [0.0, 500.0, 1000.0, 1000.0, 1500.0, 2000.0]


# Bars


def judged(found, load="busy:0.2", budget="given", **more):
    rows = {mode: figures.row_of(found, mode) for mode in found.modes}
    overall = figures.overall_of(found, 5.0, 25.0)
    lost = bars.losses(found, ["decode", "paper"])
    return bars.bars_of(rows, overall, lost, load=load, budget=budget, **more)


def test_all_bars_are_reached_where_decode_is_like_alone_and_paper_is_not():
    found = judged(full())
    assert [bar["what"] for bar in found if not bar["ok"]] == []
    assert any("lending_gain" in bar["what"] for bar in found)
    assert any("harvest_share" in bar["what"] for bar in judged(full(), "capacity:0.2"))


def test_a_decode_that_loses_is_seen():
    missed = [bar["what"] for bar in judged(full(decode=BAD)) if not bar["ok"]]
    assert any(what.startswith("decode: attainment") for what in missed)
    assert any("budget_used_ttft" in what for what in missed)
    assert any(what.startswith("worst of") for what in missed)


def test_a_simple_way_that_does_not_lose_misses_its_bar():
    assert [bar["mode"] for bar in judged(full(paper=GOOD)) if not bar["ok"]] == ["paper"]


def test_budgets_that_serving_alone_uses_up_are_not_held_against_lending():
    slow = [0.45] * 10
    used = [bar for bar in judged(full(alone=slow, decode=slow)) if "budget_used_ttft" in bar["what"]]
    assert used[0]["ok"] and "does not apply" in used[0]["reason"]


def test_only_attainment_counts_at_calibrated_budgets():
    assert len(judged(full(), budget="calibrated")) == 2


@pytest.mark.parametrize(
    "late, ambiguous, points, ok",
    [(0, 0, 0.0, True), (1, 0, 5.0, False), (0, 1, 5.0, False), (None, 0, None, False), (0, None, None, False)],
)
def test_in_the_worst_case_the_devices_own_ledger_counts_too(late, ambiguous, points, ok):
    found = full()
    first, second = found.modes["decode"].values()
    first.late_requests, second.late_requests, first.ambiguous, second.ambiguous = late, 0, 0, ambiguous
    attainment, void, ledger = judged(found, is_worst_case=True)
    assert attainment["ok"] and void["ok"] and (ledger["value"], ledger["ok"]) == (points, ok)


@pytest.mark.parametrize("low, ok", [(-0.004, True), (-0.006, False), (float("nan"), True)])
def test_lending_is_non_inferior_by_the_low_end_of_the_interval(low, ok):
    """However noisy serving alone is; without an interval the difference itself is shown, and said to be that."""
    bar = bars._non_inferior("decode", PairedDifference(-0.001, low, 0.002, 1000, 3))
    assert bar["ok"] is ok and "n = 1000" in bar["what"]
    assert ("reason" in bar) is (low != low)


# Devices and rollouts


def test_metrics_are_summed_over_labels():
    page = '# TYPE a counter\na_total{model="x"} 2.0\na_total{model="y"} 1.5\nb 1e3\nrose_step_seconds_total 4.5\n'
    found = devices.samples(page)
    assert found["a_total"] == 3.5 and found["b"] == 1000.0 and found['a_total{model="y"}'] == 1.5
    assert found[devices.STEP_SECONDS] == 4.5


def test_addresses_are_read_from_what_a_device_says():
    assert devices.READY.search("qwen3-3m is ready at http://127.0.0.1:41234/v1\n")[1] == "http://127.0.0.1:41234"
    lending = devices.ROLLOUT.search("lending to frozenlake-1m at http://127.0.0.1:41235 in mode decode\n")
    assert lending[1] == "http://127.0.0.1:41235"


def test_a_lent_device_and_a_dedicated_one_are_started_as_users_would():
    lent = devices.Terms(Path("serving"), Path("rollout"), "idle", 400.0, 90.5).command()
    assert lent[-6:] == ["--lend-mode", "idle", "--ttft-ms", "400", "--tpot-ms", "90.5"]
    assert "serving" in lent and "--port" in lent
    dedicated = devices.Terms(None, Path("rollout")).command()
    assert "--lend" in dedicated and "--port" not in dedicated and "--lend-mode" not in dedicated


def test_cores_are_watched_by_name():
    shares = CoreWatch(Cores(DEVICE_CORE, (DEVICE_CORE,), ())).shares()
    assert shares.device == shares.others == shares.foreign >= 0


def test_a_harvest_is_counted_between_two_moments_it_saw():
    harvest = rollouts.Harvest(at_s=[10.0, 11.0, 12.0], tokens=[0.0, 100.0, 300.0])
    assert harvest.between(10.5, 11.5) == 150.0
    assert harvest.between(9.0, 11.0) is None


def test_tokens_computed_again_after_an_eviction_do_not_count():
    harvest = rollouts.Harvest()
    client = rollouts.Client(None, rollouts.Order("http://x", "token", 0), harvest, set())
    client._count(_reply(tokens=5, prompt=40, cached=16), is_again=False)
    client._count(_reply(tokens=3, prompt=45, cached=32), is_again=True)
    client._count(_reply(tokens=0, prompt=45, cached=0), is_again=False)  # evicted before its first token
    assert (harvest.generated, harvest.prefilled, harvest.thrown_away) == (8, 24, 13)


def _reply(tokens, prompt, cached):
    usage = rollouts._Usage(prompt, rollouts._Details(cached))
    return rollouts._Reply([rollouts._Choice([1] * tokens, "length")], usage)


def test_a_piece_keeps_what_its_rollouts_met():
    piece = measured(GOOD)
    harvest = rollouts.Harvest([98.0, 100.0, 110.0], [0.0, 50.0, 1050.0], turns=20, aborts=1, cpu_s=0.004)
    running._add_harvest(piece, harvest, 100.0)
    assert piece.rollout_tokens == 1000.0 and piece.rollout_at_s == [-2.0, 0.0, 10.0]
    assert piece.rollout_notes["client_cpu_us_per_turn"] == 200.0 and piece.rollout_notes["aborts"] == 1
    assert store.Measured(10.0).rollout_tok_s is None
