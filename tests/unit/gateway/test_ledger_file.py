"""The ledger's file: access, full disks, checkpoints, foreign files and migration."""

from __future__ import annotations

import os
import sqlite3
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.ledger_world import MODEL, Incarnation, events_of, rows

from rose.api.worker_messages import NewVersion
from rose.errors import ConfigError, RequestRefused, Unavailable
from rose.gateway import ledger_file
from rose.gateway.ledger import Ledger
from rose.gateway.ledger_file import APPLICATION, LedgerFile
from rose.gateway.sessions import Finish

HUGE = 2**70
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
    path.parent.mkdir()
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


def test_a_full_disk_is_reported_and_loses_nothing(path: Path) -> None:
    gateway = Incarnation(path)
    gateway.core.trajectories.begin("t", 0.0, group="g")
    reader = gateway.ask("t", *range(2000))
    gateway.core.ledger.commit()
    database = gateway.ledger._database
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}")
    gateway.says(*range(2000), end="stop")
    gateway.core.ledger.commit()
    assert gateway.ledger.trouble is not None and "full" in gateway.ledger.trouble.what and gateway.ledger.trouble.hint
    assert not events_of(reader) and reader._error is gateway.ledger.trouble, "the reader is told why it gets no answer"
    for refused in (
        lambda: gateway.core.trajectories.begin("u", 0.0),
        lambda: gateway.ask("t", 1),
        lambda: gateway.core.finish("t", Finish(), 0.0),
        lambda: gateway.core.trajectories.batch(1, 0),
        lambda: gateway.core.publish(NewVersion("v1", "folder"), 0.0),
    ):
        with pytest.raises(Unavailable, match="ledger"):
            refused()
    gateway.core.tick(0.1)
    assert gateway.ledger.trouble is not None
    database.execute("PRAGMA max_page_count = 1000000")
    gateway.core.tick(0.2)
    assert gateway.ledger.trouble is None
    assert len(events_of(gateway.ask("t", *range(2000)))[0].token_ids) == 2000
    gateway.kill()
    assert len(events_of(Incarnation(path).ask("t", *range(2000)))[0].token_ids) == 2000


@pytest.mark.parametrize("spoil, words", [
    ("another model", "belongs to the model `other`"),
    ("another schema", "schema 99"),
    ("another database", "not a ledger"),
    ("no database", "cannot be opened"),
    ("in use", "another gateway"),
    ("no folder", "cannot be opened"),
])  # fmt: skip
def test_the_file_of_another_gateway_is_refused_with_a_reason(path: Path, spoil: str, words: str) -> None:
    path.parent.mkdir()
    held: LedgerFile | None = None
    if spoil == "another model":
        LedgerFile(path, "other").close()
    elif spoil == "no database":
        path.write_bytes(b"Dear diary, " * 1000)
    elif spoil == "in use":
        held = LedgerFile(path, MODEL)
    elif spoil == "no folder":
        (path.parent / "file").write_text("in the way")
        path = path.parent / "file" / "ledger.sqlite"
    else:
        if spoil == "another schema":
            LedgerFile(path, MODEL).close()
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE IF NOT EXISTS mine(x)")
            database.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match=words):
        LedgerFile(path, MODEL)
    if held is not None:
        held.close()
        LedgerFile(path, MODEL).close()


def test_a_checkpoint_copies_the_log_beside_the_writer(path: Path) -> None:
    gateway = Incarnation(path)
    for number in range(300):
        gateway.play(f"t{number}", f"g{number}")
        gateway.core.ledger.commit()
        assert gateway.core.trajectories.batch(1, number) is not None
        gateway.ledger.checkpoint()
    log = path.with_name(path.name + "-wal")
    assert log.stat().st_size < 4 << 20
    gateway.ledger.close()
    assert rows(path, "groups") == 1


def test_the_write_ahead_log_stays_short_while_commits_never_pause(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "LOG_BYTES", 256 << 10)
    gateway = Incarnation(path)
    reader = sqlite3.connect(path, isolation_level=None)
    longest = 0
    for number in range(150):
        gateway.play(f"t{number}", f"g{number}")
        gateway.core.ledger.commit()
        gateway.core.trajectories.batch(1, number)
        if number % 10 == 0:  # a commit comes while the checkpoint runs, as it always does under load
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM meta").fetchone()
            gateway.play(f"u{number}", f"h{number}")
            gateway.core.ledger.commit()
            gateway.ledger.checkpoint()
            reader.execute("COMMIT")
            gateway.ledger.shorten()
        longest = max(longest, gateway.ledger.log_bytes)
    assert 256 << 10 < longest < 3 * (256 << 10)


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
    assert file.trouble is None and ("good", 1) in list(file.fetch("SELECT * FROM meta"))


def test_a_failed_statement_is_reported_and_leaves_no_open_transaction(path: Path) -> None:
    gateway = Incarnation(path)
    gateway.core.trajectories.begin("t", 0.0)
    gateway.ledger._rows.append(("INSERT INTO groups VALUES (?, ?, ?, ?, NULL, NULL)", (HUGE, "g", 1, "")))
    gateway.core.ledger.commit()
    assert gateway.ledger.trouble is not None and isinstance(gateway.ledger.broken, OverflowError)
    assert not gateway.ledger._database.in_transaction
    with pytest.raises(Unavailable, match="error of the gateway"):
        gateway.core.tick(0.1)
    gateway.kill()
    assert Incarnation(path).core.trajectories.begin("t", 0.0).finish is None, (
        "the next gateway goes on from what is durable"
    )


def test_the_ledger_is_readable_by_its_user_only(path: Path) -> None:
    before = os.umask(0)
    try:
        gateway = Incarnation(path)
        gateway.play("t", "g")
        gateway.core.ledger.commit()
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    assert len(modes) == 4 and set(modes.values()) == {0o600}, modes


def test_a_ledger_of_schema_2_is_migrated(path: Path) -> None:
    write_schema_2(path)
    gateway = Incarnation(path)
    assert gateway.ledger.incarnation == 8
    [turn] = gateway.turns
    assert turn.request.prompt_ids == (1, 2, 5, 6, 9) and turn.request.partial.token_ids == (7,)
    talk, member = (gateway.core.trajectories.get(name) for name in ("talk", "member"))
    assert talk is not None and talk.turns[1].messages == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "?"},
    ]
    assert member is not None and member.group_id == "g" and member.secret
    gateway.says(8, end="stop")
    gateway.core.ledger.commit()
    gateway.kill()
    talk = Incarnation(path).core.trajectories.get("talk")
    assert talk is not None and talk.turns[1].produced.token_ids == [7, 8]


def test_a_migration_that_is_killed_leaves_the_old_ledger(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_schema_2(path)
    with monkeypatch.context() as patched:
        patched.setattr("rose.gateway.ledger_file._log_row_from_2", lambda entries: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Ledger(path, MODEL)
    assert Incarnation(path).ledger.incarnation == 8
