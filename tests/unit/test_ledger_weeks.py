"""The ledger over weeks: it stays small, takes nothing that it could never write, and reads older versions' files."""

from __future__ import annotations

import os
import sqlite3
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.test_ledger import MODEL, SAMPLING, Life, events_of, rows

from rose.coserve.mailbox import Mailbox
from rose.engines.base import Request
from rose.errors import ConfigError, QueueFull, RequestRefused, Unavailable
from rose.rollout import ledger, ledger_file, trajectories, turn_log
from rose.rollout.ledger import Ledger
from rose.rollout.ledger_file import APPLICATION, LedgerFile
from rose.rollout.messages import Beat
from rose.rollout.sessions import Finish

HUGE = 2**70


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def alone(path: Path, **changes: Any) -> Life:
    """A life whose worker takes no turns: all of them wait."""
    life = Life(path, **changes)
    life.books.heard(life.member, Beat(0, 0, 0, 10_000, "0", False), 0.0)
    return life


def under_way(life: Life) -> int:
    return life.books.scheduler.waiting + life.books.scheduler.running


# Growth


def test_the_write_ahead_log_stays_short_while_commits_never_pause(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "LOG_BYTES", 256 << 10)
    life = Life(path)
    reader = sqlite3.connect(path, isolation_level=None)
    longest = 0
    for number in range(150):
        life.play(f"t{number}", f"g{number}")
        life.books.settle()
        life.books.batch(1, number)
        if number % 10 == 0:  # a commit comes while the checkpoint runs, as it always does under load
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM meta").fetchone()
            life.play(f"u{number}", f"h{number}")
            life.books.settle()
            life.ledger.checkpoint()
            reader.execute("COMMIT")
            life.ledger.shorten()
        longest = max(longest, life.ledger.log_bytes)
    assert 256 << 10 < longest < 3 * (256 << 10)


def test_turns_that_wait_are_written_once_however_long_they_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_log, "ROWS_KEPT", 4)
    monkeypatch.setattr(turn_log, "MOVED_BYTES", 20_000)
    life = alone(path)
    for number in range(40):
        life.ask(f"s{number}", *range(1000))
    life.books.settle()
    written: list[int] = []
    note = life.ledger.file.note
    monkeypatch.setattr(
        life.ledger,
        "_note",
        lambda statement, *row: (written.append(statement == ledger.PUT_TURN), note(statement, *row)),
    )
    for number in range(200):
        before = sum(written)
        life.ask(f"other{number}", 1)
        life.books.settle()
        assert sum(written) - before < 20, "one commit moves a bounded part of what fell behind"
    assert sum(written) == 40 + 200 - 4 - 1 and rows(path, "log") <= 10 + turn_log.ROWS_DROPPED
    life.killed()
    life = alone(path)
    assert under_way(life) == 240
    session = life.books.trajectories.get("s39")
    assert session is not None and session.turns[0].prompt_ids == tuple(range(1000))


def test_a_row_of_the_log_is_bounded_however_much_comes_between_two_commits(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_log, "ROW_BYTES", 10_000)
    life = alone(path)
    for number in range(50):
        life.ask(f"s{number}", *range(1000))
    life.books.settle()
    with sqlite3.connect(path) as database:
        lengths = [length for (length,) in database.execute("SELECT length(entries) FROM log")]
    assert len(lengths) > 20 and max(lengths) <= 10_000
    life.killed()
    life = alone(path)
    assert under_way(life) == 50
    life.books.settle()
    assert life.ledger.trouble is None


def test_what_is_remembered_of_ended_trajectories_is_a_ring(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories, "REMEMBERED_MAX", 2)
    monkeypatch.setattr(ledger, "ENDED_MAX", 8)
    life = Life(path)
    for number in range(20):
        life.play(f"t{number}", f"g{number}")
        life.books.batch(1, number)
    life.books.settle()
    life.killed()
    life = Life(path)
    assert rows(path, "ended") == 8 and rows(path, "sessions") <= 3
    for number in range(12, 17):
        with pytest.raises(RequestRefused, match="has finished"):
            life.books.begin(f"t{number}", 0.0, group="again")
    life.books.begin("t3", 0.0, group="again")
    life.play("t99", "g99")
    with pytest.raises(RequestRefused, match="another group"):
        life.books.begin("t99", 0.0, group="other")


