"""The lent time and memory of one borrowed device under the real admission, breaker and memory policies.

`SaturatedDevice` runs an H800 device for minutes of recorded traffic. Its serving engine is reduced to chunked prefill
in arrival order beside one token of every running request, at the cost of the step profile; `rose.sim.simulated_device`
runs the full engines and is too slow for that. Rollouts always ask for a full step, so the loss of serving is an upper
bound, and the lent time is a lower bound for what a scheduler can use.

`LentTimeline` holds, per quarter second, the lent share, the KV tokens that rollouts may hold and how long admission
has been blocked (`core.admission_stalls`), and the SLO attainment of the serving requests.
"""

from __future__ import annotations

import copy
import math
import random
from bisect import bisect_right
from collections import defaultdict, deque
from dataclasses import dataclass, fields, replace
from itertools import accumulate

from rose.core.accountant import Breach, SloAccountant
from rose.core.admission import Admission, LendingLimits, Mode
from rose.core.breaker import Breaker
from rose.core.facts import RolloutView, RunningRequest, ServingView, StepFeatures, WaitingRequest
from rose.core.history import HistorySnapshot
from rose.core.latency import LatencyModel
from rose.core.memory import MemoryPolicy, MemorySampled, ResidenceInflation, SetRolloutBudget
from rose.core.slo import Budgets
from rose.core.stalls import StallDetector
from rose.engines.profiles import StepProfile, noise_of
from rose.sim.models import calibrated_model, step_shape
from rose.sim.shapes import Arrival

BIN_S = 0.25
STEP_TOKENS = 512
SEQUENCES = 64
ROLLOUT_SEQUENCES = 64
NOISE = 0.02  # standard deviation of the logarithm of a step's time
SERVING_CONTEXTS = (16, 128, 1024, 4096)  # shapes that a device of each kind times when it profiles itself
ROLLOUT_CONTEXTS = (16, 512, 4096, 16_384)
PAGE_BYTES = 32 << 20  # coarser than a real page: only shares matter here
ROLLOUT_CONTEXT_TOKENS = 14_000
PROMPT_SHARE = 0.4  # of rollout steps compute prompts too
WAITING_SHOWN = 64
TOO_LONG = "no step of the rollouts is short enough"


@dataclass(slots=True)
class BatchServedRequest:
    """One serving request: its arrival and its progress."""

    arrival: Arrival
    left_tokens: int  # of the prompt, not computed yet
    name: str = ""
    tokens: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    lent_before_s: float = 0.0

    @property
    def context_tokens(self) -> int:
        return self.arrival.prompt_tokens - self.left_tokens + self.tokens

    def keeps(self, budgets: Budgets) -> bool:
        ttft_s = self.first_token_s - self.arrival.at_s
        gaps_s = self.last_token_s - self.first_token_s
        return ttft_s <= budgets.ttft_s and gaps_s <= budgets.tpot_s * max(0, self.tokens - 1)


@dataclass(frozen=True, slots=True)
class LentTimeline:
    """What one device lends over time. The timeline repeats after its end."""

    shares: tuple[float, ...]
    kv_tokens: tuple[int, ...]
    blocked_s: tuple[float | None, ...]  # at the end of every bin; None while admission lets steps through
    attainment: float
    requests: int
    lent_before_s: tuple[float, ...]  # at every edge between two bins

    @property
    def span_s(self) -> float:
        return BIN_S * len(self.shares)

    @property
    def lent_s(self) -> float:
        return self.lent_before_s[-1]

    def lent_by(self, now_s: float) -> float:
        """Return the seconds lent from the start until `now_s`."""
        rounds, rest_s = divmod(now_s, self.span_s)
        at = min(len(self.shares) - 1, int(rest_s / BIN_S))
        return rounds * self.lent_s + self.lent_before_s[at] + self.shares[at] * (rest_s - at * BIN_S)

    def when_lent(self, lent_s: float) -> float:
        """Return when `lent_s` seconds will have been lent."""
        if self.lent_s <= 0:
            return math.inf
        rounds, rest_s = divmod(lent_s, self.lent_s)
        at = min(len(self.shares) - 1, bisect_right(self.lent_before_s, rest_s) - 1)
        share = max(self.shares[at], 1e-9)
        return rounds * self.span_s + at * BIN_S + min(BIN_S, (rest_s - self.lent_before_s[at]) / share)

    def shifted(self, by_s: float) -> LentTimeline:
        """Return the same timeline, started `by_s` later."""
        at = self.bin_at(by_s)
        shares = self.shares[at:] + self.shares[:at]
        edges = tuple(BIN_S * total for total in accumulate(shares, initial=0.0))
        return replace(
            self, shares=shares, kv_tokens=self.kv_tokens[at:] + self.kv_tokens[:at],
            blocked_s=self.blocked_s[at:] + self.blocked_s[:at], lent_before_s=edges,
        )  # fmt: skip

    def reported_block_s(self, now_s: float) -> float | None:
        """Return how long admission is blocked, as the heartbeat of one bin ago reports it."""
        return self.blocked_s[self.bin_at(max(0.0, now_s - BIN_S))]

    def bin_at(self, now_s: float) -> int:
        return min(len(self.shares) - 1, int((now_s % self.span_s) / BIN_S))


