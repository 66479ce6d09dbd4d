"""The simulated engine beyond its contract: where tokens and time come from."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.fake_engine import FakeEngine

from rose.clock import VirtualClock, run_virtual
from rose.core.facts import StepFeatures
from rose.engines.base import Budget, Request, Sampling, TokenEvent
from rose.engines.profiles import load_profile
from rose.engines.simulated import SimulatedEngine
from rose.engines.token_stream import TokenStream
from rose.errors import Unavailable

PROFILE = load_profile("h800-qwen3-8b")
WIDE = Budget(512, 64)


def ask(request_id: str, prompt_tokens: int = 100, *, max_tokens: int = 5, seed: int = 1) -> Request:
    return Request(request_id, tuple(range(prompt_tokens)), Sampling(max_tokens=max_tokens, ignore_eos=True, seed=seed))


def tokens_of(engine: SimulatedEngine, budget: Budget = WIDE) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {}
    while (plan := engine.plan(budget)) is not None:
        for event in engine.step(plan):
            said.setdefault(event.request_id, []).extend(event.token_ids)
    return said


def test_a_step_costs_what_the_profile_says() -> None:
    engine = SimulatedEngine(PROFILE)
    engine.add(ask("a"))
    plan = engine.plan(WIDE)
    assert plan is not None
    promised_s = engine.cost_s(plan)
    engine.step(plan)
    assert engine.last_step_s == promised_s == PROFILE.step_s(StepFeatures(100, 100, 5050, 1))


def test_blocks_and_context_come_from_the_profile() -> None:
    facts = SimulatedEngine(PROFILE).facts()
    assert facts.kv_blocks_limit == PROFILE.kv_blocks
    assert (facts.block_tokens, facts.block_bytes) == (PROFILE.block_tokens, PROFILE.block_bytes)
    assert facts.max_context_tokens == PROFILE.max_context_tokens
    assert SimulatedEngine(PROFILE, kv_blocks=7).facts().kv_blocks_limit == 7


def test_tokens_depend_on_seed_and_position_only() -> None:
    engine = SimulatedEngine(PROFILE)
    for request in (ask("a"), ask("b"), ask("other seed", seed=2), ask("one later", 101)):
        engine.add(request)
    said = tokens_of(engine, Budget(64, 3))
    assert said["a"] == said["b"] != said["other seed"]
    assert said["one later"][:-1] == said["a"][1:]


def test_tokens_spread_over_the_vocabulary() -> None:
    engine = SimulatedEngine(PROFILE, vocabulary=10)
    engine.add(Request("a", (1,), Sampling(max_tokens=2000, ignore_eos=True)))
    said = tokens_of(engine)["a"]
    assert {said.count(token) // 100 for token in range(10)} <= {1, 2}


def test_end_of_text_comes_by_chance_and_is_settable() -> None:
    engine = SimulatedEngine(PROFILE, vocabulary=10, eos_token_ids=[3])
    engine.add(Request("a", (1,), Sampling(max_tokens=2000)))
    said = tokens_of(engine)["a"]
    assert said.index(3) == len(said) - 1 < 1999


def fake() -> FakeEngine:
    engine = SimulatedEngine(PROFILE)
    return FakeEngine(engine, step_cost_s=engine.cost_s)


@pytest.mark.parametrize("prompt_tokens, steps", [(100, 1), (512, 1), (1200, 3)])
def test_time_to_first_token_in_virtual_time(prompt_tokens: int, steps: int) -> None:
    clock = VirtualClock()

    async def story() -> tuple[float, float]:
        client, stream = fake(), TokenStream()
        started_s = clock.now_s()
        client.submit([ask("a", prompt_tokens, max_tokens=2)], stream)
        await stream.take()
        first_s = clock.now_s() - started_s
        await stream.take()
        return first_s, clock.now_s() - started_s - first_s

    first_s, next_s = run_virtual(story(), clock)
    decode = StepFeatures(1, prompt_tokens + 1, prompt_tokens + 1, 1)
    assert next_s == pytest.approx(PROFILE.step_s(decode))
    assert first_s > steps * PROFILE.fixed_s + prompt_tokens * PROFILE.per_new_token_s


def test_a_day_passes_quickly_and_the_same_every_time() -> None:
    async def story(clock: VirtualClock) -> list[tuple[float, str]]:
        engine = fake()
        ends: list[tuple[float, str]] = []

        async def client(number: int) -> None:
            await clock.sleep_s(number * 3600.0)
            stream = TokenStream()
            engine.submit([ask(f"r{number}", 50 + number, max_tokens=20, seed=number)], stream)
            ended: list[TokenEvent] = []
            while not ended:
                ended = [event for event in await stream.take() if event.finish_reason]
            ends.append((clock.now_s(), ended[0].request_id))

        await asyncio.gather(*(client(number) for number in range(24)))
        return ends

    days = []
    for _ in range(2):
        clock = VirtualClock()
        days.append(run_virtual(story(clock), clock))
    assert days[0] == days[1]
    assert [name for _, name in days[0]] == [f"r{number}" for number in range(24)]


def test_a_bug_in_the_engine_ends_the_fake_engine() -> None:
    class Broken(SimulatedEngine):
        def step(self, plan: object) -> list:
            raise ZeroDivisionError("on purpose")

    async def story() -> None:
        client, stream = FakeEngine(Broken(PROFILE)), TokenStream()
        client.submit([ask("a")], stream)
        with pytest.raises(Unavailable, match="ZeroDivisionError: on purpose"):
            await stream.take()
        with pytest.raises(Unavailable):
            await client.query()
        await client.close()

    run_virtual(story(), VirtualClock())


def test_sampling_settings_that_need_logits_change_nothing() -> None:
    plain, shaped = ask("plain"), ask("shaped")
    shaped = msgspec.structs.replace(
        shaped, sampling=msgspec.structs.replace(shaped.sampling, top_p=0.5, top_k=3, min_p=0.1)
    )
    engine = SimulatedEngine(PROFILE)
    engine.add(plain)
    engine.add(shaped)
    said = tokens_of(engine)
    assert said["plain"] == said["shaped"]
