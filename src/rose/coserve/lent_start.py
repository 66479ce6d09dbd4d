"""Makes a lent device: both models on one pool of pages, their step times learnt, the owner's terms checked.

What cannot work is refused here with its figures, what will disappoint is said: a pool without room for one context of
each model, budgets that serving alone cannot keep on this device, a rollout step that would never fit.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.config.device import EngineSettings, LendSettings
from rose.core.admission import Admission, LendingLimits
from rose.core.breaker import Breaker
from rose.core.facts import LendingAsked, ServingView, StepFeatures
from rose.core.latency import LatencyModel
from rose.core.memory import MemoryLimits, MemoryPolicy
from rose.core.slo import Budgets, look_ahead
from rose.coserve import messages
from rose.coserve.door import Door
from rose.coserve.guest import Guest
from rose.coserve.lending import Lender
from rose.coserve.lent import LentExecutor
from rose.coserve.link import EngineLink
from rose.coserve.owner import Owner
from rose.coserve.pages import PagePool, group_of
from rose.coserve.profiling import profile
from rose.coserve.tenancy import SharedMemory, Tenant
from rose.engines.base import Budget
from rose.engines.embedded.engine import MIB, EmbeddedEngine
from rose.engines.embedded.memory import block_bytes
from rose.engines.scheduler import Limits
from rose.errors import ConfigError
from rose.models.folder import served_spec
from rose.observe.journal import line_of
from rose.observe.records import core_vocabulary

KIB = 1 << 10
SAFE_MODES = ("idle", "decode")


@dataclass(frozen=True, slots=True)
class _Side:
    folder: Path
    settings: EngineSettings
    block_bytes: int


def load_lent(start: messages.Start, lend: messages.Lend, link: EngineLink, door: Door) -> LentExecutor:
    """Raises ModelError or ConfigError."""
    terms, own = lend.terms, start.settings
    folders, settings = (Path(start.folder), Path(lend.folder)), (own, terms.engine(own.kv_memory_mb))
    sides = [_Side(f, s, block_bytes(served_spec(f))) for f, s in zip(folders, settings, strict=True)]
    memory = _memory(own, terms, sides)
    engines, models = _engines(sides, memory, start.device, link)
    gc.collect()
    gc.freeze()
    admission = _admission(terms, own, models)
    for warning in warnings(admission, engines[0].scheduler.limits.max_context_tokens):
        link.send(messages.Progress(f"warning: {warning}"))
    budget = Budget(own.max_step_tokens, own.max_sequences)
    lender = Lender(engines[0], engines[1], admission, serving_budget=budget)
    rollout_budget = Budget(terms.max_step_tokens, terms.max_sequences)
    guest = Guest(
        lender, engines[1], memory, folder=lend.folder, budget=rollout_budget, now_s=time.monotonic, wake=link.wake
    )
    owner = Owner(lender, guest, memory, time.monotonic)
    owner.limit(terms.memory_share, terms.compute_share)
    if terms.journal is not None:
        _keep_journal(lender, memory, link)
    link.send(messages.Ready(engines[0].facts()))
    return LentExecutor(lender, guest, owner, link, budget=budget, door=door)


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
        _check_blocks(side, pool, terms.page_kb)
    return SharedMemory(
        pool,
        MemoryPolicy(pages, MemoryLimits(headroom_share=terms.headroom_share, regrowth=terms.regrowth)),
        serving_block_bytes=sides[0].block_bytes,
        rollout_block_bytes=sides[1].block_bytes,
        now_s=time.monotonic,
    )


def _check_blocks(side: _Side, pool: PagePool, page_kb: int) -> None:
    """Blocks lie in groups of pages without a gap, and an odd size of page makes such groups long."""
    together = group_of(pool.page_bytes, side.block_bytes).pages
    if together > pool.pages:
        raise ConfigError(
            f"blocks of {side.block_bytes} bytes ({side.folder.name}) fill pages of {page_kb} KiB evenly only "
            f"{together} at a time, and the KV memory has {pool.pages}",
            hint="take a power of two for lend.page_kb, such as 2048, or raise engine.kv_memory_mb",
        )


def _engines(
    sides: Sequence[_Side], memory: SharedMemory, device: str, link: EngineLink
) -> tuple[list[Any], list[LatencyModel]]:
    engines, models = [], []
    for side, tenant in zip(sides, (memory.serving, memory.rollout), strict=True):
        engine = EmbeddedEngine.load(side.folder, side.settings, device=device, memory=tenant.memory)
        _check_context(side.folder.name, engine.scheduler.limits, tenant, memory)
        link.send(messages.Progress(f"learning how long steps of {side.folder.name} take"))
        model = LatencyModel()
        profile(engine, model, side.settings.max_step_tokens)
        tenant.memory.pool.forget_digests()
        tenant.memory.pool.shrink(tenant.memory.pool.pages_held)
        memory.policy.restart()
        memory.observe()  # what was taken from rollouts, to try serving's largest steps, is theirs again
        engines.append(engine)
        models.append(model)
    return engines, models


def _check_context(name: str, limits: Limits, tenant: Tenant, memory: SharedMemory) -> None:
    """Rollouts give way to serving, so that it may have every page; they never have what is its headroom."""
    is_serving = tenant is memory.serving
    held = tenant.blocks_within(memory.pages.pages if is_serving else tenant.share.budget_pages) * limits.block_tokens
    if held < limits.max_context_tokens:
        ways = "engine.max_context_tokens" if is_serving else "lend.max_context_tokens or lend.headroom_share"
        raise ConfigError(
            f"the KV memory that {name} may have holds {held} tokens, less than one context of "
            f"{limits.max_context_tokens}",
            hint=f"raise engine.kv_memory_mb or lower {ways}",
        )


def _admission(terms: LendSettings, own: EngineSettings, models: Sequence[LatencyModel]) -> Admission:
    limits = LendingLimits(
        serving_step_tokens=own.max_step_tokens,
        rollout_step_tokens=terms.max_step_tokens,
        serving_sequences=own.max_sequences,
        rollout_sequences=terms.max_sequences,
    )
    budgets = Budgets(terms.ttft_ms / 1000, terms.tpot_ms / 1000, terms.slack_share, terms.answer_s)
    # What is there to compare with keeps no promise that a breaker could watch over.
    breaker = Breaker() if terms.mode in SAFE_MODES else None
    return Admission(terms.mode, budgets, models[0], models[1], limits, breaker)


def warnings(admission: Admission, context_tokens: int) -> Iterator[str]:
    """What the profile says against the terms; raises ConfigError where nothing could ever be kept."""
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
    seats = limits.serving_sequences
    full_s = admission.serving.predict(StepFeatures(seats, seats * prompt, seats * prompt, seats))
    if full_s > budgets.tpot_s:
        yield (
            f"with all {seats} seats taken a token takes serving alone about {full_s * 1e3:.0f} ms, more than its TPOT "
            f"budget of {budgets.tpot_s * 1e3:g} ms"
        )
    if budgets.tpot_s > budgets.ttft_s:
        yield "the budget for later tokens is larger than the one for the first: are --ttft-ms and --tpot-ms swapped?"
    smallest_s = admission.rollout.upper(StepFeatures(1, prompt + 1, prompt + 1, 1))
    if admission.mode in SAFE_MODES and smallest_s > admission.block_s - limits.switch_s:
        yield (
            f"nothing will be lent: the smallest rollout step takes up to {smallest_s * 1e3:.3g} ms, and serving may "
            f"find the device taken for {admission.block_s * 1e3:.3g} ms at most (a tenth of its TTFT budget)"
        )


def _keep_journal(lender: Lender, memory: SharedMemory, link: EngineLink) -> None:
    vocabulary = core_vocabulary()

    def note(now_s: float, fact: Any, decisions: Sequence[Any]) -> None:
        link.send(messages.Noted(line_of(vocabulary, now_s, fact, decisions)))

    def note_grant(now_s: float, view: Any, rollouts: Any, grant: Any) -> None:
        note(now_s, LendingAsked(view, rollouts), [grant])

    lender.on_decision, memory.on_decisions = note_grant, note
