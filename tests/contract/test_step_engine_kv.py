"""What every `StepEngine` promises (engines/base.py): the prefix cache, leaving, KV memory and weights."""

from __future__ import annotations

import msgspec
import pytest
from tests.contract.kinds import WIDE, EngineKind, Output, ask, collect, many, run, step_once

from rose.api.requests import VersionSpan
from rose.engines.base import Budget, Partial, Request, StepEngine
from rose.errors import ModelError, Unavailable

NARROW = Budget(10, 4)


# The prefix cache


def cached_on_arrival(engine: StepEngine, request: Request) -> int:
    """What the first plan and the first event of a request say was found in the cache."""
    engine.add(request)
    outputs: dict[str, Output] = {}
    plan = engine.plan(WIDE)
    assert plan is not None
    (planned,) = [item.context_tokens for item in plan.items if item.request_id == request.request_id]
    collect(outputs, engine.step(plan))
    assert outputs[request.request_id].cached_tokens == planned
    engine.cancel(request.request_id)
    return planned


def test_the_same_prompt_is_found_again(kind: EngineKind) -> None:
    engine, request = kind.fresh(), ask(prompt_tokens=50)
    engine.add(request)
    run(engine)
    before = engine.facts()
    assert before.kv_blocks_cached > 0
    engine.add(msgspec.structs.replace(request, request_id="again"))
    output = run(engine)["again"]
    whole_blocks = 49 // before.block_tokens * before.block_tokens
    assert output.cached_tokens == whole_blocks
    assert engine.facts().prefix_hit_tokens == before.prefix_hit_tokens + whole_blocks
    assert engine.facts().prefix_query_tokens == before.prefix_query_tokens + 50
    assert output.same_as(kind.alone(request))


def test_the_last_token_of_a_prompt_is_always_computed(kind: EngineKind) -> None:
    engine = kind.fresh()
    size = engine.facts().block_tokens
    engine.add(ask(prompt_tokens=2 * size))
    run(engine)
    assert cached_on_arrival(engine, ask("again", prompt_tokens=2 * size)) == size


def test_it_is_shared_with_requests_still_running(kind: EngineKind) -> None:
    engine = kind.fresh()
    size = engine.facts().block_tokens
    engine.add(ask(prompt_tokens=2 * size + 1, max_tokens=30))
    outputs = run(engine, steps=3)
    used = engine.facts().kv_blocks_used
    engine.add(ask("b", prompt_tokens=2 * size + 1, seed=9))
    run(engine, steps=1, outputs=outputs)
    assert outputs["b"].cached_tokens == 2 * size
    assert engine.facts().kv_blocks_used == used + 1
    run(engine, outputs=outputs)
    assert outputs["a"].same_as(kind.alone(ask(prompt_tokens=2 * size + 1, max_tokens=30)))
    assert outputs["b"].same_as(kind.alone(ask(prompt_tokens=2 * size + 1, seed=9)))


def test_the_next_turn_finds_generated_tokens(kind: EngineKind) -> None:
    engine, first = kind.fresh(), ask(prompt_tokens=20, max_tokens=40)
    size = engine.facts().block_tokens
    engine.add(first)
    said = run(engine)["a"].token_ids
    second = msgspec.structs.replace(first, request_id="b", prompt_ids=(*first.prompt_ids, *said, 5, 6, 7))
    assert cached_on_arrival(engine, second) == 59 // size * size


def test_tenants_never_share(kind: EngineKind) -> None:
    engine = kind.fresh()
    engine.add(ask(prompt_tokens=64, tenant="one"))
    run(engine)
    assert cached_on_arrival(engine, ask("b", prompt_tokens=64, tenant="two")) == 0
    assert cached_on_arrival(engine, ask("c", prompt_tokens=64, tenant="")) == 0
    assert cached_on_arrival(engine, ask("d", prompt_tokens=64, tenant="one")) > 0


def test_weight_versions_never_share(kind: EngineKind) -> None:
    engine = kind.fresh()
    engine.add(ask(prompt_tokens=64))
    run(engine)
    kind.swap(engine, "1")
    assert cached_on_arrival(engine, ask("b", prompt_tokens=64)) == 0


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_kv_of_older_weights_is_never_found_under_new_ones(kind: EngineKind, steps: int) -> None:
    engine = kind.fresh()
    engine.add(ask(prompt_tokens=64, max_tokens=40))
    outputs = run(engine, NARROW, steps=steps)  # the first leaves the first block half full, the last has decoded
    kind.swap(engine, "1")
    run(engine, outputs=outputs)
    assert outputs["a"].finish_reason == "length"
    assert cached_on_arrival(engine, ask("b", prompt_tokens=64)) == 0


