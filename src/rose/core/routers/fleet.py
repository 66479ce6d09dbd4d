"""The workers, as columns: one array per fact, so that a decision looks at a thousand of them in a few microseconds.

Rows stand in the order that settles ties, dedicated before borrowed and then by name; so the first of several equals is
the right one. Columns hold what the pool told, the books that the router keeps, and what follows from both; the latter
is worked out again for one row whenever something about it changes, so that a decision has little left to do. A worker
that joins or leaves moves rows, which is rare.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rose.core.routers.views import WorkerView

Column = npt.NDArray[Any]
Number = TypeVar("Number", float, Column)

PREFILL_TOK_S = 4000.0  # of a worker that says nothing, where none says anything
DECODE_TOK_S = 40.0
RATE_WEIGHT = 0.1  # of the newest heartbeat; they come every second or so
PACE_WEIGHT = 0.1  # of the newest turn in how a worker's turns compare with their prediction
PACE_MAX = 8.0
SHUT_WEIGHT = 0.2  # of the newest time that a gate was shut
SHUT_MAX = 10.0  # times as long as usual counts as that: one storm is not the weather

FACTS = ("is_dedicated", "seats", "kv_tokens", "closed_until_s", "gated_since_s", "slack_s", "prefill_s", "decode_s")
BOOKS = ("turns", "held_tokens", "idle_tokens", "urgency", "empty_since_s", "busy_until_s", "pace", "reclaims",
         "exposure_s", "told_s", "shut_s")  # fmt: skip
DERIVED = ("room_tokens", "spare_tokens", "free_tokens", "crowd_s", "token_s", "lasting_s", "expected_per_s",
           "reclaims_per_s")  # fmt: skip


@dataclass(frozen=True, slots=True)
class History:
    """How a worker's past foretells that it will be reclaimed: so many times per second that a turn spends there.

    What is known fades by half every `half_life_s`, back to what is expected of a worker of its kind.
    """

    half_life_s: float = 120.0
    exposure_s: float = 60.0  # how much experience the expectation is worth
    borrowed_per_s: float = 1 / 300
    dedicated_per_s: float = 1 / 36_000
    shut_s: float = 5.0  # that a gate stays shut, until it has been seen how long


class Fleet:
    """`index` is where a worker's cells are, until the next one joins or leaves.

    `crowding` is how much slower again a sequence is on a full worker than alone; `promise_share` how much of its
    memory may be promised to trajectories that have begun.
    """

    is_dedicated: Column
    seats: Column
    kv_tokens: Column
    closed_until_s: Column  # infinite while it takes no turns at all
    gated_since_s: Column  # infinite while the gate is open
    slack_s: Column
    prefill_s: Column  # per token
    decode_s: Column  # per token of one sequence on an empty worker
    turns: Column
    held_tokens: Column
    idle_tokens: Column  # prefixes of trajectories between two turns
    urgency: Column  # summed over the turns there
    empty_since_s: Column  # infinite while it has turns
    busy_until_s: Column  # with prompts that were sent there
    pace: Column  # what turns took there, over what was predicted
    reclaims: Column
    exposure_s: Column
    told_s: Column
    shut_s: Column  # that its gate usually stays shut when serving shuts it
    room_tokens: Column  # the largest turn it can take
    spare_tokens: Column  # the same for a trajectory whose prefix is nowhere
    free_tokens: Column  # neither held nor kept for trajectories between two turns; less than 0 if promised twice
    crowd_s: Column  # that each held token adds to a token's time
    token_s: Column  # per token of one more sequence
    lasting_s: Column  # that all who live there, running or not, add to a token's time if all run
    expected_per_s: Column
    reclaims_per_s: Column  # as of `_rated_s`

    def __init__(self, history: History, crowding: float, promise_share: float) -> None:
        self.history, self._crowding, self._promise_share = history, crowding, promise_share
        self.index: dict[str, int] = {}
        self.names: list[str] = []
        self.versions: dict[str, str] = {}
        self._order: list[tuple[bool, str]] = []
        self._rated_s = -1.0
        self._roomy: set[int] = set()
        for name in (*FACTS, *BOOKS, *DERIVED):
            setattr(self, name, np.zeros(0))

    def __len__(self) -> int:
        return len(self.names)

    @property
    def is_full(self) -> bool:
        """No worker has room for even the shortest turn, whether it takes turns now or not."""
        return not self._roomy

    # Workers

    def put(self, view: WorkerView) -> int:
        """Take over a worker's facts; its books stay, unless it is new."""
        row = self.index.get(view.name)
        if row is None:
            row = self._insert(view)
        self.seats[row], self.kv_tokens[row] = view.seats, view.kv_tokens
        self._learn_shut(row, view)
        self.closed_until_s[row] = view.closed_until_s if view.is_open else math.inf
        self.gated_since_s[row] = math.inf if view.gated_since_s is None else view.gated_since_s
        self.slack_s[row] = math.inf if view.slack_s is None else view.slack_s
        if view.prefill_tok_s:
            self._learn_rate(self.prefill_s, row, 1.0 / view.prefill_tok_s)
        if view.decode_tok_s:
            share = float(self.held_tokens[row]) / max(1, view.kv_tokens)
            self._learn_rate(self.decode_s, row, 1.0 / view.decode_tok_s / (1.0 + self._crowding * share))
        self.versions[view.name] = view.version
        self.refresh(row)
        return row

    def _learn_rate(self, column: Column, row: int, told_s: float) -> None:
        """The first word is believed; later ones count in part, so that a busy moment does not drive turns away."""
        is_first = self.names[row] not in self.versions
        column[row] += (told_s - column[row]) * (1.0 if is_first else RATE_WEIGHT)

    def _learn_shut(self, row: int, view: WorkerView) -> None:
        """Its gate was shut when we last heard of it, and has been opened since.

        By serving, that is: a worker that called itself closed was its owner's or its circuit breaker's affair.
        """
        seen_s = view.opened_s - float(self.gated_since_s[row])
        if seen_s > 0 and math.isfinite(self.closed_until_s[row]):
            usual_s = float(self.shut_s[row])
            self.shut_s[row] += SHUT_WEIGHT * (min(seen_s, SHUT_MAX * usual_s) - usual_s)

    def _insert(self, view: WorkerView) -> int:
        key = (not view.is_dedicated, view.name)
        row = bisect.bisect_left(self._order, key)
        self._order.insert(row, key)
        history = self.history
        cells = dict(zip(("prefill_s", "decode_s"), self._usual_rates()), is_dedicated=view.is_dedicated, pace=1.0)
        cells |= {"empty_since_s": -math.inf, "gated_since_s": math.inf, "shut_s": history.shut_s}
        cells["expected_per_s"] = history.dedicated_per_s if view.is_dedicated else history.borrowed_per_s
        cells["reclaims_per_s"] = cells["expected_per_s"]
        for name in (*FACTS, *BOOKS, *DERIVED):
            setattr(self, name, np.insert(getattr(self, name), row, cells.get(name, 0.0)))
        self._renumber()
        return row

    def _usual_rates(self) -> tuple[float, float]:
        """Of the others, for one that says nothing."""
        if not self.names:
            return 1.0 / PREFILL_TOK_S, 1.0 / DECODE_TOK_S
        return float(np.median(self.prefill_s)), float(np.median(self.decode_s))

    def remove(self, name: str) -> None:
        row = self.index[name]
        del self._order[row], self.versions[name]
        for column in (*FACTS, *BOOKS, *DERIVED):
            setattr(self, column, np.delete(getattr(self, column), row))
        self._renumber()

    def _renumber(self) -> None:
        self.names = [name for _, name in self._order]
        self.index = {name: row for row, name in enumerate(self.names)}
        self._roomy = set((self.room_tokens >= 0).nonzero()[0].tolist())

    # Books

    def book(self, row: int, turns: int, tokens: int, urgency: float, now_s: float) -> None:
        """Turns and what they hold come or, with negative numbers, go."""
        there = float(self.turns[row]) + turns
        self.turns[row], self.held_tokens[row] = there, float(self.held_tokens[row]) + tokens
        self.empty_since_s[row] = math.inf if there else now_s
        self.urgency[row] = float(self.urgency[row]) + urgency if there else 0.0

    def refresh(self, row: int) -> None:
        """Work out again what follows from this row's facts and books."""
        turns, seats = float(self.turns[row]), float(self.seats[row])
        kv, held, idle = float(self.kv_tokens[row]), float(self.held_tokens[row]), float(self.idle_tokens[row])
        room, spare = kv - held, self._promise_share * kv - held - idle
        if turns >= seats:
            room = spare = -1.0
        elif turns == 0:
            room = math.inf
        decode_s = float(self.decode_s[row])
        self.room_tokens[row], self.spare_tokens[row], self.free_tokens[row] = room, spare, kv - held - idle
        self.crowd_s[row] = crowd_s = self._crowding * decode_s / max(1.0, kv)
        self.token_s[row] = decode_s + crowd_s * held
        self.lasting_s[row] = crowd_s * (held + idle)
        (self._roomy.add if room >= 0 else self._roomy.discard)(row)

    def learn_pace(self, row: int, taken_s: float, predicted_s: float) -> None:
        """A turn took so long, and was predicted to, of a worker that is as quick as it says.

        The mean is arithmetic, as costs are: on a worker that is quick at times and shut at others, a geometric one
        would promise what only the lucky turns get.
        """
        seen = min(PACE_MAX, max(1.0 / PACE_MAX, taken_s / max(predicted_s, 1e-6)))
        pace = float(self.pace[row])
        self.pace[row] = pace + (seen - pace) * PACE_WEIGHT

    def expose(self, row: int, seconds: float, reclaims: int, now_s: float) -> None:
        before_s = float(self.told_s[row])
        told_s = max(now_s, before_s)
        fade = 0.5 ** ((told_s - before_s) / self.history.half_life_s)
        seen, exposure_s = float(self.reclaims[row]) * fade + reclaims, float(self.exposure_s[row]) * fade + seconds
        self.told_s[row], self.reclaims[row], self.exposure_s[row] = told_s, seen, exposure_s
        since_s = max(0.0, self._rated_s - told_s)
        self.reclaims_per_s[row] = self._per_s(since_s, seen, exposure_s, float(self.expected_per_s[row]))

    def rate(self, now_s: float) -> None:
        """Let what is known of reclaims fade; by whole seconds, so that most decisions need not."""
        second = math.floor(now_s)
        if second != self._rated_s:
            self._rated_s = second
            since_s = np.maximum(0.0, second - self.told_s)
            self.reclaims_per_s = self._per_s(since_s, self.reclaims, self.exposure_s, self.expected_per_s)

    def _per_s(self, since_s: Number, reclaims: Number, exposure_s: Number, expected_per_s: Number) -> Number:
        """By what was known so long ago; of one worker or of all."""
        history = self.history
        fade = 0.5 ** (since_s / history.half_life_s)
        return (reclaims * fade + expected_per_s * history.exposure_s) / (exposure_s * fade + history.exposure_s)

    def able(self, now_s: float, gate_patience_s: float) -> Column:
        """Open, not asked to be left alone, and its gate not shut for long."""
        able = self.closed_until_s <= now_s
        able &= self.gated_since_s >= now_s - gate_patience_s
        return able

    def largest(self, now_s: float, gate_patience_s: float) -> float:
        """Tokens of the largest turn that any of those could take, less than 0 if none could take one."""
        return float(np.where(self.able(now_s, gate_patience_s), self.room_tokens, -1.0).max(initial=-1.0))
