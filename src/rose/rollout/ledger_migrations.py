"""Ledgers that earlier versions of ROSE wrote are brought to the present schema when they are opened.

Each step goes from one schema to the next, and all steps are one transaction with the new number: a migration that is
killed leaves the old ledger. A schema that is newer than this program is refused, since its meaning is not known.

| schema | what changed |
|---|---|
| 3 | conversations are JSON, which holds integers of any size; turns that wait have rows of their own (`asked`); trajectories have a secret; ids of ended trajectories are remembered by their hash (`ended`) |
"""  # noqa: E501

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rose.errors import ConfigError

ENDED_TABLE = (
    "CREATE TABLE ended(slot INTEGER PRIMARY KEY, id INTEGER)",
    "CREATE INDEX ended_by_id ON ended(id)",
)
OLDEST = 2
LENGTH_BYTES = 4  # before each entry of a row of the log
MESSAGES_PLACE = 6  # in an entry of the log that says how a turn began: its tag and five values come before


def migrate(database: sqlite3.Connection, found: int, wanted: int, path: Path | None) -> None:
    """Raises ConfigError for a schema that is too old or too new."""
    if not OLDEST <= found < wanted:
        what = f"the ledger {path} has schema {found}, this version of ROSE reads {OLDEST} to {wanted}"
        raise ConfigError(what, hint="start with a new file, or with the version that wrote it")
    database.execute("BEGIN IMMEDIATE")
    try:
        for schema in range(found, wanted):
            _STEPS[schema](database)
        database.execute(f"PRAGMA user_version = {wanted}")
        database.execute("COMMIT")
    except BaseException:
        database.execute("ROLLBACK")
        raise


def messages_to_json(messages: Any) -> bytes:
    """Encode a conversation so that integers of any size and lone surrogates come back as they were."""
    return json.dumps(messages, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def messages_from_json(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "surrogatepass"))


def _from_2(database: sqlite3.Connection) -> None:
    for statement in (
        "ALTER TABLE turns ADD COLUMN asked BLOB",
        "ALTER TABLE sessions ADD COLUMN secret TEXT",
        *ENDED_TABLE,
    ):
        database.execute(statement)
    database.execute("UPDATE sessions SET secret = lower(hex(randomblob(16))) WHERE group_id IS NOT NULL")
    turns = database.execute("SELECT session, ordinal, messages FROM turns WHERE messages IS NOT NULL").fetchall()
    for session, ordinal, messages in turns:
        text = messages_to_json(msgspec.msgpack.decode(messages))
        database.execute("UPDATE turns SET messages = ? WHERE session = ? AND ordinal = ?", (text, session, ordinal))
    for number, entries in database.execute("SELECT id, entries FROM log").fetchall():
        database.execute("UPDATE log SET entries = ? WHERE id = ?", (_log_row_from_2(entries), number))


def _log_row_from_2(entries: bytes) -> bytes:
    made, start = bytearray(), 0
    while start < len(entries):
        end = start + LENGTH_BYTES + int.from_bytes(entries[start : start + LENGTH_BYTES], "little")
        entry = msgspec.msgpack.decode(entries[start + LENGTH_BYTES : end])
        if entry[0] == "b" and entry[MESSAGES_PLACE] is not None:
            entry[MESSAGES_PLACE] = messages_to_json(msgspec.msgpack.decode(entry[MESSAGES_PLACE]))
        data = msgspec.msgpack.encode(entry)
        made += len(data).to_bytes(LENGTH_BYTES, "little") + data
        start = end
    return bytes(made)


_STEPS: dict[int, Callable[[sqlite3.Connection], None]] = {2: _from_2}
