"""What every `StepEngine` promises (engines/base.py), one test per promise: events, plans, refusals, facts."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from tests.contract.kinds import WIDE, EngineKind, Output, ask, collect, many, run, step_once

from rose.engines.base import Budget, EngineFacts, Partial, Request, StepEngine
from rose.errors import ContextTooLong, QueueFull, RequestRefused

NARROW = Budget(10, 4)
COUNTERS = (
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "preemptions",
    "steps",
    "prompt_tokens",
    "generated_tokens",
)


def test_it_is_a_step_engine_and_idle_at_first(kind: EngineKind) -> None:
    engine = kind.fresh()
    facts = engine.facts()
    assert isinstance(engine, StepEngine)
    assert engine.plan(WIDE) is None
    assert (facts.running, facts.waiting, facts.kv_blocks_used, facts.kv_blocks_cached) == (0, 0, 0, 0)
    assert facts.block_bytes > 0 < facts.block_tokens


# Events


def test_events_come_in_the_order_of_the_plan(kind: EngineKind) -> None:
    engine = kind.fresh()
    for request in many(5):
        engine.add(request)
    while (plan := engine.plan(NARROW)) is not None:
        sampling = [item.request_id for item in plan.items if item.samples]
        assert [event.request_id for event in engine.step(plan)] == sampling


def test_every_request_ends_once_with_length(kind: EngineKind) -> None:
    engine, requests = kind.fresh(), many(6)
    for request in requests:
        engine.add(request)
    outputs = run(engine)  # Output.take asserts that nothing follows the last event
    assert set(outputs) == {request.request_id for request in requests}
    for request in requests:
        output = outputs[request.request_id]
        assert (output.finish_reason, len(output.token_ids)) == ("length", request.sampling.max_tokens)
        assert all(logprob <= 0 for logprob in output.logprobs)
    assert engine.facts().running == engine.facts().waiting == engine.facts().kv_blocks_used == 0


def test_one_token_is_one_event(kind: EngineKind) -> None:
    engine = kind.fresh()
    engine.add(ask(max_tokens=1))
    plan = engine.plan(WIDE)
    assert plan is not None
    (event,) = engine.step(plan)
    assert (event.finish_reason, len(event.token_ids), event.cached_tokens) == ("length", 1, 0)


def test_a_stop_id_ends_the_request_and_is_its_last_token(kind: EngineKind) -> None:
    free = kind.alone(ask(max_tokens=20))
    stop = free.token_ids[6]
    expected = free.token_ids[: free.token_ids.index(stop) + 1]
    stopped = kind.alone(ask(max_tokens=20, stop_token_ids=(stop,)))
    assert (stopped.token_ids, stopped.finish_reason) == (expected, "stop")


def test_min_tokens_hold_a_stop_back(kind: EngineKind) -> None:
    stop = kind.alone(ask(max_tokens=20)).token_ids[1]
    held = kind.alone(ask(max_tokens=20, min_tokens=10, stop_token_ids=(stop,)))
    assert len(held.token_ids) >= 10
    assert (held.token_ids[-1] == stop) == (held.finish_reason == "stop")


def test_end_of_text_stops_unless_ignored(kind: EngineKind) -> None:
    engine = kind.fresh(max_sequences=32)
    for seed in range(32):
        engine.add(ask(f"r{seed}", seed=seed, max_tokens=64, ignore_eos=False))
    stopped = {name: output for name, output in run(engine).items() if output.finish_reason == "stop"}
    assert stopped, "32 x 64 random tokens of a small vocabulary hold an end of text"
    for name, output in stopped.items():
        ignoring = kind.alone(ask(seed=int(name[1:]), max_tokens=64))
        assert ignoring.token_ids[: len(output.token_ids)] == output.token_ids
        assert (ignoring.finish_reason, len(ignoring.token_ids)) == ("length", 64)


def test_top_logprobs_come_with_every_token(kind: EngineKind) -> None:
    engine = kind.fresh()
    engine.add(ask(max_tokens=4, top_logprobs=3))
    while (plan := engine.plan(WIDE)) is not None:
        for event in engine.step(plan):
            (alternatives,) = event.top_logprobs
            logprobs = [logprob for _, logprob in alternatives]
            assert len(alternatives) >= 3
            assert logprobs == sorted(logprobs, reverse=True)


def test_seeds_decide_and_greedy_ignores_them(kind: EngineKind) -> None:
    assert kind.alone(ask(seed=1)).token_ids != kind.alone(ask(seed=2)).token_ids
    greedy = [kind.alone(ask(seed=seed, temperature=0.0)) for seed in (1, 2)]
    assert greedy[0].token_ids == greedy[1].token_ids


def test_priority_then_arrival_decide_who_runs_first(kind: EngineKind) -> None:
    engine = kind.fresh(max_sequences=1)
    for name, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -1)):
        engine.add(ask(name, priority=priority, max_tokens=2))
    assert list(run(engine)) == ["urgent", "first", "second", "late"]


# Plans


@pytest.mark.parametrize("budget", [Budget(1, 1), Budget(3, 2), Budget(7, 64), Budget(64, 1), Budget(512, 3)])
def test_budgets_are_kept_and_change_no_token(kind: EngineKind, budget: Budget) -> None:
    engine, requests = kind.fresh(), many(4)
    for request in requests:
        engine.add(request)
    outputs: dict[str, Output] = {}
    while (plan := step_once(engine, outputs, budget)) is not None:
        assert sum(item.new_tokens for item in plan.items) <= budget.tokens
        assert 0 < len(plan.items) <= budget.sequences
        assert len({item.request_id for item in plan.items}) == len(plan.items)
    for request in requests:
        assert outputs[request.request_id].same_as(kind.alone(request))


@pytest.mark.parametrize("budget", [Budget(64, 2), Budget(2, 64), Budget(1, 1)])
def test_a_budget_below_what_is_running_is_kept_and_starves_nobody(kind: EngineKind, budget: Budget) -> None:
    engine, requests = kind.fresh(), many(5)
    for request in requests:
        engine.add(request)
    outputs = run(engine, steps=2)
    assert engine.facts().running == 5
    said = [len(outputs[request.request_id].token_ids) for request in requests]
    for _ in range(5):
        plan = step_once(engine, outputs, budget)
        assert plan is not None
        assert len(plan.items) == min(budget.tokens, budget.sequences)
    assert all(len(outputs[request.request_id].token_ids) > before for request, before in zip(requests, said))
    run(engine, outputs=outputs)
    for request in requests:
        assert outputs[request.request_id].same_as(kind.alone(request))


def test_an_empty_budget_runs_nothing(kind: EngineKind) -> None:
    engine = kind.fresh()
    engine.add(ask())
    assert engine.plan(Budget(0, 8)) is None
    assert engine.plan(Budget(8, 0)) is None
    assert run(engine)["a"].finish_reason == "length"


def test_a_long_prompt_runs_in_chunks(kind: EngineKind) -> None:
    engine, request = kind.fresh(), ask(prompt_tokens=100)
    engine.add(request)
    outputs: dict[str, Output] = {}
    chunks = []
    while not outputs:
        plan = step_once(engine, outputs, Budget(16, 8))
        assert plan is not None
        chunks.append(plan.items[0])
    assert [chunk.new_tokens for chunk in chunks] == [16] * 6 + [4]
    assert [chunk.samples for chunk in chunks] == [False] * 6 + [True]
    assert run(engine, outputs=outputs)["a"].same_as(kind.alone(request))


def test_decoding_goes_on_while_a_prompt_is_chunked(kind: EngineKind) -> None:
    engine = kind.fresh()
    engine.add(ask("decoding", max_tokens=30))
    outputs = run(engine, steps=1)
    engine.add(ask("long", prompt_tokens=200, prompt=1))
    for _ in range(5):
        before = len(outputs["decoding"].token_ids)
        step_once(engine, outputs, Budget(16, 8))
        assert len(outputs["decoding"].token_ids) == before + 1
    assert "long" not in outputs


def test_a_plan_says_what_is_computed(kind: EngineKind) -> None:
    engine, requests = kind.fresh(), many(4)
    computed = dict.fromkeys((request.request_id for request in requests), 0)
    known = {request.request_id: len(request.prompt_ids) for request in requests}
    for request in requests:
        engine.add(request)
    while (plan := engine.plan(NARROW)) is not None:
        for item in plan.items:
            assert item.context_tokens == computed[item.request_id]
            computed[item.request_id] += item.new_tokens
            assert item.samples == (computed[item.request_id] == known[item.request_id])
        for event in engine.step(plan):
            known[event.request_id] += 1
        features = plan.features
        assert features.new_tokens == sum(item.new_tokens for item in plan.items)
        assert features.kv_read_tokens == sum(item.context_tokens + item.new_tokens for item in plan.items)
        assert features.sequences == len(plan.items)


def test_a_plan_may_be_dropped(kind: EngineKind) -> None:
    engine, requests = kind.fresh(), many(4)
    for request in requests:
        engine.add(request)
    outputs: dict[str, Output] = {}
    while (dropped := engine.plan(NARROW)) is not None:
        again = engine.plan(NARROW)
        assert again is not None
        assert again.items == dropped.items
        assert again.number > dropped.number
        collect(outputs, engine.step(again))
    for request in requests:
        assert outputs[request.request_id].same_as(kind.alone(request))


STALE: dict[str, Callable[[EngineKind, StepEngine], object]] = {
    "add": lambda kind, engine: engine.add(ask("b", prompt=1)),
    "cancel": lambda kind, engine: engine.cancel("a"),
    "evict": lambda kind, engine: engine.evict("a"),
    "swap": lambda kind, engine: kind.swap(engine, "1"),
    "limit_kv": lambda kind, engine: engine.limit_kv(100),
    "plan": lambda kind, engine: engine.plan(NARROW),
    "plan of nothing": lambda kind, engine: engine.plan(Budget(0, 0)),
}


@pytest.mark.parametrize("action", STALE.values(), ids=STALE.keys())
def test_a_stale_plan_is_a_bug(kind: EngineKind, action: Callable[[EngineKind, StepEngine], object]) -> None:
    engine = kind.fresh()
    engine.add(ask())
    plan = engine.plan(WIDE)
    assert plan is not None
    action(kind, engine)
    with pytest.raises(AssertionError):
        engine.step(plan)


def test_a_plan_runs_once(kind: EngineKind) -> None:
    engine = kind.fresh()
    engine.add(ask())
    plan = engine.plan(WIDE)
    assert plan is not None
    engine.step(plan)
    with pytest.raises(AssertionError):
        engine.step(plan)


# Refusals and facts


def too_long(engine: StepEngine) -> Request:
    return ask("bad", 10, max_tokens=engine.facts().max_context_tokens)


REFUSED: dict[str, tuple[type[RequestRefused], Callable[[StepEngine], Request]]] = {
    "longer than the context": (ContextTooLong, too_long),
    "prompt alone longer than the context": (ContextTooLong, lambda engine: ask("bad", 5000)),
    "a negative token id": (RequestRefused, lambda engine: Request("bad", (5, -1))),
    "an id outside the vocabulary": (RequestRefused, lambda engine: Request("bad", (5, 1_000_000))),
    "an id that only 64 bits hold": (RequestRefused, lambda engine: Request("bad", (5, 1 << 40))),
    "an empty prompt": (RequestRefused, lambda engine: Request("bad", ())),
    "an id in use": (RequestRefused, lambda engine: ask("a", prompt=3)),
    "nothing to generate": (RequestRefused, lambda engine: ask("bad", max_tokens=0)),
    "a bad partial": (
        RequestRefused,
        lambda engine: msgspec.structs.replace(ask("bad"), partial=Partial((-3,), (-1.0,))),
    ),
}


@pytest.mark.parametrize("error, make", REFUSED.values(), ids=REFUSED.keys())
def test_a_refused_request_disturbs_nobody(
    kind: EngineKind, error: type[RequestRefused], make: Callable[[StepEngine], Request]
) -> None:
    engine = kind.fresh()
    engine.add(ask())
    outputs = run(engine, steps=3)
    before = engine.facts()
    with pytest.raises(error):
        engine.add(make(engine))
    assert engine.facts() == before
    run(engine, outputs=outputs)
    assert list(outputs) == ["a"]
    assert outputs["a"].same_as(kind.alone(ask()))


def test_a_full_queue_refuses_until_there_is_room(kind: EngineKind) -> None:
    engine = kind.fresh(max_waiting=1, max_sequences=1)
    engine.add(ask("a"))  # for the free seat
    engine.add(ask("b"))
    with pytest.raises(QueueFull) as refusal:
        engine.add(ask("c"))
    assert refusal.value.retry_after_s > 0
    outputs: dict[str, Output] = {}
    while "a" not in outputs or not outputs["a"].finish_reason:
        run(engine, steps=1, outputs=outputs)
    engine.add(ask("c"))
    run(engine, outputs=outputs)
    assert set(outputs) == {"a", "b", "c"}
    assert all(output.same_as(kind.alone(ask())) for output in outputs.values())


def assert_follows(before: EngineFacts, after: EngineFacts) -> None:
    for counter in COUNTERS:
        assert getattr(after, counter) >= getattr(before, counter), counter
    assert after.kv_blocks_used + after.kv_blocks_cached <= after.kv_blocks_limit


def test_counters_only_grow_and_blocks_add_up(kind: EngineKind) -> None:
    engine = kind.fresh(kv_blocks=24)
    outputs: dict[str, Output] = {}
    actions: list[Callable[[], object]] = [
        *(lambda request=request: engine.add(request) for request in many(8, max_tokens=30)),
        *(lambda: step_once(engine, outputs) for _ in range(12)),
        lambda: engine.evict("r1"),
        lambda: engine.cancel("r2"),
        lambda: kind.swap(engine, "1"),
        *(lambda: step_once(engine, outputs) for _ in range(4)),
        lambda: engine.limit_kv(12),
        *(lambda: step_once(engine, outputs) for _ in range(60)),
    ]
    facts = engine.facts()
    for action in actions:
        action()
        assert_follows(facts, engine.facts())
        facts = engine.facts()
    assert facts.generated_tokens > 0 < facts.steps
    assert facts.running == facts.waiting == 0


def test_counters_count(kind: EngineKind) -> None:
    engine, requests = kind.fresh(), many(3)
    for request in requests:
        engine.add(request)
    assert engine.facts().waiting == 3
    outputs = run(engine, steps=1)
    assert engine.facts().running == 3
    run(engine, outputs=outputs)
    facts = engine.facts()
    assert facts.prompt_tokens == sum(len(request.prompt_ids) for request in requests)
    assert facts.generated_tokens == sum(request.sampling.max_tokens for request in requests)
    assert facts.steps == max(len(output.token_ids) for output in outputs.values())
