"""Steps that measure users: serving alone twice, then with rollouts beside it under each kind of lending."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rose.core.admission import Mode
from rose.observe.intervals import difference_interval
from rose.verify.kit_results import KitFigure
from rose.verify.machine_facts import mps_folder
from rose.verify.replays import PERCENT, add_served, background_load, replay
from rose.verify.rollout_side import RolloutSide
from rose.verify.serving_process import ServingProcess, scheduler_for
from rose.verify.step_context import StepContext
from rose.vllm.control_segment import Status

REFUSAL_S = 180.0  # until an engine looks at its scheduler
LEARNT_STEPS, LEARNING_S, LEARNING_REQUESTS = 50, 150.0, 100_000
LOSS_MIN = 0.005  # of attainment: less is not told from nothing by a thousand requests
SERVING_ALONE, PLAIN = "serving-alone", "plain"
WARM_UP_REQUESTS = 50
MEDIAN_RATIO_MAX = 1.05
BREACHES = {
    "budgets missed because of lending, by ROSE's own account": ("ttft", "tpot"),
    "budgets missed, perhaps because of lending": ("ambiguous",),
    "rollout steps longer than predicted": ("step",),
}
RUNS = (" in run 1", " in run 2")
MPS_FAULT = (
    "Under MPS a fatal fault of the rollout engine is reported to every client on that GPU: it ends the serving engine "
    "too. Under time slices, the default, it ends the rollout engine alone."
)


async def wrong_scheduler(context: StepContext) -> None:
    """Start serving with the scheduler for the other kind of scheduling, which must be refused by name."""
    right, wrong = scheduler_for(context.settings), scheduler_for(context.settings, wrong=True)
    await context.lab.close()
    context.say(f"starting the serving engine with {wrong}")
    log = context.folder / "logs" / "serving.log"
    before = log.stat().st_size if log.exists() else 0
    serving = context.lab.new_serving(wrong)
    try:
        has_ended = await serving.until_ended(REFUSAL_S)
        text = serving.log_text()[before:]
    finally:
        await serving.close()
    context.findings.check(f"vLLM does not start with {wrong}", has_ended)
    is_named = f"use --scheduler-cls {right}" in text
    context.findings.check(f"it names {right}", is_named, "" if is_named else serving.log_tail()[-300:])


async def plain(context: StepContext) -> None:
    """Replay the requests on vLLM without ROSE's scheduler."""
    await context.lab.close()
    context.say("starting vLLM without ROSE's scheduler")
    serving = context.lab.new_serving("")
    try:
        await serving.until_ready()
        await warm_up(context, serving)
        context.say(f"{context.settings.requests:,} requests of users, nothing else")
        add_served(context.findings, await replay(serving.url, context.settings), context.settings)
    finally:
        await serving.close()


async def warm_up(context: StepContext, serving: ServingProcess) -> None:
    """Send some requests that are not measured: much is compiled at the first one."""
    await replay(serving.url, context.settings, min(WARM_UP_REQUESTS, context.settings.requests))


async def serving_alone(context: StepContext) -> None:
    """Replay the requests twice without any rollout engine: the spread of this machine."""
    await context.lab.close_rollouts()
    serving, findings = await context.lab.serving(), context.findings
    add_starts(context)
    await warm_up(context, serving)
    counts = []
    for suffix in RUNS:
        context.say(f"{context.settings.requests:,} requests of users, nothing else")
        records = await replay(serving.url, context.settings)
        counts.append((add_served(findings, records, context.settings, suffix), len(records)))
    difference, low, high = difference_interval(*counts)
    interval = (PERCENT * low, PERCENT * high)
    findings.figure("attainment, run 1 less run 2", PERCENT * difference, "points", sum(n for _, n in counts), interval)
    _compare_with_plain(context)


def _compare_with_plain(context: StepContext) -> None:
    """Compare the medians of both runs with those of vLLM without ROSE's scheduler."""
    for name in ("TTFT P50", "TPOT P50"):
        without, runs = context.earlier(PLAIN, name), [context.findings.found(f"{name}{suffix}") for suffix in RUNS]
        if without is None or not without.value or None in runs:
            continue
        values = [run.value or 0.0 for run in runs if run is not None]
        ratio, spread = sum(values) / len(values) / without.value, max(values) / min(values)
        allowed = max(MEDIAN_RATIO_MAX, spread)
        context.findings.figure(f"{name}, with ROSE's scheduler / without", ratio, "", without.n)
        seen = f"x {ratio:.3f}; allowed x {allowed:.3f}: by {MEDIAN_RATIO_MAX}, or as runs 1 and 2 differ"
        context.findings.check(f"{name} is as without ROSE's scheduler", ratio <= allowed, seen)


async def idle(context: StepContext) -> None:
    """Lend only while serving has no work, and replay the same requests."""
    await _lent(context, "idle")


async def decode(context: StepContext) -> None:
    """Lend also between serving's decode steps, and replay the same requests."""
    await _lent(context, "decode")


async def _lent(context: StepContext, mode: Mode) -> None:
    async with learnt_rollouts(context, mode) as side:
        before = side.status
        context.say(f"{context.settings.requests:,} requests of users, rollouts in mode `{mode}`")
        serving = await context.lab.serving()
        began_s = time.monotonic()
        records = await replay(serving.url, context.settings)
        seconds = time.monotonic() - began_s
        after = side.status
    attained = add_served(context.findings, records, context.settings)
    _compare_with_alone(context, attained, len(records))
    _add_lent(context, before, after, seconds)


