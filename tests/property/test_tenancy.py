"""Two real models on one pool of pages, in any order: nobody's tokens change by what the memory policy takes or moves.

Serving asks and rollouts give way, by moving their blocks together or by being evicted; what an evicted rollout said
stands, and everybody else ends as if alone. Prompts share prefixes, so that blocks with several owners move too.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.contract.kinds import EngineKind, Output, ask, collect, embedded_kind, first_core

from rose.config.server_settings import EngineSettings
from rose.core.memory import MemoryPolicy
from rose.device import tenancy
from rose.device.pages import PagePool
from rose.device.tenancy import SharedMemory
from rose.engines.base import Budget, Request
from rose.engines.embedded.engine import EmbeddedEngine
from rose.engines.embedded.runner import block_bytes
from rose.errors import RequestRefused, Unavailable
from rose.models.model_folder import served_spec
from rose.models.presets import write_preset

PAGES, PAGE_BLOCKS = 10, 4
SETTINGS = EngineSettings(kv_memory_mb=4, max_context_tokens=256, max_sequences=6, max_waiting=6)
TEMPLATES = [
    ask(prompt_tokens=1, max_tokens=40),
    ask(prompt_tokens=17, max_tokens=20, seed=1),
    ask(prompt_tokens=40, max_tokens=9, seed=2),
    ask(prompt_tokens=40, max_tokens=30, temperature=0.0, tenant="other"),
    ask(prompt_tokens=90, max_tokens=40, prompt=1, seed=3),
    ask(prompt_tokens=90, max_tokens=20, prompt=1, seed=4),
]
SIDES = st.sampled_from(["serving", "rollout"])
BUDGETS = st.sampled_from([Budget(24, 3), Budget(64, 2), Budget(512, 64)])


class TenantsHold(RuleBasedStateMachine):
    def __init__(self, kind: EngineKind, folder: Path) -> None:
        super().__init__()
        self.kind = kind
        size, self.now_s = block_bytes(served_spec(folder)), 0.0
        pages = PagePool(PAGES, PAGE_BLOCKS * size)
        self.memory = SharedMemory(
            pages,
            MemoryPolicy(PAGES),
            serving_block_bytes=size,
            rollout_block_bytes=size,
            now_s=lambda: self.now_s,
        )
        tenants = {"serving": self.memory.serving, "rollout": self.memory.rollout}
        self.engines = {
            side: EmbeddedEngine.load(folder, SETTINGS, device=first_core(), memory=tenant.memory)
            for side, tenant in tenants.items()
        }
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, Output] = {}
        self.memory.lend_to(self.engines["rollout"].scheduler, lambda events: collect(self.outputs, events))

    @initialize(templates=st.lists(st.sampled_from(TEMPLATES), min_size=3, max_size=6), steps=st.integers(1, 40))
    def start(self, templates: list[Request], steps: int) -> None:
        for template in templates:
            self.add("rollout", template, 1)
        self.step("rollout", steps, Budget(512, 64))

    @rule(side=SIDES, template=st.sampled_from(TEMPLATES), times=st.integers(1, 3))
    def add(self, side: str, template: Request, times: int) -> None:
        for _ in range(times):
            request = msgspec.structs.replace(template, request_id=f"{side}{len(self.requests)}")
            try:
                self.engines[side].add(request)
            except (RequestRefused, Unavailable):  # more wait than may, or it does not fit now
                return
            self.requests[request.request_id], self.outputs[request.request_id] = request, Output()

    @rule(side=SIDES, steps=st.integers(1, 40), budget=BUDGETS)
    def step(self, side: str, steps: int, budget: Budget) -> None:
        for _ in range(steps):
            self.memory.observe()
            plan = self.engines[side].plan(budget)
            if plan is not None:
                assert not (side == "serving" and plan.preempted and self.memory.rollout.share.held)
                collect(self.outputs, self.engines[side].step(plan))

    @precondition(lambda self: self.memory.rollout.share.held)
    @rule(pages=st.integers(1, 3))
    def owner_wants_pages(self, pages: int) -> None:
        self.memory.owner_limit_pages = max(0, self.memory.rollout.share.held - pages)
        self.memory.observe()
        self.memory.owner_limit_pages = None

    @rule()
    def blocks_move_together(self) -> None:
        self.memory.gather(self.engines["rollout"].scheduler, self.memory.rollout.memory.pool.pages_held)

    @rule(seconds=st.sampled_from([1, 20, 40]))
    def time_passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            self.memory.observe()

    @precondition(lambda self: any(output.finish_reason is None for output in self.outputs.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        open_ones = sorted(name for name, output in self.outputs.items() if output.finish_reason is None)
        name = data.draw(st.sampled_from(open_ones))
        assert self.engines["serving" if name.startswith("serving") else "rollout"].cancel(name)
        del self.requests[name], self.outputs[name]

    @invariant()
    def everything_has_one_place(self) -> None:
        self.memory.pages.check()
        for engine in self.engines.values():
            engine.scheduler.check()
        assert self.memory.rollout.share.held <= self.memory.rollout.share.budget_pages

    @invariant()
    def what_was_said_stands(self) -> None:
        for name, output in self.outputs.items():
            reference = self.kind.alone(self.requests[name])
            assert output.token_ids == reference.token_ids[: len(output.token_ids)]
            assert output.logprobs == reference.logprobs[: len(output.logprobs)]

    def teardown(self) -> None:
        for side in ("serving", "rollout"):
            while (plan := self.engines[side].plan(Budget(512, 64))) is not None:
                collect(self.outputs, self.engines[side].step(plan))
            self.everything_has_one_place()
        for name, output in self.outputs.items():
            assert output.finish_reason is not None, f"{name} never ended"
            assert output.finish_reason == "abort" or output.same_as(self.kind.alone(self.requests[name]))
            assert name.startswith("rollout") or output.finish_reason != "abort", "serving was evicted"
        for engine in self.engines.values():
            engine.close()
        for tenant in (self.memory.serving, self.memory.rollout):
            tenant.memory.pool.forget_digests()
            tenant.memory.pool.shrink(PAGES)
            tenant.share.memory.free()
        self.memory.pages.close()


@pytest.mark.parametrize("moved_blocks_max", [0, 3, 1000])
def test_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved_blocks_max: int) -> None:
    folder = write_preset("frozenlake-1m", tmp_path / "tiny", seed=3)
    monkeypatch.setattr(tenancy, "MOVED_BYTES_MAX", moved_blocks_max * block_bytes(served_spec(folder)))
    kind = embedded_kind(folder, folder)
    examples = max(1, settings().max_examples // 3)
    run_state_machine_as_test(lambda: TenantsHold(kind, folder), settings=settings(max_examples=examples))
