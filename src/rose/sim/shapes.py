"""Traffic that tries to make lending hurt serving, for a device in virtual time (`rose.sim.simulated_device`).

Each shape aims at one way in which a lent device can be worse than one that serves alone: a burst that finds slots,
KV memory or prefill time taken; budgets that serving itself nearly uses up; moments in which little is known; events of
the rollouts' side in the middle of a burst. A shape is sized by what the device can do (`Scale`), so one list holds for
CPU and GPU profiles. `losses` runs a shape with and without lending and pairs the requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rose.core.admission import Mode
from rose.core.slo import Budgets, Tpot
from rose.engines.base import Request, Sampling
from rose.sim.simulated_device import DEFAULT_BUDGETS, Device, DeviceReport, DeviceWorld, Stalker

LEARNING_S = 60.0


@dataclass(frozen=True, slots=True)
class Scale:
    """A device by its profiles, and a request of medium size of which it serves `rate` a second at most."""

    serving: str
    rollout: str
    rate: float
    prompt: int
    output: int
    longest: int  # prompt whose first token takes nearly all of the given budget
    pages: int  # of KV memory in which its traffic fits several times


CPU = Scale("cpu", "cpu-frozenlake-1m", rate=30.0, prompt=200, output=40, longest=2500, pages=800)
GPU = Scale("h800-qwen2.5-7b", "h800-qwen3-8b", rate=22.0, prompt=1000, output=200, longest=14_000, pages=6000)
SCALES = {"cpu": CPU, "gpu": GPU}


@dataclass(frozen=True, slots=True)
class Arrival:
    """`session` names a conversation whose prompts begin alike; `patience_s` is when its client gives up."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    session: int | None = None
    patience_s: float | None = None


Make = Callable[[random.Random, float, Scale], list[Arrival]]


@dataclass(frozen=True, slots=True)
class Shape:
    """`ttft_x` and `tpot_x` are budgets as multiples of the P99 of serving alone; 0 stands for the given ones."""

    make: Make
    ttft_x: float = 0.0
    tpot_x: float = 0.0
    tpot: Tpot = "mean"
    span_s: float = 90.0
    world: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_calibrated(self) -> bool:
        return bool(self.ttft_x or self.tpot_x)


# Parts of traffic


def poisson(chance: random.Random, rate: float, begin_s: float, end_s: float) -> list[float]:
    times_s, now_s = [], begin_s
    while rate > 0 and (now_s := now_s + chance.expovariate(rate)) < end_s:
        times_s.append(now_s)
    return times_s


def medium(chance: random.Random, scale: Scale, at_s: float) -> Arrival:
    """Lengths as in conversations: most are short, a few are ten times as long."""
    prompt = min(8 * scale.prompt, 1 + int(0.75 * scale.prompt * chance.lognormvariate(0, 0.8)))
    return Arrival(at_s, prompt, 1 + int(chance.expovariate(1 / scale.output)))


def steady(share: float) -> Make:
    """Medium requests at a share of capacity."""

    def make(chance: random.Random, span_s: float, scale: Scale) -> list[Arrival]:
        return [medium(chance, scale, at_s) for at_s in poisson(chance, share * scale.rate, 0.0, span_s)]

    return make


def bursts(
    size: tuple[int, int], every_s: tuple[float, float], prompt: int, output: tuple[int, int], within_s: float = 0.02,
    first_s: float = 0.0,
) -> Make:  # fmt: skip
    def make(chance: random.Random, span_s: float, scale: Scale) -> list[Arrival]:
        found, now_s = [], first_s or chance.uniform(*every_s)
        while now_s < span_s - 1:
            found += [
                Arrival(now_s + chance.uniform(0, within_s), prompt, chance.randint(*output))
                for _ in range(chance.randint(*size))
            ]
            now_s += chance.uniform(*every_s)
        return found

    return make


def together(*makes: Make) -> Make:
    def make(chance: random.Random, span_s: float, scale: Scale) -> list[Arrival]:
        return [arrival for one in makes for arrival in one(chance, span_s, scale)]

    return make


def long_answers(rate: float, output: tuple[int, int], prompt: int = 50) -> Make:
    def make(chance: random.Random, span_s: float, scale: Scale) -> list[Arrival]:
        return [Arrival(at_s, prompt, chance.randint(*output)) for at_s in poisson(chance, rate, 0.0, span_s)]

    return make


def square(low: float, high: float, period_s: float) -> Make:
    """The load jumps between two shares of capacity."""

    def make(chance: random.Random, span_s: float, scale: Scale) -> list[Arrival]:
        found, begin_s, is_high = [], 0.0, False
        while begin_s < span_s:
            end_s = min(span_s, begin_s + period_s / 2)
            rate = (high if is_high else low) * scale.rate
            found += [medium(chance, scale, at_s) for at_s in poisson(chance, rate, begin_s, end_s)]
            begin_s, is_high = end_s, not is_high
        return found

    return make