# Leaving: evict and cancel


@pytest.mark.parametrize("planned", [False, True], ids=["between steps", "with a plan made"])
def test_evicted_anywhere_it_goes_on_elsewhere(kind: EngineKind, planned: bool) -> None:
    request = ask(prompt_tokens=33, max_tokens=14)
    reference = kind.alone(request)
    for steps in range(4 + 13):  # 33 tokens in 4 chunks, the last of which gives the first token
        engine = kind.fresh()
        engine.add(request)
        before = run(engine, NARROW, steps=steps).get("a", Output())
        if planned:
            engine.plan(NARROW)
        partial = engine.evict("a")
        assert partial == before.partial()
        assert engine.facts().kv_blocks_used == engine.facts().running == 0
        other = kind.fresh()
        other.add(msgspec.structs.replace(request, partial=partial))
        assert before.then(run(other)["a"]).same_as(reference)


def test_a_request_may_move_after_every_token(kind: EngineKind) -> None:
    request = ask(prompt_tokens=40, max_tokens=10)
    partial, engines = Partial(), [kind.fresh(), kind.fresh()]
    for move in range(9):
        engine = engines[move % 2]
        engine.add(msgspec.structs.replace(request, partial=partial))
        run(engine, steps=1)
        partial = engine.evict("a")
        assert len(partial.token_ids) == move + 1
    reference = kind.alone(request)
    assert list(partial.token_ids) == reference.token_ids[:9]
    assert list(partial.logprobs) == reference.logprobs[:9]
    assert partial.spans == (VersionSpan(engines[0].facts().version, 0, 9),)


def test_a_waiting_request_keeps_what_it_brought(kind: EngineKind) -> None:
    engine = kind.fresh()
    partial = Partial((5, 6), (-1.0, -2.0), (VersionSpan("old", 0, 2),))
    engine.add(msgspec.structs.replace(ask(), partial=partial))
    assert engine.evict("a") == partial


def test_eviction_leaves_the_others_alone(kind: EngineKind) -> None:
    engine, requests = kind.fresh(), many(4)
    for request in requests:
        engine.add(request)
    outputs = run(engine, NARROW, steps=9)
    engine.evict("r1")
    run(engine, outputs=outputs)
    for request in requests:
        if request.request_id != "r1":
            assert outputs[request.request_id].same_as(kind.alone(request))


def test_cancel_forgets(kind: EngineKind) -> None:
    engine = kind.fresh()
    engine.add(ask())
    engine.add(ask("waiting", prompt=1))
    run(engine, Budget(8, 1), steps=1)
    assert engine.cancel("a")
    assert engine.cancel("waiting")
    assert engine.plan(WIDE) is None
    facts = engine.facts()
    assert facts.running == facts.waiting == facts.kv_blocks_used == 0
    assert not engine.cancel("a")
    with pytest.raises(KeyError):
        engine.evict("a")
    engine.add(ask())
    assert run(engine)["a"].same_as(kind.alone(ask()))


# KV memory


def test_running_out_of_blocks_preempts_and_loses_nothing(kind: EngineKind) -> None:
    engine, requests = kind.fresh(kv_blocks=10), many(6, prompt_tokens=20, max_tokens=40)
    for request in requests:
        engine.add(request)
    outputs: dict[str, Output] = {}
    preempted = 0
    while (plan := step_once(engine, outputs)) is not None:
        preempted += len(plan.preempted)
        assert engine.facts().kv_blocks_used + engine.facts().kv_blocks_cached <= 10
    assert engine.facts().preemptions == preempted > 0
    for request in requests:
        assert outputs[request.request_id].same_as(kind.alone(request))


def test_a_dropped_plan_that_preempted_loses_nothing(kind: EngineKind) -> None:
    engine, requests = kind.fresh(kv_blocks=10), many(6, prompt_tokens=20, max_tokens=40)
    for request in requests:
        engine.add(request)
    outputs: dict[str, Output] = {}
    while engine.plan(WIDE) is not None:
        step_once(engine, outputs)
    for request in requests:
        assert outputs[request.request_id].same_as(kind.alone(request))


