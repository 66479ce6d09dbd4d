"""One borrowed device, step by step, under the real rules of lending: `core.admission` and `core.memory`.

Serving is an engine as simple as can be: prompts first come first served in chunks beside one token of every running
request, at the cost that the profile gives. Rollouts want all they can get, all the time: more than any scheduler will
place there. So what serving loses here is the most it can lose, and what is lent here is what a scheduler can count on.

The result is a timeline: how much of every quarter second was lent, how many tokens of rollout KV the memory rule
allowed, for how long the gate was shut at its end (`core.gates`); and how many of the users' requests kept their
budgets, with and without lending.
"""

from __future__ import annotations

import copy
import math
import random
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

from rose.core.admission import Admission, LendingLimits
from rose.core.facts import RolloutView, RunningRequest, ServingView, StepFeatures, WaitingRequest
from rose.core.gates import GateWatch
from rose.core.latency import LatencyModel
from rose.core.memory import LendingStretch, MemoryPolicy, MemorySampled, SetRolloutBudget
from rose.core.slo import Budgets
from rose.engines.profiles import StepProfile, load_profile
from scheduling.traffic import Arrival

BIN_S = 0.25
STEP_TOKENS = 512
SEQUENCES = 64
ROLLOUT_SEQUENCES = 64
NOISE = 0.02
SERVING_CONTEXTS = (16, 128, 1024, 4096)  # what a device of each kind times when it profiles itself
ROLLOUT_CONTEXTS = (16, 512, 4096, 16_384)
PAGE_BYTES = 32 << 20  # coarser than a real page: only shares matter here
ROLLOUT_CONTEXT_TOKENS = 14_000
PROMPT_SHARE = 0.4  # of rollout steps compute prompts too
WAITING_SHOWN = 64


@dataclass(slots=True)
class Served:
    arrival: Arrival
    left_tokens: int  # of the prompt
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
class Timeline:
    """What one device lends: after its end it begins again."""

    shares: tuple[float, ...]
    kv_tokens: tuple[int, ...]
    shut_s: tuple[float | None, ...]  # at the end of every bin: for how long; None while it is open
    attainment: float
    requests: int
    busy_share: float  # of the time, serving alone
    lent_before_s: tuple[float, ...]  # at every edge between two bins

    @property
    def span_s(self) -> float:
        return BIN_S * len(self.shares)

    @property
    def lent_s(self) -> float:
        return self.lent_before_s[-1]

    def lent_by(self, now_s: float) -> float:
        """Seconds lent since the start."""
        rounds, rest_s = divmod(now_s, self.span_s)
        at = min(len(self.shares) - 1, int(rest_s / BIN_S))
        return rounds * self.lent_s + self.lent_before_s[at] + self.shares[at] * (rest_s - at * BIN_S)

    def when_lent(self, lent_s: float) -> float:
        """When so many seconds will have been lent."""
        if self.lent_s <= 0:
            return math.inf
        rounds, rest_s = divmod(lent_s, self.lent_s)
        at = min(len(self.shares) - 1, bisect_right(self.lent_before_s, rest_s) - 1)
        share = max(self.shares[at], 1e-9)
        return rounds * self.span_s + at * BIN_S + min(BIN_S, (rest_s - self.lent_before_s[at]) / share)

    def shifted(self, by_s: float) -> Timeline:
        """The same, begun later."""
        at = self.bin_at(by_s)
        shares = self.shares[at:] + self.shares[:at]
        edges = tuple(BIN_S * total for total in accumulate(shares, initial=0.0))
        return replace(
            self, shares=shares, kv_tokens=self.kv_tokens[at:] + self.kv_tokens[:at],
            shut_s=self.shut_s[at:] + self.shut_s[:at], lent_before_s=edges,
        )  # fmt: skip

    def told(self, now_s: float) -> float | None:
        """What the device says of its gate in a heartbeat."""
        return self.shut_s[self.bin_at(max(0.0, now_s - BIN_S))]

    def bin_at(self, now_s: float) -> int:
        return min(len(self.shares) - 1, int((now_s % self.span_s) / BIN_S))


