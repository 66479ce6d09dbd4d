"""In any order of events the router keeps its counters right, and decides as a slow reference does."""

from __future__ import annotations

import copy
import math

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

from rose.core.router import Router
from rose.core.routing_rules import (
    PAPER_TURNS_MAX,
    REDO_FIXED_S,
    ROUTER_KINDS,
    Place,
    RouterKind,
    RoutingCosts,
    TurnView,
    Wait,
)
from rose.core.worker_table import WorkerView

WORKERS = [f"w{number}" for number in range(5)]
TRAJECTORIES = [f"t{number}" for number in range(8)]
TOKENS = st.integers(1, 4000)
OUTCOMES = ("ended", "evicted", "lost", "cancelled")


class Reference:
    """What `cost` costs, worker by worker, from the same books; one line for each line of the rule."""

    def __init__(self, router: Router) -> None:
        self.router, self.table, self.settings = router, router._table, router.settings

    def choose(self, turn: TurnView, now_s: float) -> str | None:
        outlook = self.router._outlook(turn)
        best: tuple[float, bool, str] | None = None
        for name, row in self.table.index.items():
            if not self.can_take(row, outlook, now_s):
                continue
            key = (self.cost_s(row, outlook, now_s), not self.table.is_dedicated[row], name)
            if best is None or key < best:
                best = key
        return best[2] if best is not None else None

    def can_take(self, row: int, outlook, now_s: float) -> bool:
        table, turns = self.table, self.table.turns[row]
        held, idle, kv = table.held_tokens[row], table.idle_tokens[row], table.kv_tokens[row]
        is_gated = now_s - table.blocked_since_s[row] > self.router.blocked_patience_s
        if table.closed_until_s[row] > now_s or (is_gated and row != outlook.holder):
            return False
        if turns >= table.max_concurrency[row] or (turns and held + outlook.need_tokens > kv):
            return False
        if not outlook.is_tracked or row == outlook.holder:
            return True
        is_empty = turns == 0 and now_s - table.empty_since_s[row] >= self.settings.empty_s
        return is_empty or held + idle + outlook.need_tokens <= self.settings.promise_share * kv

    def cost_s(self, row: int, outlook, now_s: float) -> float:
        table, settings = self.table, self.settings
        prefill_s, decode_s, kv = table.prefill_s[row], table.decode_s[row], max(1.0, table.kv_tokens[row])
        cached = outlook.cached_tokens if row == outlook.holder else 0
        held, need = table.held_tokens[row], outlook.need_tokens
        now_token_s = decode_s * (1 + settings.crowding * (held + need) / kv)
        living = held + table.idle_tokens[row] - cached + need
        later_token_s = decode_s * (1 + settings.crowding * outlook.activity * living / kv)
        own_s = max(0.0, table.busy_until_s[row] - now_s) + max(0.0, now_s - table.blocked_since_s[row])
        own_s += prefill_s * (outlook.prompt_tokens - cached) + outlook.answer_tokens * now_token_s
        own_s += settings.foresight * outlook.later_tokens * later_token_s
        own_s *= table.calibration[row]
        risk = table.reclaims_per_s[row] * (prefill_s * outlook.prompt_tokens + REDO_FIXED_S)
        lost_s = settings.interference * prefill_s * (outlook.prompt_tokens - cached)
        lost_s += settings.crowding * decode_s / kv * need * outlook.answer_tokens
        displaced = max(0.0, need - cached - (table.kv_tokens[row] - held - table.idle_tokens[row]))
        return outlook.urgency * own_s * (1 + risk) + table.urgency[row] * lost_s + prefill_s * displaced


