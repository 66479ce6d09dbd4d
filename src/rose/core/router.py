"""Which worker takes this turn. Every turn is placed anew; a router remembers what it placed, and predicts from that.

`cost`, the default, places a turn where it costs least, in seconds:

    own     the wait for prompts sent there before, the prompt that is not cached there, the answer at the speed of a
            worker so full, and part of what the trajectory will still generate after this turn
    others  what those who run there lose: time while the prompt is computed, and speed to a fuller batch
    risk    the chance that the worker is reclaimed before that, from its recent history, times what is then redone

all corrected by how turns on that worker have gone against their prediction. Own time and risk count for more the
longer the trajectory is expected to be (`core.lengths`), others' losses by how long *they* are expected to be. So long
ones drift to dedicated, roomy workers and short ones to borrowed ones, and nobody has to say so. On a tie dedicated
workers go first, then names.

Room is memory: the prompt and as much answer as nineteen of twenty need must fit beside what was placed there before;
an idle worker takes any turn, since if it is too long for one it is too long for all, and the engine says so best. A
trajectory between two turns keeps its prefix only while nobody else needs the memory, and computing it again costs more
than the turn. So a worker takes a trajectory whose prefix it does not have only while memory is not yet promised to
those who have theirs there, or when it has been empty for a while; and `rank` lets those with a prefix go first, then
those who have begun, then new ones, and among equals the longest.

`paper`   the worker with the prefix, a dedicated one, a borrowed one with slack, the least loaded; 16 turns each.
`least`   the least loaded. `sticky` the worker of the first turn, whatever happens. Both to compare with.

Whatever the rule: a worker that said no is left alone for the time it asked for, one whose gate has been shut for
`gate_patience_s` gets no more turns, and `strays` names the turns that should leave it. By `cost` a trajectory still
goes back to its prefix behind a gate, and leaves only a gate that is shut for far longer than usual, or than its prompt
takes elsewhere: most open again sooner than a long prompt is computed anew, and computing it takes others' time. Facts
in, decisions out: `choose` changes nothing, and the caller says what it did with `placed` and `ended`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from rose.core.lengths import Answers, Lengths
from rose.core.routers.fleet import Fleet, History
from rose.core.routers.prefixes import Prefixes
from rose.core.routers.rules import PROMISED, CostSettings, Outlook, by_cost, by_habit, by_load, by_the_paper, costs_s
from rose.core.routers.views import ROUTER_KINDS, Outcome, Place, RouterKind, Stray, TurnView, Wait, WorkerView
from rose.errors import ConfigError

__all__ = [
    "ROUTER_KINDS", "CostSettings", "History", "Outcome", "Place", "Router", "RouterKind", "Stray", "TurnView", "Wait",
    "WorkerView",
]  # fmt: skip

GATE_PATIENCE_S = 2.0  # the paper's time for a stalled turn
SHUT_LONG = 3.0  # times as long as usual: of gates that open by chance one in twenty is shut for longer
USUAL_WEIGHT = 0.05  # of the newest turn in what length is usual
FULL_FOR_ALL: tuple[RouterKind, ...] = ("cost", "least")  # where nobody has room, the turn need not be looked at
LATER = 1e12  # in a rank: after all that are not


@dataclass(slots=True)
class _Placed:
    turn: TurnView
    worker: str
    life: int  # of the worker: books of one that left and came back begin anew
    need_tokens: int
    urgency: float
    since_s: float
    predicted_s: float  # without the worker's own pace


@dataclass(frozen=True, slots=True)
class _Refused:
    """A turn was told that all memory is promised, in this moment, while the roomiest worker had so much room."""

    now_s: float
    need_tokens: int
    room_tokens: float


@dataclass(slots=True)
class _Live:
    """A trajectory that has begun: what it has generated, and who ran its last turn."""

    tokens: int
    worker: str


class Router:
    """One per pool. Tell it of workers, placements and ends; ask `choose` and, with several waiting, `rank`."""

    def __init__(
        self,
        kind: RouterKind = "cost",
        *,
        settings: CostSettings | None = None,
        history: History | None = None,
        gate_patience_s: float = GATE_PATIENCE_S,
    ) -> None:
        if kind not in ROUTER_KINDS:
            raise ConfigError(f"no router is called {kind!r}", hint=f"use {', '.join(ROUTER_KINDS)}")
        self.kind: RouterKind = kind
        self.settings = settings or CostSettings()
        self.gate_patience_s = gate_patience_s
        self.lengths, self.answers = Lengths(), Answers()
        self._fleet = Fleet(history or History(), self.settings.crowding, self.settings.promise_share)
        self._prefixes = Prefixes()
        self._turns: dict[str, _Placed] = {}
        self._turns_on: dict[str, dict[str, None]] = {}
        self._live: dict[str, _Live] = {}
        self._lives: dict[str, int] = {}
        self._life = itertools.count(1)
        self._usual_tokens = 0.0
        self._expected: tuple[TurnView, Outlook] | None = None  # of the last choice, until something happens
        self._refused: _Refused | None = None  # the last of them, until something happens

    # Workers

    def put_worker(self, view: WorkerView) -> None:
        """Joined or changed: replaces what was known of that name."""
        self._forget_choices()
        fleet = self._fleet
        row = fleet.index.get(view.name)
        if row is not None and bool(fleet.is_dedicated[row]) != view.is_dedicated:
            self.remove_worker(view.name)  # another worker under the same name
        if view.name not in fleet.index:
            self._lives[view.name] = next(self._life)
            self._turns_on[view.name] = {}
        elif fleet.versions[view.name] != view.version:
            self._prefixes.empty(view.name)
        self._trim(view.name, fleet.put(view))

    def remove_worker(self, name: str) -> None:
        """Gone. Its turns are still to be told as lost, before or after."""
        self._forget_choices()
        if name in self._fleet.index:
            self._fleet.remove(name)
            self._prefixes.empty(name)
            del self._turns_on[name], self._lives[name]

    # Decisions

    def choose(self, turn: TurnView, now_s: float) -> Place | Wait:
        if self._fleet.is_full and len(self._fleet) and self.kind in FULL_FOR_ALL:
            return Wait(f"all {len(self._fleet)} workers are full")
        if self._waits_too(turn, now_s):
            return PROMISED
        outlook = self._outlook(turn)
        self._expected = (turn, outlook)
        decision = self._choose(turn, outlook, now_s)
        if decision is PROMISED:
            self._refused = _Refused(now_s, outlook.need_tokens, self._fleet.largest(now_s, self.gate_patience_s))
        return decision

    def _choose(self, turn: TurnView, outlook: Outlook, now_s: float) -> Place | Wait:
        fleet = self._fleet
        fleet.rate(now_s)
        able = fleet.able(now_s, self.gate_patience_s)
        if self.kind == "cost":
            chosen = by_cost(fleet, outlook, able, now_s, self.settings)
        elif self.kind == "paper":
            chosen = by_the_paper(fleet, outlook, able)
        elif self.kind == "sticky":
            chosen = by_habit(fleet, outlook, able, self._last(turn))
        else:
            chosen = by_load(fleet, outlook, able)
        if isinstance(chosen, Wait):
            return chosen
        row, reason = chosen
        wait_s = max(0.0, now_s - float(fleet.gated_since_s[row]))
        return Place(fleet.names[row], reason, wait_s + self._predict_s(outlook, row, now_s) * float(fleet.pace[row]))

    def rank(self, turn: TurnView) -> float:
        """Of turns that wait, the lowest goes first; equal ones in the order they came."""
        if self.kind != "cost" or not turn.trajectory:
            return 0.0
        live = self._live.get(turn.trajectory)
        remaining = self.lengths.remaining(turn.group, live.tokens if live is not None else 0) or 0.0
        return LATER * ((live is None) + (self._home(turn)[0] < 0)) - remaining

    def strays(self, now_s: float, limit: int = 16) -> list[Stray]:
        """Turns to evict from workers whose gate is shut.

        By `cost` one leaves if another place costs less than to wait as long again as it has; and if the worker still
        calls itself open, only once its gate has been shut for so much longer than it usually is that it will hardly
        open soon, or for so much longer than its prompt takes of everybody's time elsewhere that this is no matter. By
        the other rules it leaves if there is another place at all.
        """
        found: list[Stray] = []
        fleet = self._fleet
        redo_s = self._redo_s(now_s)  # per token
        if math.isinf(redo_s):
            return found
        for row in (now_s - fleet.gated_since_s > self.gate_patience_s).nonzero()[0]:
            name, shut_s = fleet.names[row], now_s - float(fleet.gated_since_s[row])
            is_patient = self.kind == "cost" and fleet.closed_until_s[row] <= now_s
            usual_s = float(fleet.shut_s[row]) if is_patient else 0.0
            for turn_id in self._turns_on[name]:
                placed = self._turns[turn_id]
                if len(found) >= limit:
                    return found
                if now_s - placed.since_s < self.gate_patience_s:
                    continue
                if shut_s >= SHUT_LONG * min(usual_s, redo_s * placed.turn.prompt_tokens) and self._would_leave(
                    placed.turn, int(row), now_s
                ):
                    found.append(Stray(turn_id, name, f"the gate of `{name}` is shut for {shut_s:.1f} s"))
        return found

    def _redo_s(self, now_s: float) -> float:
        """What a token of a prompt costs at least, elsewhere: its own time and that of those who decode beside it.

        Infinite if nobody takes turns.
        """
        fleet = self._fleet
        able = fleet.able(now_s, self.gate_patience_s)
        costs = fleet.prefill_s * (1.0 + self.settings.interference * fleet.urgency)
        return float(np.where(able, costs, math.inf).min(initial=math.inf))

    def _would_leave(self, turn: TurnView, row: int, now_s: float) -> bool:
        """Once it has left, its prefix is nowhere."""
        outlook = self._outlook(turn)
        homeless = replace(outlook, home=-1, cached_tokens=0)
        chosen = self._choose(turn, homeless, now_s)
        if not isinstance(chosen, Place) or self.kind != "cost":
            return isinstance(chosen, Place)
        staying = replace(outlook, home=row, cached_tokens=turn.prompt_tokens)
        stay_s = costs_s(self._fleet, staying, now_s, self.settings)[row]
        leave_s = costs_s(self._fleet, homeless, now_s, self.settings)[self._fleet.index[chosen.worker]]
        return bool(leave_s < stay_s)

    # What happened

    def placed(self, turn_id: str, turn: TurnView, worker: str, now_s: float) -> None:
        """The caller did it."""
        assert turn_id not in self._turns, f"turn `{turn_id}` is placed already"
        fleet, outlook = self._fleet, self._outlook_again(turn)
        self._forget_choices()
        row = fleet.index[worker]
        predicted_s = self._predict_s(outlook, row, now_s)
        urgency, need_tokens = outlook.urgency, outlook.need_tokens
        self._turns[turn_id] = _Placed(turn, worker, self._lives[worker], need_tokens, urgency, now_s, predicted_s)
        self._turns_on[worker][turn_id] = None
        prefill_s = float(fleet.prefill_s[row]) * (outlook.prompt_tokens - self._cached(outlook, row))
        fleet.busy_until_s[row] = max(float(fleet.busy_until_s[row]), now_s) + prefill_s
        fleet.book(row, 1, need_tokens, urgency, now_s)
        if turn.trajectory:
            if outlook.later_tokens:
                self._learn_usual(outlook.answer_tokens + outlook.later_tokens)
            self._begin(turn, worker)
        self._trim(worker, row)

    def ended(self, turn_id: str, outcome: Outcome, generated_tokens: int, now_s: float) -> None:
        """Free its room; `generated_tokens` were produced by this placement."""
        self._forget_choices()
        placed = self._turns.pop(turn_id)
        turn, worker = placed.turn, placed.worker
        if outcome == "ended":
            self.answers.add(generated_tokens)
        live = self._live.get(turn.trajectory)
        if live is not None:
            live.tokens += generated_tokens
        if self._lives.get(worker) != placed.life:
            return
        row = self._fleet.index[worker]
        del self._turns_on[worker][turn_id]
        self._unbook(placed, row, outcome, generated_tokens, now_s)
        if live is not None and live.worker == worker:
            self._keep_prefix(turn, worker, outcome, generated_tokens)
        self._trim(worker, row)

    def finished(self, trajectory: str, group: str | None, turns: int, tokens: int) -> None:
        """A trajectory ended: its prefix is forgotten, its length is learnt from. `tokens` are those it generated."""
        self._forget_choices()
        self._live.pop(trajectory, None)
        worker = self._prefixes.forget(trajectory)
        if worker is not None and worker in self._fleet.index:
            self._trim(worker, self._fleet.index[worker])
        if turns > 0:
            self.lengths.finished(group, tokens)

    # Predicting

    @property
    def usual_tokens(self) -> float:
        """What a trajectory with a turn to place will usually still generate; 0 while nothing is known."""
        return self._usual_tokens

    def _outlook_again(self, turn: TurnView) -> Outlook:
        """The one it was chosen a place by, if nothing happened since."""
        expected = self._expected
        return expected[1] if expected is not None and expected[0] is turn else self._outlook(turn)

    def _waits_too(self, turn: TurnView, now_s: float) -> bool:
        """Whether it is refused like one that needs no more, was refused in the same moment, and is at home nowhere."""
        refused = self._refused
        if refused is None or refused.now_s != now_s or not turn.trajectory:
            return False
        need = turn.prompt_tokens + self.answers.high(turn.max_tokens)
        home, _ = self._home(turn)
        return refused.need_tokens <= need <= refused.room_tokens and (
            home < 0 or bool(self._fleet.room_tokens[home] < need)
        )

    def _forget_choices(self) -> None:
        self._expected = self._refused = None

    def _outlook(self, turn: TurnView) -> Outlook:
        answer = self.answers.mean(turn.max_tokens)
        need = turn.prompt_tokens + self.answers.high(turn.max_tokens)
        if not turn.trajectory:
            return Outlook(turn.prompt_tokens, need, answer)
        live = self._live.get(turn.trajectory)
        remaining = self.lengths.remaining(turn.group, live.tokens if live is not None else 0)
        home, cached = self._home(turn)
        activity = min(1.0, len(self._turns) / max(1, len(self._live)))
        if remaining is None:
            return Outlook(turn.prompt_tokens, need, answer, 0.0, activity, 1.0, home, cached, True)
        urgency = remaining / self._usual_tokens if self._usual_tokens else 1.0
        urgency = min(self.settings.urgency_max, max(self.settings.urgency_min, urgency))
        later = max(0.0, remaining - answer)
        return Outlook(turn.prompt_tokens, need, answer, later, activity, urgency, home, cached, True)

    def _home(self, turn: TurnView) -> tuple[int, int]:
        """The row that holds the trajectory's prefix, and how much of this prompt it holds."""
        home = self._prefixes.home(turn.trajectory)
        if home is not None:
            return self._fleet.index[home[0]], min(home[1], turn.prompt_tokens)
        if turn.trajectory in self._live or turn.last_worker is None:
            return -1, 0
        return self._fleet.index.get(turn.last_worker, -1), turn.prompt_tokens

    def _last(self, turn: TurnView) -> int:
        live = self._live.get(turn.trajectory)
        last = live.worker if live is not None else turn.last_worker
        return self._fleet.index.get(last, -1) if last is not None else -1

    @staticmethod
    def _cached(outlook: Outlook, row: int) -> int:
        return outlook.cached_tokens if row == outlook.home else 0

    def _predict_s(self, outlook: Outlook, row: int, now_s: float) -> float:
        """How long the turn takes on that worker, if it is like others of its rates."""
        fleet = self._fleet
        wait_s = max(0.0, float(fleet.busy_until_s[row]) - now_s)
        prefill_s = float(fleet.prefill_s[row]) * (outlook.prompt_tokens - self._cached(outlook, row))
        share = (float(fleet.held_tokens[row]) + outlook.need_tokens) / max(1.0, float(fleet.kv_tokens[row]))
        token_s = float(fleet.decode_s[row]) * (1.0 + self.settings.crowding * share)
        return wait_s + prefill_s + outlook.answer_tokens * token_s

    # Books

    def _learn_usual(self, remaining_tokens: float) -> None:
        usual = self._usual_tokens or remaining_tokens
        self._usual_tokens = usual + USUAL_WEIGHT * (remaining_tokens - usual)

    def _begin(self, turn: TurnView, worker: str) -> None:
        live = self._live.setdefault(turn.trajectory, _Live(0, worker))
        live.worker = worker
        before = self._prefixes.home(turn.trajectory)
        self._prefixes.begin(turn.trajectory, worker, turn.prompt_tokens)
        if before is not None and before[0] != worker:
            self._trim(before[0], self._fleet.index[before[0]])

    def _unbook(self, placed: _Placed, row: int, outcome: Outcome, generated_tokens: int, now_s: float) -> None:
        fleet = self._fleet
        fleet.book(row, -1, -placed.need_tokens, -placed.urgency, now_s)
        taken_s = max(0.0, now_s - placed.since_s)
        if outcome == "ended" and generated_tokens > 0:
            fleet.learn_pace(row, taken_s, placed.predicted_s)
        fleet.expose(row, taken_s, int(outcome in ("evicted", "lost")), now_s)

    def _keep_prefix(self, turn: TurnView, worker: str, outcome: Outcome, generated_tokens: int) -> None:
        if outcome in ("ended", "cancelled"):
            self._prefixes.end(turn.trajectory, worker, turn.prompt_tokens + generated_tokens)
        else:
            self._prefixes.forget(turn.trajectory)

    def _trim(self, worker: str, row: int) -> None:
        fleet = self._fleet
        self._prefixes.trim(worker, int(fleet.kv_tokens[row] - fleet.held_tokens[row]))
        fleet.idle_tokens[row] = self._prefixes.idle_tokens.get(worker, 0)
        fleet.refresh(row)
