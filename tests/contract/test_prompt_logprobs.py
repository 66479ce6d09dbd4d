"""What every `StepEngine` promises of a prompt's log-probabilities: no batching changes them, and they come once."""

from __future__ import annotations

import msgspec
import pytest
from tests.contract.kinds import WIDE, EngineKind, Output, ask, many, run

from rose.api.requests import PromptLogprob, Sampling
from rose.engines.base import Budget, Partial, Request, StepEngine

NARROW = Budget(7, 3)


def scores(engine: StepEngine, request_id: str = "a", budget: Budget = WIDE) -> tuple[PromptLogprob, ...]:
    """Run to the end. Return the log-probabilities of one request's prompt, which only its first event may bring."""
    events = []
    while (plan := engine.plan(budget)) is not None:
        events += [event for event in engine.step(plan) if event.request_id == request_id]
    assert not any(event.prompt_logprobs for event in events[1:])
    return events[0].prompt_logprobs


def alone(kind: EngineKind, request: Request) -> tuple[PromptLogprob, ...]:
    engine = kind.fresh()
    engine.add(request)
    return scores(engine, request.request_id)


def test_each_token_but_the_first_has_a_logprob_a_rank_and_the_best(kind: EngineKind) -> None:
    found = alone(kind, ask(prompt_tokens=40, prompt_logprobs=3))
    assert len(found) == 39
    for logprob, rank, best in found:
        values = [value for _, value in best]
        assert logprob <= 0 and rank >= 1
        assert len(values) == 3 and values == sorted(values, reverse=True)
    assert [entry[:2] for entry in alone(kind, ask(prompt_tokens=40, prompt_logprobs=0))] == [
        entry[:2] for entry in found
    ]


def test_without_being_asked_there_are_none(kind: EngineKind) -> None:
    assert alone(kind, ask()) == ()


def test_they_do_not_depend_on_chunks_and_neighbours(kind: EngineKind) -> None:
    request = ask("scored", 70, prompt=1, prompt_logprobs=2)
    engine = kind.fresh()
    for other in many(4):
        engine.add(other)
    engine.add(request)
    assert scores(engine, "scored", NARROW) == alone(kind, request)


def test_a_cached_prefix_is_computed_again(kind: EngineKind) -> None:
    request = ask(prompt_tokens=50, prompt_logprobs=1)
    engine = kind.fresh()
    engine.add(msgspec.structs.replace(request, request_id="before"))
    run(engine)
    engine.add(request)
    hits = engine.facts().prefix_hit_tokens
    assert scores(engine) == alone(kind, request)
    assert engine.facts().prefix_hit_tokens == hits


def test_the_answer_is_the_same_with_and_without(kind: EngineKind) -> None:
    assert kind.alone(ask(prompt_logprobs=2)).same_as(kind.alone(ask()))


def test_a_preempted_prompt_has_each_of_them_once(kind: EngineKind) -> None:
    request = ask("scored", 60, prompt=1, prompt_logprobs=1, max_tokens=4)
    engine = kind.fresh(kv_blocks=7)  # for both at first; the longer one grows into the place of the other
    engine.add(ask("long", 30, max_tokens=40))
    while engine.facts().generated_tokens == 0:
        plan = engine.plan(WIDE)
        assert plan is not None
        engine.step(plan)
    engine.add(request)
    found = scores(engine, "scored", Budget(3, 4))
    assert engine.facts().preemptions > 0
    assert found == alone(kind, request)


def test_a_request_that_continues_does_not_bring_them_again(kind: EngineKind) -> None:
    request = ask(prompt_logprobs=1, max_tokens=8)
    whole = kind.alone(ask(max_tokens=8))
    partial = Partial(tuple(whole.token_ids[:3]), tuple(whole.logprobs[:3]))
    engine = kind.fresh()
    engine.add(msgspec.structs.replace(request, partial=partial))
    assert scores(engine) == ()


def test_new_weights_within_a_prompt_begin_it_again(kind: EngineKind) -> None:
    request = ask(prompt_tokens=60, prompt_logprobs=1)
    engine, fresh = kind.fresh(), kind.fresh()
    engine.add(request)
    for _ in range(3):
        plan = engine.plan(Budget(8, 4))
        assert plan is not None and not engine.step(plan)
    for each in (engine, fresh):
        kind.swap(each, "v1")
    fresh.add(request)
    assert scores(engine) == scores(fresh)


def test_a_step_counts_the_logits_of_a_prompt_as_work(kind: EngineKind) -> None:
    engine = kind.fresh()
    engine.add(ask(prompt_tokens=60, prompt_logprobs=0))
    plan = engine.plan(Budget(32, 4))
    assert plan is not None
    assert [(item.new_tokens, item.scored_tokens) for item in plan.items] == [(16, 16)]
    assert plan.features.new_tokens == 32


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_scoring_an_answer_gives_the_log_probabilities_that_it_was_sampled_with(
    kind: EngineKind, temperature: float
) -> None:
    if kind.name == "simulated":
        pytest.skip("its log-probabilities are made up")
    request = ask(max_tokens=20, temperature=temperature)
    answer: Output = kind.alone(request)
    ids = (*request.prompt_ids, *answer.token_ids)
    found = alone(kind, Request("a", ids, Sampling(max_tokens=1, prompt_logprobs=0)))
    assert [logprob for logprob, _, _ in found[-20:]] == answer.logprobs
    assert all(rank == 1 for _, rank, _ in found[-20:]) == (temperature == 0.0)