@cache
def _learnt(profile_name: str, contexts: tuple[int, ...]) -> LatencyModel:
    """As a device profiles itself at its start."""
    profile, model = load_profile(profile_name), LatencyModel()
    shapes = [(1, context, batch) for batch in (1, 2, 4, 8, 16, 32, 64) for context in contexts]
    shapes += [(chunk, context, 1) for chunk in (16, 64, 256, 512) for context in (0, *contexts)]
    chance = random.Random(0)
    timed = []
    for new, context, batch in 5 * shapes:
        by_context = (new * context + new * (new + 1) // 2) * batch
        features = StepFeatures(new * batch, (new + context) * batch, by_context, batch)
        timed.append((features, profile.step_s(features) * chance.lognormvariate(0, NOISE)))
    model.fit(timed)
    return model


class Device:
    """`run` to the end. Without `lends` serving is alone."""

    def __init__(
        self, serving: StepProfile, rollout: StepProfile, budgets: Budgets, arrivals: list[Arrival], until_s: float,
        seed: int, *, lends: bool,
    ) -> None:  # fmt: skip
        self.serving, self.rollout, self.budgets, self.until_s, self.lends = serving, rollout, budgets, until_s, lends
        self.now_s = self.lent_s = self.busy_s = 0.0
        self._coming = deque(arrivals)
        self._waiting: deque[Served] = deque()
        self._running: list[Served] = []
        self._done: list[Served] = []
        self._chance = random.Random(f"device {seed} {lends}")
        limits = LendingLimits(STEP_TOKENS, STEP_TOKENS, SEQUENCES, SEQUENCES)
        models = (_learnt(serving.name, SERVING_CONTEXTS), _learnt(rollout.name, ROLLOUT_CONTEXTS))
        self.admission = Admission("decode", budgets, *copy.deepcopy(models), limits)
        both_bytes = serving.kv_memory_bytes - _weights_bytes(rollout)
        self.memory = MemoryPolicy(both_bytes // PAGE_BYTES)
        self.stretch = LendingStretch()
        self._kv_tokens = 0
        self._lent = [0.0] * math.ceil(until_s / BIN_S)
        self._kv = [0] * len(self._lent)
        self.gate = GateWatch()
        self._shut: list[float | None] = [None] * len(self._lent)
        self._number = 0

    def run(self) -> Timeline:
        while self.now_s < self.until_s or self._waiting or self._running:
            while self._coming and self._coming[0].at_s <= self.now_s:
                arrival = self._coming.popleft()
                self.admission.prompts.observe(arrival.prompt_tokens)
                self._waiting.append(Served(arrival, arrival.prompt_tokens, lent_before_s=self.lent_s))
            if not (self.lends and self._ask()) and not self._serve():
                self._idle()
        kept = [served.keeps(self.budgets) for served in self._done]
        shares = tuple(min(1.0, lent_s / BIN_S) for lent_s in self._lent)
        edges = [BIN_S * total for total in accumulate(shares, initial=0.0)]
        attainment, busy_share = sum(kept) / max(1, len(kept)), self.busy_s / self.now_s
        return Timeline(shares, tuple(self._kv), tuple(self._shut), attainment, len(kept), busy_share, tuple(edges))

    def _idle(self) -> None:
        for model in (self.admission.serving, self.admission.rollout):
            if model.is_refit_due:
                model.refit()
        until_s = max(self.now_s + 1e-6, min(self.until_s, self._coming[0].at_s if self._coming else math.inf))
        self._watch(until_s)
        self.now_s = until_s

    # Lending

    def _ask(self) -> bool:
        step = self._lend()
        self.gate.asked(self.now_s, is_let=step is not None)
        if step is None:
            return False
        seconds = self.rollout.step_s(step) * self._chance.lognormvariate(0, NOISE)
        self.admission.rollout.observe(step, seconds)
        self._spend(seconds, is_lent=True)
        return True

    def _lend(self) -> StepFeatures | None:
        """The step that rollouts may run now."""
        self._remember()
        sequences = max(1, min(ROLLOUT_SEQUENCES, self._kv_tokens // ROLLOUT_CONTEXT_TOKENS))
        prompts = STEP_TOKENS if self._chance.random() < PROMPT_SHARE else 0
        view = RolloutView(sequences, prompts, ROLLOUT_CONTEXT_TOKENS) if self._kv_tokens else RolloutView()
        self._number += 1
        running = tuple(RunningRequest(s.last_token_s, s.context_tokens, s.arrival.at_s) for s in self._running)
        shown = [self._waiting[i] for i in range(min(len(self._waiting), WAITING_SHOWN))]
        waiting = tuple(WaitingRequest(s.arrival.at_s, s.left_tokens) for s in shown)
        grant = self.admission.decide(ServingView(self._number, waiting, running), view, self.now_s)
        if not grant.is_open(self.now_s):
            return None
        decodes = min(sequences, grant.sequences, grant.tokens)
        chunk = min(prompts, grant.tokens - decodes)
        context = ROLLOUT_CONTEXT_TOKENS
        features = StepFeatures(
            decodes + chunk,
            decodes * (context + 1) + (context + chunk if chunk else 0),
            decodes * (context + 1) + chunk * context + chunk * (chunk + 1) // 2,
            decodes + bool(chunk),
        )
        return features if self.admission.rollout.upper(features) <= grant.step_s_max else None

    def _remember(self) -> None:
        """The memory rule, with rollouts that hold all they may."""
        tokens = sum(served.context_tokens for served in self._running)
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
        self._watch(self.now_s + seconds)
        self.now_s += seconds
        for at in range(first, min(len(self._kv), int(self.now_s / BIN_S) + 1)):
            self._kv[at] = self._kv_tokens

    def _watch(self, until_s: float) -> None:
        """Note how the gate stands at the end of every bin from now until then."""
        for at in range(int(self.now_s / BIN_S), min(len(self._shut), int(until_s / BIN_S))):
            self._shut[at] = self.gate.shut_s((at + 1) * BIN_S)

    # Serving

    def _serve(self) -> bool:
        if not self._running and not self._waiting:
            return False
        decodes, chunk, depth, by_context = len(self._running), 0, 0, 0
        begun: list[Served] = []
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
        seconds = self.serving.step_s(features) * self._chance.lognormvariate(0, NOISE)
        self.busy_s += seconds
        if self.lends:
            self.admission.demand.served(features, seconds, self.now_s + seconds)
            self.admission.serving.observe(features, seconds)
        self._spend(seconds, is_lent=False)
        self._say(begun)
        return True

    def _say(self, begun: list[Served]) -> None:
        for served in begun:
            if served.left_tokens == 0:
                self._waiting.popleft()
                served.first_token_s = self.now_s
                self._running.append(served)
        for served in self._running:
            served.tokens += 1
            served.last_token_s = self.now_s
        ended = [served for served in self._running if served.tokens >= served.arrival.output_tokens]
        if ended:
            self._running = [served for served in self._running if served.tokens < served.arrival.output_tokens]
            self._done += ended
            for served in ended:
                self.stretch.finished(self.now_s - served.arrival.at_s, self.lent_s - served.lent_before_s)


def _weights_bytes(profile: StepProfile) -> int:
    """What a model's weights leave of 70 GB usable on each of its devices."""
    return 70_000_000_000 * profile.tensor_parallel - profile.kv_memory_bytes


def saturated_requests_per_s(serving: StepProfile, budgets: Budgets, arrivals: list[Arrival]) -> float:
    """What serving alone can do, with all requests there at once."""
    heap = [Arrival(0.0, arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals]
    device = Device(serving, serving, budgets, heap, BIN_S, 0, lends=False)
    while device._waiting or device._running or device._coming:
        while device._coming:
            arrival = device._coming.popleft()
            device._waiting.append(Served(arrival, arrival.prompt_tokens))
        device._serve()
    return len(arrivals) / device.now_s
