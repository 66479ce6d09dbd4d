"""Whatever order things come in, no block is owned twice or lost, and every request says what it says alone.

Two engines of one kind take requests, step, drop plans, evict, hand requests to each other, forget, swap weights, have
their blocks moved together and their memory cut. Swaps load the same weights under another name, so no token may
change by anything done here.
"""

from __future__ import annotations

from typing import Any

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
from tests.contract.kinds import EngineKind, Output, ask, collect, embedded_kind, gather, simulated_kind

from rose.engines.base import Budget, Request
from rose.errors import QueueFull, Unavailable

BLOCKS = 24
MAX_SEQUENCES = 5
MAX_WAITING = 6
SWAPS_MAX = 2  # each empties a prefix cache; with more of them caches would hardly fill
ENGINES = st.integers(0, 1)
BUDGETS = st.builds(Budget, st.sampled_from([0, 1, 3, 17, 64, 512]), st.sampled_from([0, 1, 2, 64]))
TEMPLATES = [
    ask(prompt_tokens=1, max_tokens=3),
    ask(prompt_tokens=17, max_tokens=20, seed=1),
    ask(prompt_tokens=40, max_tokens=9, seed=2),
    ask(prompt_tokens=40, max_tokens=30, temperature=0.0, tenant="other"),
    ask(prompt_tokens=48, max_tokens=17, prompt=1, priority=-1),
    ask(prompt_tokens=90, max_tokens=40, prompt=1, seed=3, tenant="other"),
    ask(prompt_tokens=150, max_tokens=60, prompt=2, seed=4, priority=1),
    ask(prompt_tokens=60, max_tokens=40, prompt=1, seed=5, ignore_eos=False, stop_token_ids=(11, 12, 13, 14)),
]


