"""The ledger's file: one SQLite database, written in groups, so that durability costs microseconds.

`commit` writes the noted rows in one transaction and then calls back. It does not wait for the disk: a commit survives
the death of the process, and a loss of power leaves an older but whole state. `checkpoint` copies the write-ahead log
into the database, in any thread, since that waits for the disk.

If the file cannot be written (a full disk), rows stay noted, callbacks get the reason, and the next commit tries again.
`broken` holds an error of this program: the gateway must then end, and start again from what is durable.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rose.bounds import INT64_MAX
from rose.errors import ConfigError, RequestRefused, Unavailable

logger = logging.getLogger("rose.gateway")

APPLICATION = 0x524F5345  # "ROSE"; SQLite keeps it in the file's header
SCHEMA, SCHEMA_MIN = 3, 2
ROW_BYTES_MAX = 32 << 20  # of one value; SQLite takes 1 GB, a request's body is 16 MB
LOG_BYTES = 16 << 20  # a write-ahead log that is longer is shortened; each time costs milliseconds
VACUUM_PAGES = 64  # given back to the file system at once, a fraction of a millisecond
ENDED_TABLE = (
    "CREATE TABLE ended(slot INTEGER PRIMARY KEY, id INTEGER)",
    "CREATE INDEX ended_by_id ON ended(id)",
)
TABLES = (
    "CREATE TABLE meta(name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID",
    "CREATE TABLE groups(id INTEGER PRIMARY KEY, name TEXT, size INTEGER, task TEXT, completed INTEGER, batch INTEGER)",
    "CREATE TABLE sessions(id INTEGER PRIMARY KEY, name TEXT, group_id INTEGER, task TEXT, seed INTEGER, finish BLOB,"
    " turn_count INTEGER, forks INTEGER, is_gone INTEGER, secret TEXT)",
    "CREATE TABLE turns(session INTEGER, ordinal INTEGER, digest TEXT, parent INTEGER, prompt BLOB, messages BLOB,"
    " reply TEXT, finish TEXT, cached INTEGER, answer BLOB, asked BLOB, PRIMARY KEY(session, ordinal)) WITHOUT ROWID",
    "CREATE TABLE log(id INTEGER PRIMARY KEY, entries BLOB)",
    *ENDED_TABLE,
)
SET_META = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
LENGTH_BYTES = 4  # before each entry of a row of the log
MESSAGES_PLACE = 6  # in an entry of the log that says how a turn began: its tag and five values come before

OnDurable = Callable[[Unavailable | None], None]
"""A callback that gets None when what was noted before is durable, or the reason why it is not."""


class LedgerFile:
    """One database and its lock. `on_work` is called when there is something to commit; True if a reader waits."""

    def __init__(self, path: Path | None, model: str, *, connection: sqlite3.Connection | None = None) -> None:
        """Open or create the file. Raises ConfigError. With a connection there is no file, and nothing is locked."""
        self.on_work: Callable[[bool], None] = lambda is_urgent: None
        self.trouble: Unavailable | None = None
        self.broken: Exception | None = None
        self.commits = 0
        self.path = path
        self._rows: list[tuple[str, tuple[Any, ...]]] = []
        self._callbacks: list[OnDurable] = []
        self._checkpointed = 0
        self._lock = _lock(path) if path is not None else None
        try:
            self._database = connection if connection is not None else _connect(path)
            self.incarnation = _begin_incarnation(self._database, model, path)
        except (sqlite3.Error, OSError) as error:
            self._unlock()
            what = f"the ledger {path} cannot be opened: {error}"
            raise ConfigError(what, hint="is it a ledger, on a local disk with some space?") from error
        except BaseException:
            self._unlock()
            raise

    @property
    def log_bytes(self) -> int:
        """The length of the write-ahead log."""
        if self.path is None:
            return 0
        with contextlib.suppress(OSError):
            return os.stat(f"{self.path}-wal").st_size
        return 0

    def note(self, statement: str, *row: Any) -> None:
        """Write this with the next commit, in the order noted. Raises RequestRefused for what can never be written."""
        for value in row:
            if type(value) is int:
                if not -INT64_MAX <= value <= INT64_MAX:
                    raise RequestRefused(f"a number of {value.bit_length()} bits cannot be kept")
            elif value is not None and len(value) > ROW_BYTES_MAX:
                raise RequestRefused(f"{len(value)} bytes cannot be kept; the most is {ROW_BYTES_MAX}")
        self._rows.append((statement, row))
        if len(self._rows) == 1:
            self.on_work(False)

    def when_durable(self, callback: OnDurable) -> None:
        """Call back when all that was noted so far is durable: at once if it is."""
        if not (self._rows or self._callbacks):
            callback(None)
            return
        self._callbacks.append(callback)
        if len(self._callbacks) == 1:
            self.on_work(True)

    def commit(self) -> None:
        """Write all that was noted or nothing, then call back. Never raises."""
        if self._rows:
            self.trouble = self._write()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self.trouble)
            except Exception:  # the others wait for the same commit
                logger.exception("a reader of what became durable failed")

    def fetch(self, query: str) -> Iterator[tuple[Any, ...]]:
        return iter(self._database.execute(query))

    def fetch_one(self, query: str, *values: Any) -> tuple[Any, ...] | None:
        """Return the first row of what is committed. Raises Unavailable."""
        try:
            row: tuple[Any, ...] | None = self._database.execute(query, values).fetchone()
        except sqlite3.Error as error:
            raise Unavailable(f"the gateway cannot read its ledger ({error})") from error
        return row

    def shorten(self) -> None:
        """Restart the write-ahead log if it is long; right after a checkpoint that costs a few milliseconds.

        SQLite does so itself only if no commit came during the checkpoint, which never happens under steady load.
        """
        if self.log_bytes <= LOG_BYTES:
            return
        with contextlib.suppress(sqlite3.Error):  # a failure shows at a commit
            self._database.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def checkpoint(self) -> None:
        """Copy the log into the database, if there is anything new. From any thread; a failure shows at a commit."""
        if self.path is None or self._checkpointed == self.commits:
            return
        self._checkpointed = self.commits
        with contextlib.suppress(sqlite3.Error):
            database = sqlite3.connect(self.path, timeout=0.0)
            try:
                database.execute("PRAGMA wal_checkpoint(PASSIVE)")
            finally:
                database.close()

    def close(self) -> None:
        """Write what is noted, and close the file."""
        self.commit()
        self.abandon()

    def abandon(self) -> None:
        """Close the file as a killed process would: what was not committed is gone."""
        self._rows, self._callbacks = [], []
        if self.path is not None:
            self._database.close()
        self._unlock()

    def _write(self) -> Unavailable | None:
        database = self._database
        try:
            database.execute("BEGIN IMMEDIATE")
            for statement, row in self._rows:
                database.execute(statement, row)
            database.execute("COMMIT")
        except Exception as error:
            with contextlib.suppress(sqlite3.Error):
                if database.in_transaction:
                    database.execute("ROLLBACK")
            if not isinstance(error, sqlite3.OperationalError):
                self.broken = error
            what = f"the gateway cannot write its ledger ({error})"
            return Unavailable(what, hint=f"see to the disk of {self.path}", retry_after_s=1.0)
        self.commits += 1
        self._rows = []
        return None

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(path: Path) -> int:
    """Lock the file until the returned descriptor is closed, also by the end of the process."""
    beside = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"the ledger {path} cannot be opened: {error.strerror}", hint="choose another file"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"another gateway uses the ledger {path}", hint="give each its own with --ledger") from error
    return descriptor


def _connect(path: Path | None) -> sqlite3.Connection:
    if path is not None:  # the files that SQLite makes beside it get the same mode
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    database = sqlite3.connect(path or ":memory:", isolation_level=None, timeout=0.0)
    database.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only a new file takes it
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute("PRAGMA wal_autocheckpoint = 0")  # `checkpoint` does it, where no reader waits
    return database


def _begin_incarnation(database: sqlite3.Connection, model: str, path: Path | None) -> int:
    """Return the number of this incarnation, durable before anything is done in it."""
    if not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        _create(database, model)
    application = database.execute("PRAGMA application_id").fetchone()[0]
    schema = database.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION:
        raise ConfigError(f"{path} is not a ledger of ROSE", hint="choose another file with --ledger")
    if schema != SCHEMA:
        migrate(database, schema, path)
    known = dict(database.execute("SELECT name, value FROM meta"))
    if known["model"] != model:
        what = f"the ledger {path} belongs to the model `{known['model']}`, not `{model}`"
        raise ConfigError(what, hint="give every model its own ledger")
    incarnation = known["life"] + 1
    database.execute(SET_META, ("life", incarnation))
    return int(incarnation)


def _create(database: sqlite3.Connection, model: str) -> None:
    database.execute("BEGIN IMMEDIATE")
    for statement in TABLES:
        database.execute(statement)
    database.execute(SET_META, ("model", model))
    database.execute(SET_META, ("life", 0))
    database.execute(f"PRAGMA application_id = {APPLICATION}")
    database.execute(f"PRAGMA user_version = {SCHEMA}")
    database.execute("COMMIT")


def messages_to_json(messages: Any) -> bytes:
    """Encode a conversation so that integers of any size and lone surrogates come back as they were."""
    return json.dumps(messages, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def messages_from_json(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "surrogatepass"))


# Migrations


def migrate(database: sqlite3.Connection, schema: int, path: Path | None) -> None:
    """Bring an older schema to the present one, in one transaction: a migration that is killed leaves the old ledger.

    Raises ConfigError for a schema that is too old, or newer than this program.
    """
    if not SCHEMA_MIN <= schema < SCHEMA:
        what = f"the ledger {path} has schema {schema}, this version of ROSE reads {SCHEMA_MIN} to {SCHEMA}"
        raise ConfigError(what, hint="start with a new file, or with the version that wrote it")
    database.execute("BEGIN IMMEDIATE")
    try:
        for older in range(schema, SCHEMA):
            MIGRATIONS[older](database)
        database.execute(f"PRAGMA user_version = {SCHEMA}")
        database.execute("COMMIT")
    except BaseException:
        database.execute("ROLLBACK")
        raise


def _from_2(database: sqlite3.Connection) -> None:
    """Conversations become JSON; waiting turns get rows (`asked`), trajectories secrets, ended ids a table."""
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


MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {2: _from_2}
