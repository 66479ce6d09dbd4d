"""From logits to tokens.

A token's random number is a hash of (seed, position in the sequence), so neither batch, place nor interruption changes
it. The log-probability of a sampled token is that of the distribution it was drawn from, after penalty, temperature and
filters; a greedy token's is that of the plain distribution. Rows with a temperature only stay in compiled code; filters
are applied before, row by row, in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rose.api.requests import PromptLogprob
from rose.engines.base import Sampling
from rose.engines.embedded.engine_weights import aligned_floats
from rose.engines.embedded.vector import entry, exp_and_sum, inner
from rose.engines.live_request import LiveRequest, Sampled

EXCLUDED = np.float32(-3.0e38)
SEED_MASK = (1 << 64) - 1


@inner
def _mix(z):
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@entry
def uniform(seed, position):
    """Return a number in [0, 1) that depends on nothing but its arguments."""
    z = _mix(np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15))
    z = _mix(z ^ (np.uint64(position) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED03)))
    return np.float64(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@inner
def _draw(logits, vocabulary, temperature, seed, position, weights):
    padded = logits.shape[0]
    for i in range(vocabulary, padded):
        logits[i] = np.float32(-3.0e38)
    greedy = temperature == 0.0
    scale = np.float32(1.0) if greedy else np.float32(1.0 / temperature)
    exp_and_sum(logits.ctypes.data, weights.ctypes.data, padded, scale)
    total = 0.0
    best = 0
    for i in range(vocabulary):
        total += weights[i]
        if logits[i] > logits[best]:
            best = i
    chosen = best
    if not greedy:
        target = uniform(seed, position) * total
        running = 0.0
        for i in range(vocabulary):
            if weights[i] > 0.0:
                chosen = i
                running += weights[i]
                if running > target:
                    break
    return chosen, np.log(np.float64(weights[chosen])) - np.log(total)


@entry
def _score_rows(logits, vocabulary, tokens, weights, totals, logprobs, ranks):
    """Fill in the log-probabilities that `_draw` would return for these tokens at temperature 1, and their ranks."""
    padded = logits.shape[1]
    for r in range(tokens.shape[0]):
        for i in range(vocabulary, padded):
            logits[r, i] = np.float32(-3.0e38)
        exp_and_sum(logits[r].ctypes.data, weights[r].ctypes.data, padded, np.float32(1.0))
        total = 0.0
        rank = 1
        best = logits[r, 0]
        token = tokens[r]
        for i in range(vocabulary):
            total += weights[r, i]
            best = max(best, logits[r, i])
            if logits[r, i] > logits[r, token]:
                rank += 1
        if weights[r, token] > 0.0:
            logprobs[r] = np.log(np.float64(weights[r, token])) - np.log(total)
        else:  # less than the smallest float, or no number
            logprobs[r] = np.float64(logits[r, token]) - np.float64(best) - np.log(total)
        totals[r] = total
        ranks[r] = rank


@entry
def _draw_rows(logits, vocabulary, temperatures, seeds, positions, weights, ids, logprobs):
    for r in range(ids.shape[0]):
        ids[r], logprobs[r] = _draw(logits[r], vocabulary, temperatures[r], seeds[r], positions[r], weights)


class Sampler:
    """The arrays of one engine's sampling."""

    def __init__(self, vocabulary: int, padded_vocabulary: int, max_samples: int, eos_token_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._eos = tuple(eos_token_ids)
        self._weights = np.zeros(padded_vocabulary, np.float32)
        self._temperatures = np.zeros(max_samples)
        self._seeds = np.zeros(max_samples, np.uint64)
        self._positions = np.zeros(max_samples, np.int64)
        self._ids = np.zeros(max_samples, np.int64)
        self._logprobs = np.zeros(max_samples)

    def draw(self, requests: Sequence[LiveRequest], logits: NDArray[np.float32]) -> dict[str, Sampled]:
        """Return one token for each request; row i of `logits` belongs to request i and may be changed."""
        count = len(requests)
        for row, live in enumerate(requests):
            sampling = live.request.sampling
            self._temperatures[row] = sampling.temperature
            self._seeds[row] = sampling.seed & SEED_MASK
            self._positions[row] = len(live.token_ids)
            self._filter(live, logits[row, : self._vocabulary])
        ids, logprobs = self._ids[:count], self._logprobs[:count]
        _draw_rows(
            logits, self._vocabulary, self._temperatures, self._seeds, self._positions, self._weights, ids, logprobs
        )
        chosen: dict[str, Sampled] = {}
        for row, (live, token_id, logprob) in enumerate(zip(requests, ids.tolist(), logprobs.tolist(), strict=True)):
            sampling = live.request.sampling
            top = self._top(logits[row], sampling) if sampling.top_logprobs else ()
            chosen[live.request.request_id] = Sampled(token_id, logprob, top)
        return chosen

    def score(self, tokens: Sequence[int], logits: NDArray[np.float32], top: int) -> list[PromptLogprob]:
        """Return the log-probability, the rank and the best tokens of each token; row i of `logits` is of token i."""
        count = len(tokens)
        weights = aligned_floats(logits.size).reshape(logits.shape)
        totals, logprobs, ranks = np.zeros(count), np.zeros(count), np.zeros(count, np.int64)
        _score_rows(logits, self._vocabulary, np.array(tokens, np.int64), weights, totals, logprobs, ranks)
        rows = zip(weights[:, : self._vocabulary], totals)
        best = [_most_likely(row, total, top) for row, total in rows] if top else [()] * count
        return list(zip(logprobs.tolist(), ranks.tolist(), best, strict=True))

    def _filter(self, live: LiveRequest, row: NDArray[np.float32]) -> None:
        sampling = live.request.sampling
        if sampling.repetition_penalty != 1.0:
            seen = np.unique(np.asarray(live.token_ids))
            penalty = np.float32(sampling.repetition_penalty)
            row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        if live.produced < sampling.min_tokens:
            banned = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos)]
            row[[token_id for token_id in banned if token_id < self._vocabulary]] = EXCLUDED
        has_filter = sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
        if sampling.temperature > 0.0 and has_filter:
            _keep_likely(row, sampling)

    def _top(self, logits: NDArray[np.float32], sampling: Sampling) -> tuple[tuple[int, float], ...]:
        scaled = logits[: self._vocabulary].astype(np.float64) / (sampling.temperature or 1.0)
        scaled -= scaled.max()
        scaled -= np.log(np.exp(scaled).sum())
        best = np.lexsort((np.arange(len(scaled)), -scaled))[: sampling.top_logprobs]
        return tuple((int(i), float(scaled[i])) for i in best if logits[i] > EXCLUDED)