_MODELS: dict[tuple[object, ...], LatencyModel] = {}


def _calibrated(profile: StepProfile, contexts: tuple[int, ...]) -> LatencyModel:
    """Return the model of a device that profiled itself at its start; one per profile, to be copied."""
    costs = (getattr(profile, cost.name) for cost in fields(StepProfile) if cost.name != "source")
    key = (*costs, contexts)
    if key not in _MODELS:
        shapes = [step_shape(1, context, batch) for batch in (1, 2, 4, 8, 16, 32, 64) for context in contexts]
        shapes += [step_shape(chunk, context, 1) for chunk in (16, 64, 256, 512) for context in (0, *contexts)]
        _MODELS[key] = calibrated_model(profile.step_s, NOISE, shapes=shapes)
    return _MODELS[key]


class SaturatedDevice:
    """One simulated device; `run` returns its timeline. Without `lends` only serving runs.

    Rollouts hold `context_tokens` of KV memory each, and `memory_bytes` is for the KV of both models. With `learnt` the
    device continues with what was learnt of serving before.
    """

    def __init__(
        self, serving: StepProfile, rollout: StepProfile, budgets: Budgets, arrivals: list[Arrival], until_s: float,
        seed: int, *, lends: bool, mode: Mode = "decode", context_tokens: int = ROLLOUT_CONTEXT_TOKENS,
        memory_bytes: int | None = None, learnt: HistorySnapshot | None = None,
    ) -> None:  # fmt: skip
        self.serving, self.rollout, self.budgets, self.until_s, self.lends = serving, rollout, budgets, until_s, lends
        self.now_s = self.lent_s = 0.0
        self._coming = deque(arrivals)
        self._waiting: deque[BatchServedRequest] = deque()
        self._running: list[BatchServedRequest] = []
        self.served: list[BatchServedRequest] = []  # that have ended
        self.unlent_s: dict[str, float] = defaultdict(float)  # before `until_s`, by admission's reason
        self.rollout_tokens = self.peak_kv_tokens = 0
        self._reason = ""
        self._chance = random.Random(f"device {seed} {lends}")
        limits = LendingLimits(
            STEP_TOKENS, STEP_TOKENS, SEQUENCES, SEQUENCES, kv_bytes_per_token=serving.kv_bytes_per_token
        )
        models = (_calibrated(serving, SERVING_CONTEXTS), _calibrated(rollout, ROLLOUT_CONTEXTS))
        self.breaker = Breaker()
        self.admission = Admission(mode, budgets, *copy.deepcopy(models), limits, self.breaker)
        history, slowdown = self.admission.history, self.admission.slowdown
        self.accountant = SloAccountant(budgets, history, slots=SEQUENCES, slowdown=slowdown)
        if learnt is not None:
            history.restore(learnt, 0.0)
        self._arrived = 0
        if memory_bytes is None:
            memory_bytes = serving.kv_memory_bytes - _weights_bytes(rollout)
        self.memory = MemoryPolicy(memory_bytes // PAGE_BYTES)
        self._context_tokens = context_tokens
        self.stretch = ResidenceInflation()
        self._kv_tokens = self._serving_tokens = 0
        self._lent = [0.0] * math.ceil(until_s / BIN_S)
        self._kv = [0] * len(self._lent)
        self.stalls = StallDetector()
        self._blocked: list[float | None] = [None] * len(self._lent)
        self._number = 0

    def run(self) -> LentTimeline:
        while self.now_s < self.until_s or self._waiting or self._running:
            while self._coming and self._coming[0].at_s <= self.now_s:
                self._arrive(self._coming.popleft())
            if not (self.lends and self._run_lent_step()) and not self._serve():
                self._skip_idle_time()
        kept = [served.keeps(self.budgets) for served in self.served]
        shares = tuple(min(1.0, lent_s / BIN_S) for lent_s in self._lent)
        edges = [BIN_S * total for total in accumulate(shares, initial=0.0)]
        attainment = sum(kept) / max(1, len(kept))
        return LentTimeline(shares, tuple(self._kv), tuple(self._blocked), attainment, len(kept), tuple(edges))

    def _arrive(self, arrival: Arrival) -> None:
        name = str(self._arrived)
        self._arrived += 1
        self.accountant.on_arrival(name, arrival.at_s, arrival.prompt_tokens)
        self._waiting.append(BatchServedRequest(arrival, arrival.prompt_tokens, name, lent_before_s=self.lent_s))

    def _skip_idle_time(self) -> None:
        for model in (self.admission.serving, self.admission.rollout):
            if model.is_refit_due:
                model.refit()
        until_s = max(self.now_s + 1e-6, min(self.until_s, self._coming[0].at_s if self._coming else math.inf))
        self._record_stalls(until_s)
        self._count_unlent(until_s - self.now_s)
        self.now_s = until_s

    # Lending

    def _run_lent_step(self) -> bool:
        step = self._admitted_step()
        self.stalls.on_request(self.now_s, is_admitted=step is not None)
        if step is None:
            return False
        seconds = self.rollout.step_s(step)
        seconds *= noise_of(self.rollout, seconds, self._chance, NOISE)
        begin_s, upper_s = self.now_s, self.admission.rollout.upper(step)
        self.admission.rollout.observe(step, seconds)
        if self.now_s < self.until_s:  # a prompt that is not complete yields no token
            self.rollout_tokens += step.sequences - (step.new_tokens > step.sequences)
        self._spend(seconds, is_lent=True)
        late = self.accountant.on_lent_step(begin_s, self.now_s, upper_s)
        self.breaker.on_lent_step(self.now_s, is_late=late is not None)
        return True

    def _admitted_step(self) -> StepFeatures | None:
        """Return the step that rollouts may run now."""
        self._observe_memory()
        sequences = max(1, min(ROLLOUT_SEQUENCES, self._kv_tokens // self._context_tokens))
        prompts = STEP_TOKENS if self._chance.random() < PROMPT_SHARE else 0
        view = RolloutView(sequences, prompts, self._context_tokens) if self._kv_tokens else RolloutView()
        self._number += 1
        running = tuple(
            RunningRequest(s.last_token_s, s.context_tokens, s.arrival.at_s, s.first_token_s, s.tokens)
            for s in self._running
        )
        shown = [self._waiting[i] for i in range(min(len(self._waiting), WAITING_SHOWN))]
        waiting = tuple(WaitingRequest(s.arrival.at_s, s.left_tokens) for s in shown)
        used, total = self._serving_tokens * self.serving.kv_bytes_per_token, self.serving.kv_memory_bytes
        seen = ServingView(self._number, waiting, running, used, total)
        grant = self.admission.decide(seen, view, self.now_s)
        self._reason = grant.reason
        if not grant.is_open(self.now_s):
            return None
        decodes = min(sequences, grant.sequences, grant.tokens)
        chunk = min(prompts, grant.tokens - decodes)
        context = self._context_tokens
        features = StepFeatures(
            decodes + chunk,
            decodes * (context + 1) + (context + chunk if chunk else 0),
            decodes * (context + 1) + chunk * context + chunk * (chunk + 1) // 2,
            decodes + bool(chunk),
        )
        if self.admission.rollout.upper(features) <= grant.step_s_max:
            return features
        self._reason = TOO_LONG
        return None

    def _observe_memory(self) -> None:
        """Apply the memory policy to rollouts that hold their whole budget."""
        self._serving_tokens = tokens = sum(served.context_tokens for served in self._running)
        self.peak_kv_tokens = max(self.peak_kv_tokens, tokens)
        pages = -(-tokens * self.serving.kv_bytes_per_token // PAGE_BYTES)
        held = self.memory.budget_pages or 0
        sample = MemorySampled(pages, held, lending_stretch=self.stretch.mean)
        for decision in self.memory.observe(sample, self.now_s):
            if isinstance(decision, SetRolloutBudget):
                self._kv_tokens = decision.pages * PAGE_BYTES // self.rollout.kv_bytes_per_token

    def _spend(self, seconds: float, *, is_lent: bool) -> None:
        first = int(self.now_s / BIN_S)
        if is_lent and first < len(self._lent):
            self._lent[first] += seconds
            self.lent_s += seconds
        elif not is_lent:
            self._count_unlent(seconds)
        self._record_stalls(self.now_s + seconds)
        self.now_s += seconds
        for at in range(first, min(len(self._kv), int(self.now_s / BIN_S) + 1)):
            self._kv[at] = self._kv_tokens

    def _count_unlent(self, seconds: float) -> None:
        if self.lends and self.now_s < self.until_s:
            self.unlent_s[self._reason] += min(seconds, self.until_s - self.now_s)

    def _record_stalls(self, until_s: float) -> None:
        """Record the admission stall at the end of every bin until `until_s`."""
        for at in range(int(self.now_s / BIN_S), min(len(self._blocked), int(until_s / BIN_S))):
            self._blocked[at] = self.stalls.blocked_s((at + 1) * BIN_S)

    # Serving

    def _serve(self) -> bool:
        if not self._running and not self._waiting:
            return False
        decodes, chunk, depth, by_context = len(self._running), 0, 0, 0
        begun: list[BatchServedRequest] = []
        for served in self._waiting:
            room = STEP_TOKENS - decodes - chunk
            if room <= 0 or decodes + len(begun) >= SEQUENCES:
                break
            part = min(room, served.left_tokens)
            done = served.arrival.prompt_tokens - served.left_tokens
            served.left_tokens -= part
            chunk, depth, by_context = chunk + part, depth + done + part, by_context + part * (done + part // 2)
            begun.append(served)
        context = sum(served.context_tokens for served in self._running) + decodes
        features = StepFeatures(decodes + chunk, context + depth, context + by_context, decodes + len(begun))
        seconds = self.serving.step_s(features)
        seconds *= noise_of(self.serving, seconds, self._chance, NOISE)
        if self.lends:
            self.admission.demand.on_step(features, seconds, self.now_s + seconds)
            self.admission.serving.observe(features, seconds)
        self._spend(seconds, is_lent=False)
        self._emit_tokens(begun)
        return True

    def _emit_tokens(self, begun: list[BatchServedRequest]) -> None:
        for served in begun:
            if served.left_tokens == 0:
                self._waiting.popleft()
                served.first_token_s = self.now_s
                self._count_breach(self.accountant.on_first_token(served.name, self.now_s))
                self._running.append(served)
        for served in self._running:
            served.tokens += 1
            served.last_token_s = self.now_s
        ended = [served for served in self._running if served.tokens >= served.arrival.output_tokens]
        if ended:
            self._running = [served for served in self._running if served.tokens < served.arrival.output_tokens]
            self.served += ended
            for served in ended:
                self.stretch.on_finished(self.now_s - served.arrival.at_s, self.lent_s - served.lent_before_s)
                self.breaker.on_finished(self.now_s)
                self._count_breach(self.accountant.on_finished(served.name, served.tokens, self.now_s))

    def _count_breach(self, breach: Breach | None) -> None:
        if breach is not None:
            self.breaker.on_deadline_lost(breach.at_s)


def _weights_bytes(profile: StepProfile) -> int:
    """Return the bytes of a model's weights, with 70 GB usable on each of its devices."""
    return 70_000_000_000 * profile.tensor_parallel - profile.kv_memory_bytes


def saturated_requests_per_s(serving: StepProfile, budgets: Budgets, arrivals: list[Arrival]) -> float:
    """Return the throughput of serving alone, with all requests queued at once."""
    queued = [Arrival(0.0, arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals]
    device = SaturatedDevice(serving, serving, budgets, queued, BIN_S, 0, lends=False)
    while device._waiting or device._running or device._coming:
        while device._coming:
            device._arrive(device._coming.popleft())
        device._serve()
    return len(arrivals) / device.now_s