@asynccontextmanager
async def learnt_rollouts(context: StepContext, mode: Mode) -> AsyncIterator[RolloutSide]:
    """Yield rollouts with turns under way, after ROSE has learnt what the steps of both engines take."""
    side = await context.lab.rollouts(mode)
    serving = await context.lab.serving()
    add_starts(context)
    async with side.turning():
        await learn(context, side, serving)
        target = min(side.status.lent.steps, LEARNT_STEPS) + LEARNT_STEPS
        await side.until(lambda status: status.lent.steps >= target, LEARNING_S, "the first rollout steps")
        yield side


async def learn(context: StepContext, side: RolloutSide, serving: ServingProcess) -> None:
    """Send requests until ROSE has learnt what serving's steps take."""
    context.say("learning how long steps take")
    async with background_load(serving.url, context.settings, LEARNING_REQUESTS):
        what = "the end of learning serving's steps"
        await side.until(lambda status: side.client.trouble is None, LEARNING_S, what)


def add_starts(context: StepContext) -> None:
    """Add how long the engines took to start, if this step has started them."""
    for name, seconds in context.lab.take_starts().items():
        context.findings.figure(f"start of the {name}", seconds, "s", 1)


def _compare_with_alone(context: StepContext, attained: int, count: int) -> None:
    """Compare attainment with both runs of serving alone, pooled."""
    runs = [context.earlier(SERVING_ALONE, f"attainment{suffix}") for suffix in RUNS]
    between = context.earlier(SERVING_ALONE, "attainment, run 1 less run 2")
    known = [figure for figure in runs if figure is not None and figure.n]
    if not known or between is None:
        context.findings.note(f"Not compared with serving alone: the step `{SERVING_ALONE}` was not run.")
        return
    alone = sum(_successes(figure) for figure in known), sum(figure.n or 0 for figure in known)
    difference, low, high = difference_interval(alone, (attained, count))
    allowed = max(LOSS_MIN, abs(between.value or 0.0) / PERCENT)
    interval = (PERCENT * low, PERCENT * high)
    context.findings.figure("attainment, alone less lent", PERCENT * difference, "points", count, interval)
    seen = f"{PERCENT * difference:.2f} points, between {interval[0]:.2f} and {interval[1]:.2f} (95 %)"
    what = (
        f"users lose no more than {PERCENT * allowed:.2g} points of attainment, as far as {count:,} requests can tell"
    )
    context.findings.check(what, low <= allowed, seen)


def _successes(figure: KitFigure) -> int:
    return round((figure.value or 0.0) * (figure.n or 0) / PERCENT)


def _add_lent(context: StepContext, before: Status, after: Status, seconds: float) -> None:
    """Add what rollouts got, and what they waited for."""
    findings, lent, lent_before = context.findings, after.lent, before.lent
    steps = lent.steps - lent_before.steps
    add_throughput(context, before, after, seconds)
    findings.figure("share of the time lent", PERCENT * (lent.seconds - lent_before.seconds) / seconds, "%", steps)
    for name, kinds in BREACHES.items():
        count = sum(lent.breaches.get(kind, 0) - lent_before.breaches.get(kind, 0) for kind in kinds)
        findings.figure(name, count)
    findings.figure("trips of the circuit breaker", lent.breaker_trips - lent_before.breaker_trips)
    findings.figure("turns handed back", after.evictions - before.evictions)
    waited = {why: total - lent_before.closed_s.get(why, 0.0) for why, total in lent.closed_s.items()}
    for why, total in sorted(waited.items(), key=lambda item: -item[1])[:4]:
        if total > 0:
            findings.fact(f"rollouts waited: {why}", f"{PERCENT * total / seconds:.1f} % of the time")
    findings.check("rollouts ran", steps > 0, f"{steps:,} steps")


def add_throughput(context: StepContext, before: Status, after: Status, seconds: float) -> None:
    """Add the tokens per second that the rollout engine computed, prompts and answers."""
    tokens = after.prompt_tokens + after.generated_tokens - before.prompt_tokens - before.generated_tokens
    context.findings.figure("rollout tokens per second", tokens / seconds, "tokens/s", after.steps - before.steps)


async def time_slices(context: StepContext) -> None:
    """Let rollouts run whenever the device lets them, with time slices: what lending without ROSE would cost."""
    await _ungated(context, context.lab.time_slices)
    context.findings.note(
        "Two contexts share the device in turns, so a fatal fault of the rollout engine ends it alone."
    )


async def mps(context: StepContext) -> None:
    """Do the same with both engines as clients of the MPS daemon that runs here."""
    context.findings.note(MPS_FAULT)
    if not context.settings.is_cpu:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": str(mps_folder())}
        await _ungated(context, environment)


async def _ungated(context: StepContext, environment: dict[str, str]) -> None:
    side = await context.lab.rollouts("idle", is_gated=False, environment=environment)
    serving = await context.lab.serving(environment)
    requests = max(1, context.settings.requests // 4)
    async with side.turning():
        await side.until(lambda status: status.steps >= LEARNT_STEPS, LEARNING_S, "the first rollout steps")
        before = side.status
        context.say(f"{requests:,} requests of users, rollouts without ROSE's admission")
        began_s = time.monotonic()
        records = await replay(serving.url, context.settings, requests)
        add_throughput(context, before, side.status, time.monotonic() - began_s)
    add_served(context.findings, records, context.settings)
    await context.lab.close_rollouts()