def test_a_lower_limit_evicts_and_holds(kind: EngineKind) -> None:
    engine, requests = kind.fresh(), many(6, prompt_tokens=30, max_tokens=40)
    for request in requests:
        engine.add(request)
    outputs = run(engine, steps=10)
    limit = engine.facts().kv_blocks_used // 2
    events = engine.limit_kv(limit)
    collect(outputs, events)
    evicted = {event.request_id for event in events}
    assert evicted
    assert all((event.finish_reason, event.token_ids) == ("abort", ()) for event in events)
    assert engine.facts().kv_blocks_limit == limit
    while step_once(engine, outputs) is not None:
        assert engine.facts().kv_blocks_used + engine.facts().kv_blocks_cached <= limit
    for request in requests:
        output = outputs[request.request_id]
        if request.request_id in evicted:
            other = kind.fresh()
            other.add(msgspec.structs.replace(request, partial=output.partial()))
            output = output.then(run(other)[request.request_id])
        assert output.same_as(kind.alone(request))


def test_a_limit_of_nothing_evicts_everything_and_may_be_raised_again(kind: EngineKind) -> None:
    engine, requests = kind.fresh(), many(3)
    before = engine.facts().kv_blocks_limit
    for request in requests:
        engine.add(request)
    run(engine, steps=2)
    events = engine.limit_kv(0)
    assert {event.request_id for event in events} == {request.request_id for request in requests}
    facts = engine.facts()
    assert facts.running == facts.waiting == facts.kv_blocks_used == facts.kv_blocks_cached == 0
    assert engine.plan(WIDE) is None
    with pytest.raises(Unavailable):  # not for good: the limit may be raised
        engine.add(requests[0])
    assert not engine.limit_kv(before)
    engine.add(requests[0])
    assert run(engine)["r0"].same_as(kind.alone(requests[0]))


def test_a_lower_limit_drops_cached_blocks_first(kind: EngineKind) -> None:
    engine = kind.fresh()
    engine.add(ask(prompt_tokens=100))
    run(engine)
    engine.add(ask("b", prompt=1))
    outputs = run(engine, steps=2)
    facts = engine.facts()
    assert facts.kv_blocks_cached > 2
    assert not engine.limit_kv(facts.kv_blocks_used + 2)
    assert engine.facts().kv_blocks_cached == 2
    assert run(engine, outputs=outputs)["b"].same_as(kind.alone(ask(prompt=1)))


def test_a_limit_that_fits_evicts_nobody(kind: EngineKind) -> None:
    engine = kind.fresh()
    engine.add(ask())
    outputs = run(engine, steps=2)
    assert not engine.limit_kv(16)
    assert run(engine, outputs=outputs)["a"].same_as(kind.alone(ask()))


# Weights


def test_a_swap_shows_in_events_and_spans(kind: EngineKind) -> None:
    engine = kind.fresh()
    old = engine.facts().version
    engine.add(ask(max_tokens=12))
    outputs = run(engine, steps=5)
    staged = engine.stage("1", kind.weights)
    assert engine.facts().version == old
    engine.swap(staged)
    assert engine.facts().version == "1"
    run(engine, steps=4, outputs=outputs)
    assert outputs["a"].versions == [old] * 5 + ["1"] * 4
    partial = engine.evict("a")
    assert partial.spans == (VersionSpan(old, 0, 5), VersionSpan("1", 5, 9))
    assert partial == outputs["a"].partial()


def test_a_swap_before_the_first_step_is_as_if_never_otherwise(kind: EngineKind) -> None:
    engine, other = kind.fresh(), kind.fresh()
    engine.add(ask())
    kind.swap(engine, "1")
    kind.swap(other, "1")
    other.add(ask())
    output = run(engine)["a"]
    assert output.same_as(run(other)["a"])
    assert set(output.versions) == {"1"}


def test_weights_that_cannot_be_staged_change_nothing(kind: EngineKind) -> None:
    engine = kind.fresh()
    engine.add(ask())
    outputs = run(engine, steps=3)
    before = engine.facts()
    with pytest.raises(ModelError):
        engine.stage("1", kind.bad_weights)
    assert engine.facts() == before
    assert run(engine, outputs=outputs)["a"].same_as(kind.alone(ask()))
