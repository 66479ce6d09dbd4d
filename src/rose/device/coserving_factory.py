"""Makes a co-serving device: both models on one pool of pages, their step times learnt, the terms of lending checked.

What cannot work is refused here with its figures, what will disappoint is reported as a warning: a pool without room
for one context of each model, budgets that serving alone cannot keep on this device, a rollout step that would never
fit. The shapes that are timed are the latency model's own choice (`profile_plan`), with prompts that no client sends.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.config.server_settings import EngineSettings, LendSettings
from rose.core.admission import Admission, LendingLimits
from rose.core.breaker import Breaker
from rose.core.facts import LendingAsked, ServingView, StepFeatures
from rose.core.latency import LatencyModel, ProfileShape, Sample, profile_plan
from rose.core.memory import MemoryLimits, MemoryPolicy
from rose.core.slo import look_ahead
from rose.device import engine_messages
from rose.device.admin_controls import AdminControls
from rose.device.coserving_executor import CoServingExecutor
from rose.device.pages import PagePool, group_of
from rose.device.residency import RolloutResidency
from rose.device.step_arbiter import ScheduledEngine, StepArbiter
from rose.device.tenancy import SharedMemory, Tenant
from rose.device.transport import EngineLink, RolloutListener
from rose.engines.base import Budget, Request, Sampling
from rose.engines.embedded.engine import MIB, EmbeddedEngine
from rose.engines.embedded.runner import block_bytes
from rose.errors import ConfigError
from rose.models.model_folder import served_spec
from rose.observe.journal import core_vocabulary, line_of
from rose.observe.wall_clock import stamped

KIB = 1 << 10
SAFE_MODES = ("idle", "decode")
PROFILE_REPEATS = 3  # of the whole plan: the first meets cold caches, and a stall spoils at most one
PROFILE_ENOUGH_S = 3.0  # no other repeat after this long: the operator waits, and minds more than the estimate gains
PROFILE_TENANT = "rose profile"


@dataclass(frozen=True, slots=True)
class _Side:
    folder: Path
    settings: EngineSettings
    block_bytes: int
    spare_sequences: int = 0


def load_coserving(
    start: engine_messages.StartEngine, lend: engine_messages.Lend, link: EngineLink, listener: RolloutListener
) -> CoServingExecutor:
    """Load both models, and return the executor with the desired state restored. Raises ModelError or ConfigError."""
    terms, own = lend.terms, start.settings
    folders, settings = (Path(start.folder), Path(lend.folder)), (own, terms.engine(own.kv_memory_mb))
    spare = (terms.spare_sequences, 0)
    sides = [_Side(f, s, block_bytes(served_spec(f)), n) for f, s, n in zip(folders, settings, spare, strict=True)]
    memory = _memory(own, terms, sides)
    engines, models, profiled = _engines(sides, memory, start.device, link)
    gc.collect()
    gc.freeze()
    limits = LendingLimits(
        serving_step_tokens=own.max_step_tokens,
        rollout_step_tokens=terms.max_step_tokens,
        serving_sequences=own.max_sequences,
        rollout_sequences=terms.max_sequences,
        spare_sequences=terms.spare_sequences,
        kv_bytes_per_token=engines[0].scheduler.limits.block_bytes / engines[0].scheduler.limits.block_tokens,
    )
    # The modes for comparison keep no promise that a breaker could watch over.
    breaker = Breaker() if terms.chosen_mode in SAFE_MODES else None
    admission = Admission(terms.chosen_mode, terms.budgets, models[0], models[1], limits, breaker)
    for warning in warnings(admission, engines[0].scheduler.limits.max_context_tokens):
        link.send(engine_messages.StartProgress(f"warning: {warning}"))
    budget = Budget(own.max_step_tokens, own.max_sequences + terms.spare_sequences)
    arbiter = StepArbiter(engines[0], engines[1], admission, serving_budget=budget)
    for kept, steps in zip(arbiter.samples.values(), profiled, strict=True):
        for features, seconds in steps:
            kept.add_shape(features, seconds)
    residency = RolloutResidency(arbiter, engines[1], memory, folder=lend.folder, now_s=time.monotonic, wake=link.wake)
    controls = AdminControls(arbiter, residency, memory, time.monotonic)
    controls.obey(engine_messages.AdminCommand("limits", terms.memory_share, terms.compute_share))
    if terms.journal is not None:
        keep_journal(arbiter, memory, link)
    link.send(engine_messages.Ready(engines[0].facts()))
    executor = CoServingExecutor(arbiter, residency, controls, link, listener=listener)
    executor.take_over(lend)
    return executor


def _memory(own: EngineSettings, terms: LendSettings, sides: Sequence[_Side]) -> SharedMemory:
    page_bytes = terms.page_kb * KIB
    pages = own.kv_memory_mb * MIB // page_bytes
    if pages < 4:
        raise ConfigError(
            f"{own.kv_memory_mb} MiB of KV memory are {pages} pages of {terms.page_kb} KiB, too few to share",
            hint="raise engine.kv_memory_mb or lower lend.page_kb",
        )
    pool = PagePool(pages, page_bytes)
    for side in sides:
        # Blocks lie in groups of pages without a gap, and an odd size of page makes such groups long.
        together = group_of(page_bytes, side.block_bytes).pages
        if together > pages:
            raise ConfigError(
                f"blocks of {side.block_bytes} bytes ({side.folder.name}) fill pages of {terms.page_kb} KiB evenly "
                f"only {together} at a time, and the KV memory has {pages}",
                hint="take a power of two for lend.page_kb, such as 2048, or raise engine.kv_memory_mb",
            )
    return SharedMemory(
        pool,
        MemoryPolicy(pages, MemoryLimits(headroom_share=terms.headroom_share, regrowth=terms.regrowth)),
        serving_block_bytes=sides[0].block_bytes,
        rollout_block_bytes=sides[1].block_bytes,
        now_s=time.monotonic,
    )


def _engines(
    sides: Sequence[_Side], memory: SharedMemory, device: str, link: EngineLink
) -> tuple[list[Any], list[LatencyModel], list[list[Sample]]]:
    engines, models, profiled = [], [], []
    for side, tenant in zip(sides, (memory.serving, memory.rollout), strict=True):
        engine = EmbeddedEngine.load(
            side.folder, side.settings, device=device, memory=tenant.memory, spare_sequences=side.spare_sequences
        )
        _check_context(side.folder.name, engine, tenant, memory)
        link.send(engine_messages.StartProgress(f"learning how long steps of {side.folder.name} take"))
        model = LatencyModel()
        profiled.append(profile(engine, model, side.settings.max_step_tokens))
        tenant.memory.pool.forget_digests()
        tenant.memory.pool.shrink(tenant.memory.pool.pages_held)
        memory.policy.restart()
        memory.observe()  # what was taken from rollouts, to try serving's largest steps, is theirs again
        engines.append(engine)
        models.append(model)
    return engines, models, profiled


def _check_context(name: str, engine: EmbeddedEngine, tenant: Tenant, memory: SharedMemory) -> None:
    """Raise ConfigError if the model cannot have the pages of one context. Only serving may have its headroom."""
    limits, is_serving = engine.scheduler.limits, tenant is memory.serving
    held = tenant.blocks_within(memory.pages.pages if is_serving else tenant.share.budget_pages) * limits.block_tokens
    if held < limits.max_context_tokens:
        ways = "engine.max_context_tokens" if is_serving else "lend.max_context_tokens or lend.headroom_share"
        raise ConfigError(
            f"the KV memory that {name} may have holds {held} tokens, less than one context of "
            f"{limits.max_context_tokens}",
            hint=f"raise engine.kv_memory_mb or lower {ways}",
        )


def warnings(admission: Admission, context_tokens: int) -> Iterator[str]:
    """Yield what the profile says against the terms; raise ConfigError where no budget could ever be kept."""
    budgets, limits = admission.budgets, admission.limits
    one_s = admission.serving.predict(StepFeatures(1, 1, 1, 1))
    if one_s > min(budgets.ttft_s, budgets.tpot_s):
        raise ConfigError(
            f"one token of one request takes {one_s * 1e3:.3g} ms on this device alone: no request can keep budgets of "
            f"{budgets.ttft_s * 1e3:g} ms for the first and {budgets.tpot_s * 1e3:g} ms for later tokens",
            hint="raise --ttft-ms and --tpot-ms, or serve a smaller model",
        )
    prompt = context_tokens // 4
    prompt_s = look_ahead(ServingView(0), admission.serving, limits.serving_step_tokens, prompt).prefill_s(prompt)
    if prompt_s > budgets.ttft_s:
        yield (
            f"serving alone needs about {prompt_s * 1e3:.0f} ms for a prompt of {prompt} tokens, more than its TTFT "
            f"budget of {budgets.ttft_s * 1e3:g} ms: such requests miss it with and without lending"
        )
    sequences = limits.serving_sequences
    full_s = admission.serving.predict(StepFeatures(sequences, sequences * prompt, sequences * prompt, sequences))
    if full_s > budgets.tpot_s:
        yield (
            f"with {sequences} requests running a token takes serving alone about {full_s * 1e3:.0f} ms, more than its "
            f"TPOT budget of {budgets.tpot_s * 1e3:g} ms"
        )
    if budgets.tpot_s > budgets.ttft_s:
        yield "the budget for later tokens is larger than the one for the first: are --ttft-ms and --tpot-ms swapped?"
    smallest_s = admission.rollout.upper(StepFeatures(1, prompt + 1, prompt + 1, 1))
    if admission.mode in SAFE_MODES and smallest_s > admission.block_s - limits.switch_s:
        yield (
            f"nothing will be lent: the smallest rollout step takes up to {smallest_s * 1e3:.3g} ms, and serving may "
            f"find the device taken for {admission.block_s * 1e3:.3g} ms at most (a tenth of its TTFT budget)"
        )


def keep_journal(arbiter: StepArbiter, memory: SharedMemory, link: EngineLink) -> None:
    """Send a journal line for every decision on lending and memory, with the facts that it was made from."""
    vocabulary = core_vocabulary()

    def note(now_s: float, fact: Any, decisions: Sequence[Any]) -> None:
        link.send(engine_messages.Noted(stamped(line_of(vocabulary, now_s, fact, decisions))))

    def note_grant(now_s: float, view: Any, rollouts: Any, grant: Any) -> None:
        note(now_s, LendingAsked(view, rollouts), [grant])

    arbiter.on_decision, memory.on_decisions = note_grant, note


# Step times


def profile(
    engine: ScheduledEngine, model: LatencyModel, step_tokens: int, *, now_s: Callable[[], float] = time.perf_counter
) -> list[Sample]:
    """Time steps of an idle engine, fit the model to them, and return them; the engine is idle again afterwards."""
    limits = engine.scheduler.limits
    plan = profile_plan(step_tokens, limits.max_sequences, limits.max_context_tokens)
    chance = random.Random(0)
    samples: list[Sample] = []
    begin_s = now_s()
    for repeat in range(PROFILE_REPEATS):
        if repeat and now_s() - begin_s > PROFILE_ENOUGH_S:
            break
        for shape in plan:
            samples += _timed_steps(engine, shape, chance, now_s)
    model.fit(samples)
    return samples


def _timed_steps(
    engine: ScheduledEngine, shape: ProfileShape, chance: random.Random, now_s: Callable[[], float]
) -> Iterator[tuple[StepFeatures, float]]:
    sampling = Sampling(max_tokens=shape.decode_steps, ignore_eos=True)
    vocabulary = range(engine.scheduler.limits.vocabulary)
    for number in range(shape.requests):
        prompt = tuple(chance.choices(vocabulary, k=shape.context_tokens))
        engine.add(Request(f"profile-{number}", prompt, sampling, tenant=PROFILE_TENANT))
    while (plan := engine.plan(Budget(shape.new_tokens, shape.requests))) is not None:
        begin_s = now_s()  # as the loop that runs it does: planning is no part of a step
        engine.step(plan)
        yield plan.features, now_s() - begin_s