# What can never be written


@pytest.mark.parametrize("value", [HUGE, -HUGE, b"x" * 11, "y" * 11])
def test_a_value_that_could_never_be_written_is_refused_when_it_is_noted(
    path: Path, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "ROW_BYTES_MAX", 10)
    file = LedgerFile(path, MODEL)
    file.note(ledger_file.SET_META, "good", 1)
    with pytest.raises(RequestRefused, match="cannot be kept"):
        file.note(ledger_file.SET_META, "bad", value)
    file.commit()
    assert file.trouble is None and ("good", 1) in list(file.rows("SELECT * FROM meta"))


def test_a_statement_that_fails_ends_the_life_with_a_word_and_leaves_no_open_transaction(path: Path) -> None:
    life = Life(path)
    life.books.begin("t", 0.0)
    life.ledger.file._rows.append(("INSERT INTO groups VALUES (?, ?, ?, ?, NULL, NULL)", (HUGE, "g", 1, "")))
    life.books.settle()
    assert life.ledger.trouble is not None and isinstance(life.ledger.broken, OverflowError)
    assert not life.ledger.file._database.in_transaction
    with pytest.raises(Unavailable, match="error of the gateway"):
        life.books.tick(0.1)
    life.killed()
    assert Life(path).books.begin("t", 0.0).finish is None, "the next life goes on from what is durable"


def test_a_conversation_with_integers_of_any_size_is_kept(path: Path) -> None:
    life = Life(path)
    session = life.books.trajectories.open("talk", 0.0)
    turn, _ = session.turn_of((1,), SAMPLING, None)
    said = [{"role": "tools", "tools": [{"maximum": HUGE}]}, {"role": "user", "content": "\ud800 and \u00e9"}]
    turn.hold_messages(said, 100)
    life.ask("talk", 1)
    life.says(5, end="stop")
    life.books.settle()
    life.killed()
    restored = Life(path).books.trajectories.get("talk")
    assert restored is not None and restored.turns[0].messages == said


def test_a_turn_that_the_ledger_refuses_is_not_taken_for_one_that_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(path)

    def refuse(turn: Any, request: Request) -> None:
        raise RequestRefused("cannot be kept")

    with monkeypatch.context() as patched:
        patched.setattr(life.ledger, "turn", refuse)
        with pytest.raises(RequestRefused):
            life.ask("s", 1)
    assert not life.turns and not life.books.scheduler.waiting
    reader = life.ask("s", 1)
    life.says(5, end="stop")
    life.books.settle()
    assert [event.token_ids for event in events_of(reader)] == [(5,)]


# Turns that were refused or given up


def test_a_refused_turn_is_not_kept_and_does_not_run_in_the_next_life(path: Path) -> None:
    life = alone(path, max_waiting=2)
    refused = 0
    for number in range(100):
        try:
            life.ask(f"s{number}", 1, 2, 3)
        except QueueFull:
            refused += 1
            session = life.books.trajectories.get(f"s{number}")
            assert session is not None and not session.turns and not session.size_bytes
    life.books.settle()
    assert refused == 98
    life.killed()
    assert under_way(alone(path, max_waiting=2)) == 2


def test_a_turn_that_waited_too_long_runs_again_only_when_it_is_asked_for(path: Path) -> None:
    life = Life(path, wait_s=1.0)
    life.ask("with", 1)
    life.says(5, 6)
    life.books.heard(life.member, Beat(1, 0, 0, 10_000, "0", False), 0.0)
    life.says(end="abort")
    without = life.ask("without", 1)
    life.books.tick(0.5)
    life.books.tick(2.0)
    assert isinstance(without._error, Unavailable) and not life.books.scheduler.waiting
    life.books.settle()
    life.killed()
    for _ in range(2):
        life = Life(path, wait_s=1.0)
        assert not life.turns, "no client is owed an answer"
        kept, forgotten = (life.books.trajectories.get(name) for name in ("with", "without"))
        assert kept is not None and kept.turns[0].produced.token_ids == [5, 6]
        assert forgotten is not None and not forgotten.turns
        life.books.settle()
        life.killed()
    life = Life(path)
    reader = life.ask("with", 1)
    assert life.turns[-1].request.partial.token_ids == (5, 6)
    life.books.settle()
    life.killed()
    life = Life(path)
    assert life.turns[-1].request.partial.token_ids == (5, 6), "it was under way again when the gateway died"
    reader = life.ask("with", 1)
    life.says(7, end="stop")
    life.books.settle()
    assert [event.token_ids for event in events_of(reader)] == [(5, 6, 7)]


