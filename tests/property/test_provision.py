"""For any demand the caps hold, and nothing is borrowed and returned in quick succession."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rose.core.provision import Borrow, Demand, DeviceView, Provision, ProvisionRules
from rose.core.stalls import Pacer, PacingRules

NAMES = [f"d{number}" for number in range(6)]
SECOND = st.tuples(
    st.integers(0, 60),
    st.floats(0, 1e6),
    st.lists(st.tuples(st.sampled_from([True, True, True, False]), st.integers(0, 3)), min_size=6, max_size=6),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(SECOND, min_size=1, max_size=60), st.integers(0, 6))
@example([(5, 5e-324, [(True, 0)] * 6)], 1).via("so little work that its time is zero in floating point")
def test_caps_hold_and_nothing_flaps(seconds, serving_max: int) -> None:
    rules = ProvisionRules(serving_max=serving_max)
    provision = Provision(rules)
    since_s: dict[str, float] = {}
    returned_s: dict[str, float] = {}
    for now_s, (turns, work_tokens, states) in enumerate(seconds):
        offers = {name: is_on_offer for name, (is_on_offer, _) in zip(NAMES, states)}
        devices = [
            DeviceView(name, name in since_s, offers[name], 0.1, 0.1, 300.0, 3.0, busy if name in since_s else 0)
            for name, (_, busy) in zip(NAMES, states)
        ]
        demand = Demand(turns, work_tokens, 0.0, 2, 1000.0, 50.0)
        for decision in provision.decide(demand, devices, float(now_s)):
            if isinstance(decision, Borrow):
                assert decision.name not in since_s and offers[decision.name] and turns > 0
                assert now_s - returned_s.get(decision.name, -1e9) >= rules.rest_s
                since_s[decision.name] = now_s
            else:
                was_s = since_s.pop(decision.name)
                returned_s[decision.name] = now_s
                assert not offers[decision.name] or now_s - was_s >= rules.hold_s
        assert len(since_s) <= serving_max


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 40)), min_size=1, max_size=30), st.integers(1, 8))
def test_re_routed_turns_never_come_faster_than_the_pace_and_all_come(steps, workers: int) -> None:
    pacer, now_s, waiting, placed = Pacer(PacingRules(burst_turns=2)), 0.0, 0, []
    pacer.set_capacity(workers, 10.0)
    for pause_s, evicted in steps:
        now_s += pause_s
        pacer.on_evicted(evicted, now_s)
        waiting += evicted
        while waiting and pacer.may_place(now_s, True):
            waiting, placed = waiting - 1, [*placed, now_s]
    for _ in range(waiting):
        now_s = max(now_s, pacer.next_s() or now_s)
        assert pacer.may_place(now_s, True)
        placed.append(now_s)
    for first, begin_s in enumerate(placed):
        for last in range(first, len(placed)):
            assert last - first + 1 <= 2 * workers + 5.0 * (placed[last] - begin_s) + 1e-6