class RouterBookkeeping(RuleBasedStateMachine):
    kind: RouterKind = "cost"

    @initialize()
    def start(self) -> None:
        self.router = Router(self.kind)
        self.now_s, self.number = 0.0, 0
        self.turns: dict[str, tuple[TurnView, str, int]] = {}
        self.workers: dict[str, WorkerView] = {}

    @rule(
        name=st.sampled_from(WORKERS), is_dedicated=st.booleans(), is_open=st.booleans(), seats=st.integers(0, 20),
        kv_tokens=st.integers(0, 20_000), closed_s=st.sampled_from([0.0, 5.0]), rate=st.sampled_from([None, 20.0]),
        gated=st.booleans(), version=st.sampled_from(["1", "2"]),
    )  # fmt: skip
    def put_worker(self, name, is_dedicated, is_open, seats, kv_tokens, closed_s, rate, gated, version) -> None:
        before = self.workers.get(name)
        if before is not None and before.is_dedicated != is_dedicated:
            self.forget_worker(name)
        view = WorkerView(
            name, is_dedicated, is_open or seats > 10, seats, kv_tokens, self.now_s + closed_s,
            rate and 100 * rate, rate, None, self.now_s if gated else None, version, self.now_s,
        )  # fmt: skip
        self.workers[name] = view
        self.router.put_worker(view)

    @rule(name=st.sampled_from(WORKERS))
    def remove_worker(self, name: str) -> None:
        self.router.remove_worker(name)
        if name in self.workers:
            self.forget_worker(name)

    def forget_worker(self, name: str) -> None:
        del self.workers[name]
        self.turns = {key: (turn, "" if on == name else on, need) for key, (turn, on, need) in self.turns.items()}

    @rule(trajectory=st.sampled_from(["", *TRAJECTORIES]), prompt=TOKENS, answer=TOKENS, skip=st.booleans())
    def place(self, trajectory: str, prompt: int, answer: int, skip: bool) -> None:
        turn = TurnView(trajectory, trajectory[:1] or None, prompt, answer)
        before = copy.deepcopy(self.router)
        before._forget_choices()
        decision = self.router.choose(turn, self.now_s)
        assert decision == before.choose(turn, self.now_s), "the same facts, another decision"
        self.check(turn, decision)
        if isinstance(decision, Place) and not skip:
            self.number += 1
            need = self.router._outlook(turn).need_tokens
            self.router.on_placed(str(self.number), turn, decision.worker, self.now_s)
            self.turns[str(self.number)] = (turn, decision.worker, need)

    def check(self, turn: TurnView, decision: Place | Wait) -> None:
        if self.kind == "cost":
            expected = Reference(self.router).choose(turn, self.now_s)
            assert (decision.worker if isinstance(decision, Place) else None) == expected
        if not isinstance(decision, Place):
            return
        view, there = self.workers[decision.worker], self.there(decision.worker)
        assert view.is_open and view.closed_until_s <= self.now_s and len(there) < view.max_concurrency
        if self.kind == "paper":
            assert len(there) < PAPER_TURNS_MAX
        elif there:
            assert sum(there) + self.router._outlook(turn).need_tokens <= view.kv_tokens
        assert 0 <= decision.predicted_s < math.inf

    def there(self, name: str) -> list[int]:
        return [need for _, worker, need in self.turns.values() if worker == name]

    @precondition(lambda self: self.turns)
    @rule(
        data=st.data(), outcome=st.sampled_from(["ended", "evicted", "lost", "cancelled"]), tokens=st.integers(0, 500)
    )
    def end(self, data, outcome, tokens: int) -> None:
        turn_id = data.draw(st.sampled_from(sorted(self.turns)))
        del self.turns[turn_id]
        self.router.on_ended(turn_id, outcome, tokens, self.now_s)

    @rule(trajectory=st.sampled_from(TRAJECTORIES), tokens=st.integers(0, 9000))
    def finish(self, trajectory: str, tokens: int) -> None:
        if not any(turn.trajectory == trajectory for turn, _, _ in self.turns.values()):
            self.router.on_finished(trajectory, trajectory[:1], 3, tokens)

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0, 300.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def look_for_strays(self) -> None:
        for stray in self.router.migration_candidates(self.now_s):
            gated_since_s = self.workers[stray.worker].blocked_since_s
            assert gated_since_s is not None and self.now_s - gated_since_s > self.router.blocked_patience_s
            assert self.turns[stray.turn_id][1] == stray.worker

    @invariant()
    def counters_are_right(self) -> None:
        table = self.router._table
        assert set(table.index) == set(self.workers)
        assert table.names == sorted(table.names, key=lambda name: (not self.workers[name].is_dedicated, name))
        for name, row in table.index.items():
            there = self.there(name)
            assert (table.turns[row], table.held_tokens[row]) == (len(there), sum(there))
            assert 0 <= table.idle_tokens[row] <= max(0, table.kv_tokens[row] - table.held_tokens[row])
            assert table.urgency[row] >= -1e-9 and (there or table.urgency[row] == 0)

    @invariant()
    def no_open_worker_stays_empty_while_a_turn_waits(self) -> None:
        if self.kind != "cost":
            return
        table, waited_s = self.router._table, RoutingCosts().empty_s
        empty = [
            name for name, view in self.workers.items()
            if view.is_open and view.max_concurrency and view.closed_until_s <= self.now_s
            and view.blocked_since_s is None and not self.there(name)
            and self.now_s - table.empty_since_s[table.index[name]] >= waited_s
        ]  # fmt: skip
        if empty:
            assert isinstance(self.router.choose(TurnView("any", None, 3000, 3000), self.now_s), Place)


@pytest.mark.parametrize("kind", ROUTER_KINDS)
def test_the_bookkeeping_is_right(kind: RouterKind) -> None:
    machine = type("Machine", (RouterBookkeeping,), {"kind": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None))
