"""A gateway's ledger with somebody who looks over its shoulder."""

from __future__ import annotations

import sqlite3

from rose.engines.base import TokenEvent
from rose.rollout.ledger import Ledger
from rose.rollout.sessions import Finish, KeptTurn, Session
from rose.sim.gate import Gate
from rose.sim.judge import Judge


class WatchedLedger(Ledger):
    """In memory, on a connection that outlives the gateway as a file would."""

    def __init__(self, model: str, connection: sqlite3.Connection, judge: Judge, gate: Gate) -> None:
        super().__init__(None, model, connection=connection)
        self._judge, self._gate = judge, gate
        self._is_dead = False

    def die(self) -> None:
        """With its gateway: what was not committed is gone."""
        self._is_dead = True
        self.file.abandon()

    def produced(self, turn: KeptTurn, event: TokenEvent) -> None:
        start = len(turn.produced) - len(event.token_ids)
        is_end = event.finish_reason is not None
        self._judge.accepted(turn.prompt_ids, start, event.token_ids, event.logprobs, event.version, ends=is_end)
        super().produced(turn, event)

    def finished(self, session: Session, finish: Finish, turn_count: int, forks: int) -> None:
        self._judge.ended(session.trajectory_id, finish)
        super().finished(session, finish, turn_count, forks)

    def commit(self) -> None:
        self._gate.enter(self._commit)  # a process that stands still writes nothing

    def _commit(self) -> None:
        if self._is_dead:
            return
        super().commit()
        if self.trouble is None:
            self._judge.settled()