def ramp(first: float, last: float) -> Make:
    def make(chance: random.Random, span_s: float, scale: Scale) -> list[Arrival]:
        times_s = poisson(chance, last * scale.rate, 0.0, span_s)
        kept = [at_s for at_s in times_s if chance.random() < (first + (last - first) * at_s / span_s) / last]
        return [medium(chance, scale, at_s) for at_s in kept]

    return make


def synchronised(count: tuple[int, int], every_s: float) -> Make:
    """Clients that all ask on the same tick, for answers of the same length: they also end together."""

    def make(chance: random.Random, span_s: float, scale: Scale) -> list[Arrival]:
        ticks = [number * every_s for number in range(1, int(span_s / every_s))]
        return [Arrival(at_s, scale.prompt // 4, scale.output) for at_s in ticks for _ in range(chance.randint(*count))]

    return make


def mixed_prompts(share: float, long_share: float, longest: float) -> Make:
    """Short prompts, and now and then one of a fraction of the longest that serving alone can answer in time."""

    def make(chance: random.Random, span_s: float, scale: Scale) -> list[Arrival]:
        found = []
        for at_s in poisson(chance, share * scale.rate, 0.0, span_s):
            is_long = chance.random() < long_share
            prompt = int(longest * scale.longest) if is_long else max(1, scale.prompt // 8)
            found.append(Arrival(at_s, prompt, 1 + int(chance.expovariate(2 / scale.output))))
        return found

    return make


def sessions(count: int, think_s: float) -> Make:
    """Conversations: every turn's prompt is all that was said before, in serving's prefix cache or computed again."""

    def make(chance: random.Random, span_s: float, scale: Scale) -> list[Arrival]:
        found = []
        for session in range(count):
            prompt, at_s = scale.prompt // 2, chance.uniform(0, think_s)
            while at_s < span_s and prompt < 6 * scale.prompt:
                output = chance.randint(scale.output // 4, scale.output)
                found.append(Arrival(at_s, prompt, output, session=session))
                prompt += output + scale.prompt // 4
                at_s += chance.expovariate(1 / think_s) + 0.01 * output
        return found

    return make


def cancelling(inner: Make, share: float, patience_s: tuple[float, float]) -> Make:
    def make(chance: random.Random, span_s: float, scale: Scale) -> list[Arrival]:
        return [
            replace(arrival, patience_s=chance.uniform(*patience_s)) if chance.random() < share else arrival
            for arrival in inner(chance, span_s, scale)
        ]

    return make


def short_answers(share: float, tokens: int) -> Make:
    def make(chance: random.Random, span_s: float, scale: Scale) -> list[Arrival]:
        times_s = poisson(chance, 2 * share * scale.rate, 0.0, span_s)
        return [replace(medium(chance, scale, at_s), output_tokens=tokens) for at_s in times_s]

    return make


def after(quiet_s: float, inner: Make) -> Make:
    """Hardly anything at first."""

    def make(chance: random.Random, span_s: float, scale: Scale) -> list[Arrival]:
        later = inner(chance, span_s - quiet_s, scale)
        return [replace(arrival, at_s=arrival.at_s + quiet_s) for arrival in later]

    return make


_SLOT_BURSTS = bursts((50, 56), (15, 25), 24, (200, 250))

SHAPES: dict[str, Shape] = {
    # Slots
    "slots": Shape(together(long_answers(2.0, (200, 250)), _SLOT_BURSTS), span_s=240.0),
    "slots, short answers in the burst": Shape(
        together(long_answers(2.0, (200, 250)), bursts((50, 56), (15, 25), 24, (8, 24))), span_s=180.0
    ),
    "slots, growing bursts": Shape(
        together(
            long_answers(2.0, (150, 250)),
            bursts((20, 24), (12, 20), 24, (10, 30)),
            after(60.0, bursts((34, 38), (12, 20), 24, (10, 30))),
            after(120.0, bursts((48, 52), (12, 20), 24, (10, 30))),
        ),
        span_s=240.0,
    ),
    "slots, bursts once a minute": Shape(
        together(long_answers(4.0, (100, 200)), bursts((48, 54), (45, 60), 24, (10, 30), first_s=20.0)), span_s=240.0
    ),
    "slots, one wave after the other": Shape(
        together(long_answers(3.0, (150, 250)), bursts((16, 22), (2, 4), 24, (30, 60))), span_s=120.0
    ),
    "synchronised arrivals": Shape(synchronised((10, 20), 1.0)),
    "synchronised arrivals and a burst": Shape(
        together(synchronised((8, 12), 5.0), bursts((30, 40), (9, 14), 24, (10, 20))), span_s=120.0
    ),
    # KV memory
    "kv, long prompts at once": Shape(
        together(long_answers(2.0, (100, 200), 100), bursts((6, 8), (10, 15), 600, (10, 30), 0.1)),
        world={"kv_tokens": 10_000},
    ),
    "kv, long answers": Shape(long_answers(1.5, (200, 500), 200), world={"kv_tokens": 12_000}),
    "kv, pages taken back in a burst": Shape(
        together(steady(0.15), bursts((12, 16), (8, 12), 300, (10, 30), 0.1)),
        world={"pages": 0, "page_s": 0.0002},
    ),
    # Prompts and prefill time
    "rare long prompts": Shape(mixed_prompts(0.3, 0.005, 0.97), span_s=180.0),
    "bimodal prompts": Shape(mixed_prompts(0.15, 0.04, 0.8)),
    "a burst of prefill": Shape(together(steady(0.2), bursts((5, 7), (6, 10), 400, (5, 20), 0.05)), ttft_x=1.3),
    "prefixes in sessions": Shape(sessions(24, 4.0), ttft_x=2.0, tpot_x=4.0, world={"pages": 0, "page_s": 0.0002}),
    # Load
    "square wave": Shape(square(0.2, 0.9, 10.0), span_s=120.0),
    "square wave of one TTFT budget": Shape(square(0.1, 0.9, 1.0)),
    "square wave of ten seconds at tight budgets": Shape(square(0.2, 0.8, 20.0), ttft_x=1.5, tpot_x=2.0, span_s=120.0),
    "ramp": Shape(ramp(0.05, 0.95), span_s=120.0),
    "overload and calm": Shape(together(steady(0.3), after(40.0, square(0.0, 0.9, 40.0))), span_s=120.0),
    "quiet, then busy": Shape(after(45.0, steady(0.7)), span_s=90.0),
    # Budgets
    "tight TTFT": Shape(steady(0.3), ttft_x=1.27, tpot_x=4.0, span_s=120.0),
    "tight TPOT": Shape(steady(0.3), ttft_x=4.0, tpot_x=1.27, span_s=120.0),
    "both tight": Shape(steady(0.5), ttft_x=1.27, tpot_x=1.27, span_s=120.0),
    "every gap": Shape(steady(0.4), ttft_x=2.0, tpot_x=3.0, tpot="every_gap"),
    "answers of two tokens": Shape(short_answers(0.3, 2), ttft_x=2.0, tpot_x=2.0),
    "answers of one token": Shape(short_answers(0.4, 1), ttft_x=1.5, tpot_x=2.0),
    "long answers under answer_s": Shape(long_answers(0.5, (300, 900)), span_s=120.0),
    # Little is known
    "cold start in a burst": Shape(
        together(steady(0.3), bursts((40, 50), (20, 30), 24, (10, 20), first_s=1.0)), span_s=60.0
    ),
    "restart in a burst": Shape(
        together(long_answers(2.0, (150, 250)), _SLOT_BURSTS), span_s=150.0, world={"restart_s": 75.0}
    ),
    # The machine and the rollouts' side
    "drift": Shape(steady(0.4), ttft_x=2.0, tpot_x=2.0, world={"drift": 1.3}),
    "noise": Shape(steady(0.4), ttft_x=2.0, tpot_x=2.0, world={"noise": 0.15}),
    "stalls": Shape(steady(0.3), world={"stall_share": 0.002}),
    "new weights in a burst": Shape(
        together(steady(0.2), bursts((20, 30), (4, 8), 100, (5, 20))), world={"swap_every_s": 5.0}
    ),
    # Clients
    "arrivals just after a grant": Shape(steady(0.2), ttft_x=1.27, world={"stalker": Stalker(0.5, 200, 10)}),
    "clients that cancel": Shape(together(cancelling(steady(0.4), 0.3, (0.05, 2.0)), _SLOT_BURSTS), span_s=120.0),
    "clients without patience": Shape(cancelling(steady(0.5), 0.5, (0.3, 0.6)), ttft_x=2.0, tpot_x=2.0),
}


@dataclass(frozen=True, slots=True)
class Losses:
    """One shape with one seed. `lost` requests were in their budgets alone and are not with lending."""

    requests: int
    kept_alone: int
    kept: int
    lost: int
    lost_by_noise: int  # the same between two runs of serving alone whose steps have other noise
    counted: int  # breaches of deadlines, ambiguous ones included
    lent_share: float
    lent_share_later: float  # from the second minute on, or the second half: without what is learnt first
    budgets: Budgets

    @property
    def points(self) -> float:
        return 100 * (self.kept - self.kept_alone) / max(1, self.requests)


def losses(shape: Shape, scale: Scale, seed: int, mode: Mode = "decode", threshold: int | None = None) -> Losses:
    """Run a shape with and without lending; with `threshold`, beside so many requests and without a breaker."""
    arrivals = shape.make(random.Random(f"shape {seed}"), shape.span_s, scale)
    requests = [_request(number, arrival) for number, arrival in enumerate(sorted(arrivals, key=lambda a: a.at_s))]
    patience_s = {
        request.request_id: arrival.patience_s
        for request, arrival in zip(requests, sorted(arrivals, key=lambda a: a.at_s), strict=True)
        if arrival.patience_s is not None
    }
    alone_world = DeviceWorld(
        None,
        _Given(tuple(requests)),
        seed=seed,
        until_s=shape.span_s,
        serving=scale.serving,
        rollout=scale.rollout,
        breaks=True,
        warm_s=min(LEARNING_S, shape.span_s / 2),
        patience_s=patience_s,
        **_world(shape, scale),
    )
    budgets = _budgets(shape, alone_world)
    terms = replace(budgets, slack_share=1.0) if mode == "paper" else budgets  # the paper's rule uses all of them
    lent_world = replace(alone_world, mode=mode, budgets=terms, stalker=shape.world.get("stalker"))
    lent = Device(replace(lent_world, threshold=threshold, breaks=threshold is None)).run()
    alone, again = (
        Device(replace(alone_world, budgets=budgets, extra=tuple(lent.sent), noise_seed=noise_seed)).run()
        for noise_seed in (0, 1)
    )
    return compare(alone, again, lent, budgets)


def named_losses(name: str, profile: str, seed: int, threshold: int | None = None) -> Losses:
    """Return the losses of a shape by names, which another process understands."""
    return losses(SHAPES[name], SCALES[profile], seed, threshold=threshold)


def compare(alone: DeviceReport, again: DeviceReport, lent: DeviceReport, budgets: Budgets) -> Losses:
    """Pair the requests of the runs; what a restart aborted in any is left out."""
    kept_alone, kept_again, kept = (
        {served.request.request_id: served.keeps(budgets) for served in report.served}
        for report in (alone, again, lent)
    )
    both = kept_alone.keys() & kept_again.keys() & kept.keys()
    return Losses(
        requests=len(both),
        kept_alone=sum(kept_alone[name] for name in both),
        kept=sum(kept[name] for name in both),
        lost=sum(kept_alone[name] and not kept[name] for name in both),
        lost_by_noise=sum(kept_alone[name] and not kept_again[name] for name in both),
        counted=sum(breach.objective != "step" for breach in lent.breaches),
        lent_share=lent.lent_s / lent.end_s,
        lent_share_later=lent.window_lent_s / lent.window_s,
        budgets=budgets,
    )


def _world(shape: Shape, scale: Scale) -> dict[str, Any]:
    options = {name: value for name, value in shape.world.items() if name != "stalker"}
    return options | ({"pages": scale.pages} if "pages" in options else {})


def _budgets(shape: Shape, world: DeviceWorld) -> Budgets:
    if not shape.is_calibrated:
        return replace(DEFAULT_BUDGETS, tpot=shape.tpot)
    served = Device(world).run().served
    ttft_s = shape.ttft_x * _p99([one.ttft_s for one in served]) or DEFAULT_BUDGETS.ttft_s
    gaps_s = [one.longest_gap_s if shape.tpot == "every_gap" else one.tpot_s for one in served]
    tpot_s = shape.tpot_x * _p99(gaps_s) or DEFAULT_BUDGETS.tpot_s
    return Budgets(ttft_s, tpot_s, answer_s=DEFAULT_BUDGETS.answer_s, tpot=shape.tpot)


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


@dataclass(frozen=True, slots=True)
class _Given:
    requests: tuple[Request, ...]

    def arrivals(self, seed: int, until_s: float) -> list[tuple[float, Request]]:
        return [(request.arrival_s, request) for request in self.requests]


def _request(number: int, arrival: Arrival) -> Request:
    name = f"serving {number}"
    sampling = Sampling(max_tokens=arrival.output_tokens, ignore_eos=True, seed=number)
    if arrival.session is None:  # a tenant each, so that no request finds another's prefix
        return Request(name, tuple(range(arrival.prompt_tokens)), sampling, tenant=name, arrival_s=arrival.at_s)
    first = 1000 * (arrival.session + 1)
    prompt = tuple(range(first, first + arrival.prompt_tokens))
    return Request(name, prompt, sampling, tenant="sessions", arrival_s=arrival.at_s)