def test_a_turn_asked_for_again_has_the_dice_it_had_before_it_was_refused(path: Path) -> None:
    life = alone(path, max_waiting=0)
    for _ in range(3):
        with pytest.raises(QueueFull):
            life.ask("s", 1)
    life.killed()
    life = Life(path)
    life.ask("s", 1)
    seed = life.turns[-1].request.sampling.seed
    other = Life(path.with_name("other"))
    other.ask("s", 1)
    assert other.turns[-1].request.sampling.seed == seed


def test_what_agents_make_the_gateway_keep_is_bounded(path: Path) -> None:
    life = alone(path, max_kept_mb=1, max_session_mb=1)
    prompt = tuple(range(6000))
    for number in range(4):
        life.ask(f"s{number}", *prompt)
    with pytest.raises(QueueFull, match="max_kept_mb") as full:
        life.ask("more", *prompt)
    assert full.value.retry_after_s > 0
    life.books.finish("s0", Finish(), 0.0)
    life.ask("more", *prompt)
    life.books.settle()
    used = life.books.trajectories.room.used_bytes
    life.killed()
    life = alone(path, max_kept_mb=10, max_session_mb=1)
    assert life.books.trajectories.room.used_bytes == used
    for number in range(3):
        life.ask("s1", number, *prompt)
    with pytest.raises(QueueFull, match="max_session_mb"):
        life.ask("s1", 7, *prompt)
    for name in ("s1", "s2", "s3", "more"):
        life.books.finish(name, Finish(), 0.0)
    assert life.books.trajectories.room.used_bytes == 0


# Numbers over restarts


def test_a_finished_trajectory_never_belongs_to_a_later_group(path: Path) -> None:
    life = Life(path)
    life.play("a", "A")
    assert life.books.batch(1, 0) is not None and life.books.batch(1, 1) is None
    life.books.settle()
    life.killed()
    life = Life(path)
    life.books.begin("b", 0.0, group="B", group_size=2)
    life.books.settle()
    life.killed()
    life = Life(path)
    again = life.books.begin("a", 0.0, group="A")
    assert again.finish is not None and again.group is None


def test_a_trainer_that_is_ahead_of_the_gateway_is_refused_and_loses_nothing(path: Path) -> None:
    life = Life(path)
    for name in ("a", "b"):
        life.play(name, name)
    with pytest.raises(RequestRefused, match="no batch 5"):
        life.books.batch(1, 5)
    first = life.books.batch(1, 0)
    assert first is not None and first.groups[0].group == "a" and life.books.batch(1, 0) == first


# Files


def test_the_ledger_is_readable_by_its_user_only(path: Path) -> None:
    before = os.umask(0)
    try:
        life = Life(path)
        life.play("t", "g")
        life.books.settle()
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    assert len(modes) == 4 and set(modes.values()) == {0o600}, modes


SCHEMA_2 = (
    "CREATE TABLE meta(name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID",
    "CREATE TABLE groups(id INTEGER PRIMARY KEY, name TEXT, size INTEGER, task TEXT, completed INTEGER, batch INTEGER)",
    "CREATE TABLE sessions(id INTEGER PRIMARY KEY, name TEXT, group_id INTEGER, task TEXT, seed INTEGER, finish BLOB,"
    " turn_count INTEGER, forks INTEGER, is_gone INTEGER)",
    "CREATE TABLE turns(session INTEGER, ordinal INTEGER, digest TEXT, parent INTEGER, prompt BLOB, messages BLOB,"
    " reply TEXT, finish TEXT, cached INTEGER, answer BLOB, PRIMARY KEY(session, ordinal)) WITHOUT ROWID",
    "CREATE TABLE log(id INTEGER PRIMARY KEY, entries BLOB)",
    "INSERT INTO meta VALUES ('model', 'model'), ('life', 7), ('batch', 3)",
    "INSERT INTO groups VALUES (1, 'g', 2, 'task', NULL, NULL)",
    "INSERT INTO sessions VALUES (1, 'member', 1, 'task', 11, NULL, 0, 0, 0), (2, 'talk', NULL, '', 12, NULL, 0, 0, 0)",
)