def _most_likely(weights: NDArray[np.float32], total: float, top: int) -> tuple[tuple[int, float], ...]:
    """Return the most likely tokens with their log-probabilities; ties go to the lower token id."""
    least = np.partition(weights, -top)[-top] if top < len(weights) else np.float32(0.0)
    candidates = ((weights >= least) & (weights > 0)).nonzero()[0]
    order = candidates[np.lexsort((candidates, -weights[candidates]))][:top]
    logprobs = np.log(weights[order].astype(np.float64)) - np.log(total)
    return tuple(zip(order.tolist(), logprobs.tolist(), strict=True))


def _keep_likely(row: NDArray[np.float32], sampling: Sampling) -> None:
    """Exclude what top-k, top-p and min-p leave out, in this order; ties go to the lower token id."""
    order = np.lexsort((np.arange(len(row)), -row))
    keep = len(row)
    if sampling.top_k > 0:
        keep = min(keep, sampling.top_k)
    scaled = row[order[:keep]].astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled[0])
    if sampling.top_p < 1.0:
        before = np.cumsum(weights) - weights
        keep = max(1, int(np.searchsorted(before, sampling.top_p * weights.sum(), side="left")))
    if sampling.min_p > 0.0:
        keep = max(1, min(keep, int((weights >= sampling.min_p).sum())))
    row[order[keep:]] = EXCLUDED
