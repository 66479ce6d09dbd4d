"""Gates that serving shuts for a while: from the device's lender to what the router knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.unit.rollout_world import LENDING

from rose.core.admission import Admission
from rose.core.gates import SHUT_AFTER_S, GateSeen, GateWatch
from rose.core.slo import Budgets
from rose.coserve.lending import Lender
from rose.engines.base import Budget, Request, Sampling
from rose.engines.profiles import load_profile
from rose.engines.simulated import SimulatedEngine
from rose.rollout.condition import WORD_S_MAX, Condition
from rose.rollout.messages import Beat, decode_to_gateway, encode
from rose.rollout.rates import Rates
from rose.sim.models import learnt

WIDE = Budget(512, 64)
LET, NOT, LEFT, FORGET = "let", "not", "left", "forget"

# The watch on the device


@pytest.mark.parametrize(
    "told, now_s, shut_s",
    [
        pytest.param([(NOT, 1.0)], 1.1, None, id="for a moment"),
        pytest.param([(NOT, 1.0)], 1.5, 0.5, id="for longer than that"),
        pytest.param([(NOT, 1.0), (NOT, 1.2), (NOT, 9.0)], 9.0, 8.0, id="since it was first asked in vain"),
        pytest.param([(NOT, 1.0), (LET, 2.0)], 9.0, None, id="open with the next step"),
        pytest.param([(NOT, 1.0), (LET, 1.2), (NOT, 1.25)], 1.4, None, id="shut and open and shut: not for long"),
        pytest.param([(NOT, 1.0), (LET, 2.0), (NOT, 2.5)], 3.0, 0.5, id="shut again"),
        pytest.param([(NOT, 1.0), (LEFT, 1.1)], 9.0, None, id="they left at once"),
        pytest.param([(NOT, 1.0), (LEFT, 3.0)], 9.0, 8.0, id="they left because it was shut"),
        pytest.param([(NOT, 1.0), (LEFT, 3.0), (LET, 4.0)], 9.0, None, id="they could come back"),
        pytest.param([(NOT, 1.0), (FORGET, 3.0)], 9.0, None, id="its owner has shut it"),
    ],
)
def test_a_gate_is_shut_while_rollouts_stand_still(
    told: list[tuple[str, float]], now_s: float, shut_s: float | None
) -> None:
    watch = GateWatch()
    for what, at_s in told:
        if what == FORGET:
            watch.forget()
        elif what == LEFT:
            watch.left(at_s)
        else:
            watch.asked(at_s, is_let=what == LET)
    assert watch.shut_s(now_s) == shut_s


def test_that_a_gate_has_shut_is_news_once() -> None:
    watch = GateWatch()
    watch.asked(0.0, is_let=False)
    assert [watch.has_shut(now_s) for now_s in (0.1, 0.5, 0.6)] == [False, True, False]
    watch.asked(1.0, is_let=True)
    assert not watch.has_shut(1.0)
    watch.asked(1.1, is_let=False)
    assert [watch.has_shut(now_s) for now_s in (1.2, 1.4, 1.5)] == [False, True, False]


# What is known of it from afar


@pytest.mark.parametrize(
    "told, gated_since_s, opened_s",
    [
        pytest.param([(1.0, None)], None, 0.5, id="never shut"),
        pytest.param([(1.0, 0.3)], 0.7, 0.5, id="shut since a while"),
        pytest.param([(1.0, 0.3), (2.1, 1.3)], 0.7, 0.5, id="still, whatever the way here took"),
        pytest.param([(1.0, 0.3), (2.0, None)], None, 2.0, id="open again"),
        pytest.param([(1.0, 0.3), (2.0, 0.4)], 1.6, 1.6, id="open in between, and nobody said so"),
        pytest.param([(1.0, 0.3), (2.0, None), (3.0, 1.2)], 2.0, 2.0, id="not before it was seen to be open"),
        pytest.param([(1.0, 9.0)], 0.5, 0.5, id="not before it joined"),
    ],
)
def test_what_a_gateway_knows_of_a_gate(
    told: list[tuple[float, float | None]], gated_since_s: float | None, opened_s: float
) -> None:
    seen = GateSeen(0.5)
    for now_s, shut_s in told:
        seen.told(shut_s, now_s)
    assert (seen.gated_since_s, seen.opened_s) == (pytest.approx(gated_since_s), pytest.approx(opened_s))


def test_time_behind_a_gate_is_not_time_that_a_turn_was_quiet() -> None:
    seen = GateSeen()
    assert seen.quiet_s(3.0, 10.0) == 7.0
    seen.told(6.0, 10.0)
    assert seen.quiet_s(3.0, 10.0) == 1.0 and seen.quiet_s(5.0, 10.0) == 0.0
    seen.told(None, 12.0)
    assert seen.quiet_s(3.0, 12.5) == 0.5 and seen.quiet_s(12.25, 12.5) == 0.25


# The lender


def lender() -> Lender:
    """A device that lends only while serving has no work."""
    models = [learnt(load_profile(name).step_s, 0.02) for name in ("cpu", "cpu-frozenlake-1m")]
    engines = [SimulatedEngine(load_profile(name)) for name in ("cpu", "cpu-frozenlake-1m")]
    return Lender(*engines, Admission("idle", Budgets(0.5, 0.15), *models), serving_budget=WIDE)


def request(name: str, tokens: int = 4) -> Request:
    return Request(name, tuple(range(8)), Sampling(max_tokens=tokens, ignore_eos=True), arrival_s=0.0)


def step(found: Lender, now_s: float) -> str:
    """Whose it was."""
    planned = found.next_step(now_s)
    if planned is None:
        return "nobody"
    engine = found.serving if planned.side == "serving" else found.rollout
    found.finish(planned, engine.step(planned.plan), now_s, now_s)
    return planned.side


def test_a_lender_knows_since_when_serving_keeps_rollouts_waiting() -> None:
    found = lender()
    found.rollout.add(request("rollout", 8))
    assert step(found, 0.0) == "rollout" and found.gate.shut_s(5.0) is None
    found.add_serving(request("serving", 100))
    assert [step(found, now_s) for now_s in (6.0, 6.1)] == ["serving", "serving"]
    assert found.gate.shut_s(6.1) is None and found.gate.shut_s(8.0) == 2.0


def test_a_shut_gate_stays_shut_when_rollouts_have_left_until_they_could_run() -> None:
    found = lender()
    found.rollout.add(request("rollout"))
    found.add_serving(request("serving", 3))
    assert step(found, 0.0) == "serving"
    found.rollout.evict("rollout")
    assert step(found, 1.0) == "serving" and found.gate.shut_s(1.0) == 1.0
    assert step(found, 2.0) == "serving" and found.gate.shut_s(2.0) == 2.0
    assert step(found, 3.0) == "nobody" and found.gate.shut_s(3.0) is None, "serving has ended"


def test_a_gate_is_not_open_by_a_grant_that_no_step_came_of() -> None:
    found = lender()
    found.rollout.add(request("rollout"))
    plan = found.rollout.plan
    found.rollout.plan = lambda budget: None  # type: ignore[method-assign]
    assert [step(found, now_s) for now_s in (0.0, 1.0)] == ["nobody", "nobody"]
    assert found.last_grant.is_open(1.0) and found.gate.shut_s(1.0) == 1.0
    found.rollout.plan = plan  # type: ignore[method-assign]
    assert step(found, 2.0) == "rollout" and found.gate.shut_s(9.0) is None


@pytest.mark.parametrize("how", ["stopped", "dry run", "resting"])
def test_a_device_that_lends_nothing_at_all_has_no_shut_gate(how: str) -> None:
    found = lender()
    found.rollout.add(request("rollout"))
    found.add_serving(request("serving", 100))
    step(found, 0.0)
    if how == "stopped":
        found.stop("paused by the owner")
    elif how == "dry run":
        found.dry_run = cast(Any, SimpleNamespace(decide=lambda view, ration, now_s: found.last_grant))
    else:
        found.admission.breaker = cast(Any, SimpleNamespace(why_stopped=lambda now_s: "circuit breaker"))
        found.admission.breaker.finished = lambda *args, **named: None
    step(found, 1.0)
    assert found.gate.shut_s(9.0) is None


# The agent's beat


def beat(shut_s: float | None, *, heard_s: float | None, now_s: float, steps: int = 0) -> Beat:
    facts = SimpleNamespace(
        generated_tokens=0, running=1, waiting=0, kv_blocks_used=0, kv_blocks_limit=1, block_tokens=16, version="0",
        steps=0,
    )  # fmt: skip
    engine = SimpleNamespace(facts=facts, lending_status=msgspec.structs.replace(LENDING, shut_s=shut_s), trouble=None)
    condition = Condition(cast(Any, engine), Rates(), lambda: "", 0.0)
    if heard_s is not None:
        condition.heard(heard_s)
    facts.steps += steps
    return condition.beat(now_s)


@pytest.mark.parametrize(
    "told, shut_s",
    [
        pytest.param(beat(None, heard_s=1.0, now_s=1.5), None, id="open"),
        pytest.param(beat(0.5, heard_s=1.0, now_s=1.75), 1.25, id="and time has passed since"),
        pytest.param(beat(0.5, heard_s=1.0, now_s=0.0), 0.5, id="by a clock that went back"),
        pytest.param(beat(0.5, heard_s=1.0, now_s=1.75, steps=1), None, id="and a step was made since"),
        pytest.param(beat(0.5, heard_s=1.0, now_s=1.5 + WORD_S_MAX), None, id="and was not heard of since"),
        pytest.param(beat(0.5, heard_s=None, now_s=99.0), 0.5, id="by an engine that is looked at just now"),
    ],
)
def test_a_beat_tells_for_how_long_the_gate_is_shut(told: Beat, shut_s: float | None) -> None:
    assert told.gate_open, "it takes turns"
    assert told.shut_s == shut_s
    assert decode_to_gateway(encode([told])) == [told]


def test_an_older_agent_tells_of_no_gate() -> None:
    said = {"type": "Beat", "running": 0, "waiting": 0, "kv_used_tokens": 0, "kv_tokens": 1, "version": "0"}
    [heard] = decode_to_gateway(msgspec.msgpack.encode([said | {"gate_open": True}]))
    assert isinstance(heard, Beat) and heard.shut_s is None


def test_gates_are_told_as_finely_as_they_are_watched() -> None:
    """Two words apart by less than what makes a gate shut are about the same time of being shut."""
    seen = GateSeen()
    seen.told(SHUT_AFTER_S, 1.0)
    seen.told(SHUT_AFTER_S, 1.0 + SHUT_AFTER_S)
    assert seen.opened_s == 0.0
    seen.told(SHUT_AFTER_S, 1.01 + 2 * SHUT_AFTER_S)
    assert seen.opened_s == pytest.approx(1.01 + SHUT_AFTER_S)