class EnginesHold(RuleBasedStateMachine):
    """`here` says which engine holds a request; `away` holds those that were evicted and wait to go on."""

    def __init__(self, kind: EngineKind) -> None:
        super().__init__()
        self.kind = kind
        self.engines: list[Any] = []
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, Output] = {}
        self.here: dict[str, int] = {}
        self.away: list[str] = []
        self.added = self.swaps = 0

    @initialize(requests=st.lists(st.sampled_from(TEMPLATES), min_size=2, max_size=6))
    def start(self, requests: list[Request]) -> None:
        self.engines = [
            self.kind.fresh(kv_blocks=BLOCKS, max_sequences=MAX_SEQUENCES, max_waiting=MAX_WAITING) for _ in range(2)
        ]
        for request in requests:
            self.add(0, request)

    @rule(engine=ENGINES, template=st.sampled_from(TEMPLATES))
    def add(self, engine: int, template: Request) -> None:
        request = msgspec.structs.replace(template, request_id=f"r{self.added}")
        self.added += 1
        self.requests[request.request_id], self.outputs[request.request_id] = request, Output()
        if not self._offer(engine, request):
            del self.requests[request.request_id], self.outputs[request.request_id]

    @precondition(lambda self: self.away)
    @rule(engine=ENGINES, data=st.data())
    def resume(self, engine: int, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.away))
        if self._offer(engine, self._with_partial(name)):
            self.away.remove(name)

    @rule(engine=ENGINES, budget=BUDGETS)
    def step(self, engine: int, budget: Budget) -> None:
        plan = self.engines[engine].plan(budget)
        if plan is None:
            return
        assert sum(item.new_tokens for item in plan.items) <= budget.tokens
        assert len(plan.items) <= budget.sequences
        self._take(engine, self.engines[engine].step(plan))

    @rule(engine=ENGINES, steps=st.integers(2, 30), budget=st.sampled_from([Budget(24, 3), Budget(512, 64)]))
    def run_a_while(self, engine: int, steps: int, budget: Budget) -> None:
        for _ in range(steps):
            self.step(engine, budget)

    @rule(engine=ENGINES, budget=BUDGETS)
    def drop_a_plan(self, engine: int, budget: Budget) -> None:
        self.engines[engine].plan(budget)

    @rule(engine=ENGINES, share=st.sampled_from([0.5, 1.0]), blocks_max=st.sampled_from([1, 3, BLOCKS, BLOCKS]))
    def gather(self, engine: int, share: float, blocks_max: int) -> None:
        pool = self.engines[engine].scheduler.pool
        before = pool.pages_pinned
        moved = gather(self.engines[engine], pool.pages_held - int(before * share) + 1, blocks_max)
        assert moved <= blocks_max
        assert pool.pages_pinned < before if moved else pool.pages_pinned == before

    @rule(engine=ENGINES, budget=BUDGETS, blocks_max=st.sampled_from([3, BLOCKS]))
    def gather_between_plan_and_step(self, engine: int, budget: Budget, blocks_max: int) -> None:
        plan = self.engines[engine].plan(budget)
        gather(self.engines[engine], self.engines[engine].scheduler.pool.pages_held, blocks_max)
        if plan is not None:
            self._take(engine, self.engines[engine].step(plan))

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.here)))
        partial = self.engines[self.here.pop(name)].evict(name)
        assert partial == self.outputs[name].partial()
        self.away.append(name)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.here)))
        assert self.engines[self.here.pop(name)].cancel(name)
        del self.requests[name], self.outputs[name]

    @precondition(lambda self: self.swaps < SWAPS_MAX)
    @rule(engine=ENGINES)
    def swap(self, engine: int) -> None:
        self.swaps += 1
        self.kind.swap(self.engines[engine], f"v{self.swaps}")

    @rule(engine=ENGINES, blocks=st.sampled_from([0, 2, 6, 12, BLOCKS, BLOCKS, BLOCKS]))
    def limit_kv(self, engine: int, blocks: int) -> None:
        self._take(engine, self.engines[engine].limit_kv(blocks))
        assert self.engines[engine].facts().kv_blocks_limit == blocks

    @invariant()
    def blocks_have_one_place(self) -> None:
        for engine in self.engines:
            engine.scheduler.check()
            facts = engine.facts()
            assert facts.kv_blocks_used + facts.kv_blocks_cached <= facts.kv_blocks_limit

    @invariant()
    def nobody_is_lost(self) -> None:
        for number, engine in enumerate(self.engines):
            facts = engine.facts()
            assert facts.running + facts.waiting == sum(where == number for where in self.here.values())

    @invariant()
    def what_was_said_stands(self) -> None:
        for name, output in self.outputs.items():
            reference = self.kind.alone(self.requests[name])
            assert output.token_ids == reference.token_ids[: len(output.token_ids)]
            assert output.logprobs == reference.logprobs[: len(output.logprobs)]

    def teardown(self) -> None:
        """With memory and time enough, everybody ends, once, as if nothing had happened."""
        while self.here or self.away:
            for number, engine in enumerate(self.engines):
                self._take(number, engine.limit_kv(BLOCKS))
                while (plan := engine.plan(Budget(512, 64))) is not None:
                    self._take(number, engine.step(plan))
            self.away = [name for name in self.away if not self._offer(0, self._with_partial(name))]
        for name, output in self.outputs.items():
            assert output.same_as(self.kind.alone(self.requests[name]))
        for engine in self.engines:
            assert engine.facts().kv_blocks_used == 0

    def _offer(self, engine: int, request: Request) -> bool:
        facts = self.engines[engine].facts()
        tokens = len(request.prompt_ids) + request.sampling.max_tokens
        fits = tokens <= facts.kv_blocks_limit * facts.block_tokens
        try:
            self.engines[engine].add(request)
        except QueueFull:
            assert facts.waiting >= MAX_WAITING + MAX_SEQUENCES - facts.running
            return False
        except Unavailable:
            assert not fits
            return False
        assert fits
        self.here[request.request_id] = engine
        self.outputs[request.request_id].goes_on()
        return True

    def _with_partial(self, name: str) -> Request:
        return msgspec.structs.replace(self.requests[name], partial=self.outputs[name].partial())

    def _take(self, engine: int, events: Any) -> None:
        for event in events:
            assert self.here[event.request_id] == engine
            if event.finish_reason is not None:
                del self.here[event.request_id]
            if event.finish_reason == "abort":
                self.away.append(event.request_id)
        collect(self.outputs, events)


def test_any_order_on_the_simulated_engine() -> None:
    _run(simulated_kind(), examples=3 * settings().max_examples)


def test_any_order_on_the_embedded_engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    from rose.models.presets import write_preset

    folder = write_preset("frozenlake-1m", tmp_path_factory.mktemp("model") / "tiny", seed=3)
    _run(embedded_kind(folder, folder), examples=settings().max_examples // 5)


def _run(kind: EngineKind, examples: int) -> None:
    run_state_machine_as_test(lambda: EnginesHold(kind), settings=settings(max_examples=examples))
