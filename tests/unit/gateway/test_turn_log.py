"""The log of running turns stays short, and its rows are bounded."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from tests.unit.ledger_world import Incarnation, alone, rows, under_way

from rose.api.worker_messages import NewVersion, TokensAdded, TurnTokens
from rose.gateway import turn_log


def test_a_turn_that_runs_for_long_is_kept_whole_and_the_log_stays_short(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_log, "ROWS_KEPT", 4)
    gateway = Incarnation(path)
    gateway.ask("long", 1, 2)
    long = gateway.turns[-1].attempt_id
    said: list[int] = []
    for number in range(100):
        version, said = str(number // 50), [*said, number]
        piece = TurnTokens(long, (number,), (-0.1 * number,), version, None, None, (((number, -0.5),),))
        gateway.core.pool.restore([NewVersion(version, "folder")])
        gateway.core.receive(gateway.member, TokensAdded((piece,)), 0.0)
        gateway.core.ledger.commit()
    assert 0 < rows(path, "log") <= 8 + turn_log.ROWS_DROPPED
    gateway.kill()
    gateway = Incarnation(path)
    assert rows(path, "log") <= 8 + turn_log.ROWS_DROPPED
    for _ in range(2):  # also if it dies again before it has said anything
        [turn] = [turn for turn in gateway.turns if turn.request.prompt_ids == (1, 2)]
        assert list(turn.request.partial.token_ids) == said
        assert turn.request.partial.logprobs == tuple(-0.1 * number for number in range(100))
        assert [(span.version, span.start, span.end) for span in turn.request.partial.spans] == [
            ("0", 0, 50),
            ("1", 50, 100),
        ]
        gateway.core.ledger.commit()
        assert rows(path, "log") <= 8 + turn_log.ROWS_DROPPED
        gateway.kill()
        gateway = Incarnation(path)


def test_turns_that_wait_are_written_once_however_long_they_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_log, "ROWS_KEPT", 4)
    monkeypatch.setattr(turn_log, "MOVED_BYTES", 20_000)
    gateway = alone(path)
    for number in range(40):
        gateway.ask(f"s{number}", *range(1000))
    gateway.core.ledger.commit()
    written: list[int] = []
    note = gateway.ledger.note
    monkeypatch.setattr(
        gateway.ledger,
        "note",
        lambda statement, *row: (written.append("INTO turns" in statement), note(statement, *row)),
    )
    for number in range(200):
        before = sum(written)
        gateway.ask(f"other{number}", 1)
        gateway.core.ledger.commit()
        assert sum(written) - before < 20, "one commit moves a bounded part of what fell behind"
    assert sum(written) == 40 + 200 - 4 - 1 and rows(path, "log") <= 10 + turn_log.ROWS_DROPPED
    gateway.kill()
    gateway = alone(path)
    assert under_way(gateway) == 240
    session = gateway.core.trajectories.get("s39")
    assert session is not None and session.turns[0].prompt_ids == tuple(range(1000))


def test_a_row_of_the_log_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_log, "ROW_BYTES", 10_000)
    gateway = alone(path)
    for number in range(50):
        gateway.ask(f"s{number}", *range(1000))
    gateway.core.ledger.commit()
    with sqlite3.connect(path) as database:
        lengths = [length for (length,) in database.execute("SELECT length(entries) FROM log")]
    assert len(lengths) > 20 and max(lengths) <= 10_000
    gateway.kill()
    gateway = alone(path)
    assert under_way(gateway) == 50
    gateway.core.ledger.commit()
    assert gateway.ledger.trouble is None