def write_schema_2(path: Path) -> None:
    encode = msgspec.msgpack.encode
    first = encode((0, [{"role": "user", "content": "hello"}]))
    second = encode((1, [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "?"}]))
    answer = encode([[5, 6], [-0.5, -0.6], [{"version": "0", "start": 0, "end": 2}], [], ["a"]])
    began = ["b", [2, 1], "later", 0, array("i", [9]).tobytes(), [{"max_tokens": 4}, "", 0], second]
    came = ["c", [2, 1], 0, [7], [-0.7], "0", [], ["a"]]
    log = b"".join(len(data).to_bytes(4, "little") + data for data in (encode(began), encode(came)))
    with sqlite3.connect(path) as database:
        for statement in SCHEMA_2:
            database.execute(statement)
        row = (2, 0, "first", None, array("i", [1, 2]).tobytes(), first, "hi", "stop", 1, answer)
        database.execute("INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        database.execute("INSERT INTO log VALUES (?, ?)", (7 << 40, log))
        database.execute(f"PRAGMA application_id = {APPLICATION}")
        database.execute("PRAGMA user_version = 2")


def test_a_ledger_of_schema_2_is_read_and_goes_on(path: Path) -> None:
    write_schema_2(path)
    life = Life(path)
    assert life.ledger.life == 8
    [turn] = life.turns
    assert turn.request.prompt_ids == (1, 2, 5, 6, 9) and turn.request.partial.token_ids == (7,)
    talk, member = (life.books.trajectories.get(name) for name in ("talk", "member"))
    assert talk is not None and talk.turns[1].messages == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "?"},
    ]
    assert member is not None and member.group_id == "g" and member.secret
    life.says(8, end="stop")
    life.books.settle()
    life.killed()
    talk = Life(path).books.trajectories.get("talk")
    assert talk is not None and talk.turns[1].produced.token_ids == [7, 8]


def test_a_migration_that_is_killed_leaves_the_old_ledger(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_schema_2(path)
    with monkeypatch.context() as patched:
        patched.setattr("rose.rollout.ledger_migrations._log_row_from_2", lambda entries: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Ledger(path, MODEL)
    assert Life(path).ledger.life == 8


def test_a_reader_of_a_turn_that_was_given_up_meanwhile_is_told_to_ask_again(path: Path) -> None:
    life = alone(path, wait_s=1.0)
    session = life.books.trajectories.open("s", 0.0)
    turn, seed = session.turn_of((1,), SAMPLING, None)
    life.ask("s", 1)
    life.books.tick(0.9)
    life.books.tick(1.8)
    assert not session.turns
    request = Request("again", (1,), msgspec.structs.replace(SAMPLING, seed=seed))
    with pytest.raises(Unavailable, match="again"):
        life.books.turn(turn, request, Mailbox(), 2.0, affinity="s", whole=True)


@pytest.mark.parametrize("statement", [
    "UPDATE log SET entries = x'05000000c1c1c1c1c1'",
    "UPDATE log SET entries = x'0400000093a16201'",
    "UPDATE sessions SET finish = x'c1'",
    "INSERT INTO meta VALUES ('versions', x'91a1ff')",
    "UPDATE turns SET answer = x'95919191'",
    "UPDATE turns SET prompt = x'010203'",
    "UPDATE turns SET messages = x'ff'",
])  # fmt: skip
def test_a_damaged_ledger_is_refused_in_words(path: Path, statement: str) -> None:
    life = Life(path)
    life.play("t", "g", size=2)
    life.ask("s", 1)
    life.books.settle()
    life.killed()
    with sqlite3.connect(path) as database:
        database.execute(statement)
    with pytest.raises(ConfigError, match="is damaged"):
        Life(path)
