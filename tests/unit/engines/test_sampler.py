"""Sampling: the distribution that is drawn from, the log-probability that is reported, and who decides the luck."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rose.engines.base import Request, Sampling
from rose.engines.embedded.sampler import Sampler, uniform
from rose.engines.live_request import LiveRequest, Sampled

VOCABULARY, PADDED = 50, 64
EOS = 49


def live(sampling: Sampling, token_ids: tuple[int, ...] = (1, 2, 3), prompt: int = 3, name: str = "r") -> LiveRequest:
    request = Request(name, token_ids[:prompt], replace(sampling, max_tokens=100))
    return LiveRequest(request, 0, list(token_ids), [], [])


def logits(seed: int = 0) -> np.ndarray[Any, Any]:
    row = np.zeros((1, PADDED), np.float32)
    row[0, :VOCABULARY] = np.random.default_rng(seed).normal(0, 2, VOCABULARY)
    row[0, VOCABULARY:] = 1000.0  # padding must never win
    return row


def draw(sampling: Sampling, row: np.ndarray[Any, Any], **how: Any) -> Sampled:
    sampler = Sampler(VOCABULARY, PADDED, 8, [EOS])
    return sampler.draw([live(sampling, **how)], row.copy())["r"]


def expected(row: np.ndarray[Any, Any], temperature: float) -> np.ndarray[Any, Any]:
    scaled = row[0, :VOCABULARY].astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def frequencies(sampling: Sampling, row: np.ndarray[Any, Any], count: int = 4000) -> np.ndarray[Any, Any]:
    drawn = [draw(replace(sampling, seed=seed), row).token_id for seed in range(count)]
    return np.bincount(drawn, minlength=VOCABULARY) / count


def test_greedy_takes_the_best_and_reports_the_plain_logprob() -> None:
    row = logits()
    found = draw(Sampling(temperature=0.0), row)
    assert found.token_id == row[0, :VOCABULARY].argmax()
    assert found.logprob == pytest.approx(np.log(expected(row, 1.0)[found.token_id]), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_draws_follow_the_distribution_and_report_it(temperature: float) -> None:
    row, sampling = logits(), Sampling(temperature=temperature)
    wanted = expected(row, temperature)
    assert np.abs(frequencies(sampling, row) - wanted).max() < 0.03
    for seed in range(20):
        found = draw(replace(sampling, seed=seed), row)
        assert found.logprob == pytest.approx(np.log(wanted[found.token_id]), abs=1e-5)


@pytest.mark.parametrize(
    "sampling, kept",
    [
        (Sampling(top_k=3), lambda p: np.sort(p)[-3]),
        (Sampling(min_p=0.2), lambda p: 0.2 * p.max()),
        (Sampling(top_k=1), lambda p: p.max()),
    ],
    ids=["top_k", "min_p", "top_1"],
)
def test_filters_keep_the_likely_and_renormalise(sampling: Sampling, kept: Any) -> None:
    row = logits(1)
    plain = expected(row, 1.0)
    wanted = np.where(plain >= kept(plain), plain, 0)
    wanted /= wanted.sum()
    assert np.abs(frequencies(sampling, row, 1500) - wanted).max() < 0.05
    found = draw(sampling, row)
    assert found.logprob == pytest.approx(np.log(wanted[found.token_id]), abs=1e-5)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    row = np.full((1, PADDED), -30.0, np.float32)
    row[0, :4] = np.log([0.5, 0.3, 0.15, 0.05])
    assert set(np.flatnonzero(frequencies(Sampling(top_p=0.75), row, 300))) == {0, 1}
    assert set(np.flatnonzero(frequencies(Sampling(top_p=0.85), row, 300))) == {0, 1, 2}
    assert set(np.flatnonzero(frequencies(Sampling(top_p=1e-9), row, 50))) == {0}


def test_repetition_penalty_counts_prompt_and_output() -> None:
    row = np.zeros((1, PADDED), np.float32)
    row[0, 1], row[0, 2], row[0, 4] = 2.0, -1.0, 1.5
    sampler = Sampler(VOCABULARY, PADDED, 8, [EOS])
    changed = row.copy()
    found = sampler.draw([live(Sampling(temperature=0.0, repetition_penalty=2.0), (1, 2, 3))], changed)["r"]
    assert found.token_id == 4
    assert (changed[0, 1], changed[0, 2], changed[0, 4]) == (1.0, -2.0, 1.5)


def test_no_end_before_min_tokens() -> None:
    row = np.zeros((1, PADDED), np.float32)
    row[0, EOS], row[0, 7], row[0, 8] = 9.0, 8.0, 7.0
    sampling = Sampling(temperature=0.0, min_tokens=2, stop_token_ids=(7,))
    assert draw(sampling, row, token_ids=(1, 2, 3), prompt=3).token_id == 8
    assert draw(sampling, row, token_ids=(1, 2, 3, 4), prompt=3).token_id == 8
    assert draw(sampling, row, token_ids=(1, 2, 3, 4, 5), prompt=3).token_id == EOS
    assert draw(replace(sampling, ignore_eos=True), row).token_id == EOS, "then it is a token like any other"


def test_top_logprobs_are_sorted_and_contain_what_greedy_took() -> None:
    row = logits(2)
    found = draw(Sampling(temperature=0.0, top_logprobs=5), row)
    assert found.top_logprobs[0][0] == found.token_id
    assert len(found.top_logprobs) == 5
    values = [logprob for _, logprob in found.top_logprobs]
    assert values == sorted(values, reverse=True)
    assert values[0] == pytest.approx(found.logprob, abs=1e-5)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_uniform_is_a_pure_function_into_the_unit_interval(seed: int, position: int) -> None:
    number = uniform(np.uint64(seed), position)
    assert 0.0 <= number < 1.0
    assert number == uniform(np.uint64(seed), position)


def test_uniform_looks_uniform_along_seeds_and_positions() -> None:
    by_seed = np.array([uniform(np.uint64(seed), 5) for seed in range(4000)])
    by_position = np.array([uniform(np.uint64(5), position) for position in range(4000)])
    for numbers in (by_seed, by_position):
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        assert ((counts - 200) ** 2 / 200).sum() < 45  # chi-square, 19 degrees of freedom, p about 0.001
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.06


def test_the_batch_does_not_change_the_luck() -> None:
    row, sampler = logits(), Sampler(VOCABULARY, PADDED, 8, [EOS])
    sampling = Sampling(seed=11)
    alone = sampler.draw([live(sampling)], row.copy())["r"]
    others = [live(Sampling(seed=s), name=f"other{s}") for s in range(4)]
    batch = np.concatenate([logits(s + 5) for s in range(2)] + [row] + [logits(s + 9) for s in range(2)])
    assert sampler.draw([*others[:2], live(sampling), *others[2:]], batch)["r"] == alone
