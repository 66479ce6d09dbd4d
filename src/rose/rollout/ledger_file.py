"""The ledger's file: one SQLite database, written in groups, so that a durable word costs microseconds.

Rows are noted, and written together in one transaction by `commit`; calls that were left with `then` are made after it,
so whoever is told something is told what is durable. A commit goes into the write-ahead log without waiting for the
disk: what was committed survives the death of the process at any moment, and a loss of power leaves an older but whole
state. `checkpoint` copies the log into the database, on a connection of its own and in any thread, since that waits for
the disk. SQLite begins the log anew only if no commit came meanwhile, which never happens under steady load, so
`shorten` does it on the writer's connection, where only the last few commits are left to copy.

A file that cannot be written, because the disk is full, say, is a trouble and not the end: what was noted stays noted,
those who wait are told why they get no answer, and the next commit tries everything again. A row that SQLite could
never take is refused by `note`, before anything depends on it. If a statement fails all the same, that is an error of
this program: `broken` says so, and the gateway must end and start again from what is durable.

One gateway has the file at a time. Its *life* is a number that grows every time the file is opened.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rose.bounds import INT64_MAX
from rose.errors import ConfigError, RequestRefused, Unavailable
from rose.rollout.ledger_migrations import ENDED_TABLE, migrate

logger = logging.getLogger("rose.gateway")

APPLICATION = 0x524F5345  # "ROSE"; SQLite keeps it in the file's header
SCHEMA = 3
ROW_BYTES_MAX = 32 << 20  # of one value; SQLite takes 1 GB, a request's body is 16 MB
LOG_BYTES = 16 << 20  # a write-ahead log that is longer is shortened; each time costs milliseconds
VACUUM_PAGES = 64  # given back to the file system at once, a fraction of a millisecond
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

Told = Callable[[Unavailable | None], None]
"""Called with None when what was noted before is durable, or with the reason why it is not."""


class LedgerFile:
    """`on_work` is called when there is something to commit; True if somebody waits for it."""

    def __init__(self, path: Path | None, model: str, *, connection: sqlite3.Connection | None = None) -> None:
        """Raises ConfigError. With a connection of somebody else there is no file, and nothing is locked."""
        self.on_work: Callable[[bool], None] = lambda is_urgent: None
        self.trouble: Unavailable | None = None
        self.broken: Exception | None = None
        self.commits = 0
        self.path = path
        self._rows: list[tuple[str, tuple[Any, ...]]] = []
        self._told: list[Told] = []
        self._checkpointed = 0
        self._lock = _lock(path) if path is not None else None
        try:
            self._database = connection if connection is not None else _connect(path)
            self.life = _begin_life(self._database, model, path)
        except BaseException:
            self._unlock()
            raise

    @property
    def has_work(self) -> bool:
        return bool(self._rows or self._told)

    @property
    def log_bytes(self) -> int:
        """Length of the write-ahead log."""
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

    def then(self, told: Told) -> None:
        """Call this when all that was noted so far is durable: at once if it is."""
        if not self.has_work:
            told(None)
            return
        self._told.append(told)
        if len(self._told) == 1:
            self.on_work(True)

    def commit(self) -> None:
        """All or nothing; then those who wait are told which. Never raises."""
        if self._rows:
            self.trouble = self._write()
        told, self._told = self._told, []
        for call in told:
            try:
                call(self.trouble)
            except Exception:  # the others wait for the same commit
                logger.exception("what was durable could not be told")

    def rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        return iter(self._database.execute(query))

    def one(self, query: str, *values: Any) -> tuple[Any, ...] | None:
        """The first row of what is committed. Raises Unavailable."""
        try:
            found: tuple[Any, ...] | None = self._database.execute(query, values).fetchone()
        except sqlite3.Error as error:
            raise Unavailable(f"the gateway cannot read its ledger ({error})") from error
        return found

    def shorten(self) -> None:
        """Begin the write-ahead log anew if it is long; right after a checkpoint that costs a few milliseconds."""
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
        """Write what is noted, and leave."""
        self.commit()
        self.abandon()

    def abandon(self) -> None:
        """Leave as if killed: what was not committed is gone."""
        self._rows, self._told = [], []
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
    """Held until it is closed, also by the end of the process."""
    beside = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"the ledger {path} cannot be opened: {error.strerror}", hint="choose another file"
        ) from error
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(found)
        raise ConfigError(f"another gateway uses the ledger {path}", hint="give each its own with --ledger") from error
    return found


def _connect(path: Path | None) -> sqlite3.Connection:
    with _in_words(path):
        if path is not None:  # what it makes beside it gets the same rights
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        database = sqlite3.connect(path or ":memory:", isolation_level=None, timeout=0.0)
        database.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only a new file takes it
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA wal_autocheckpoint = 0")  # `checkpoint` does it, where nobody waits for it
        return database


def _begin_life(database: sqlite3.Connection, model: str, path: Path | None) -> int:
    """The number of this life, durable before anything is done in it."""
    with _in_words(path):
        if not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            _create(database, model)
        application = database.execute("PRAGMA application_id").fetchone()[0]
        schema = database.execute("PRAGMA user_version").fetchone()[0]
        if application != APPLICATION:
            raise ConfigError(f"{path} is not a ledger of ROSE", hint="choose another file with --ledger")
        if schema != SCHEMA:
            migrate(database, schema, SCHEMA, path)
        known = dict(database.execute("SELECT name, value FROM meta"))
        if known["model"] != model:
            what = f"the ledger {path} belongs to the model `{known['model']}`, not `{model}`"
            raise ConfigError(what, hint="give every model its own ledger")
        life = known["life"] + 1
        database.execute(SET_META, ("life", life))
        return int(life)


def _create(database: sqlite3.Connection, model: str) -> None:
    database.execute("BEGIN IMMEDIATE")
    for statement in TABLES:
        database.execute(statement)
    database.execute(SET_META, ("model", model))
    database.execute(SET_META, ("life", 0))
    database.execute(f"PRAGMA application_id = {APPLICATION}")
    database.execute(f"PRAGMA user_version = {SCHEMA}")
    database.execute("COMMIT")


@contextmanager
def _in_words(path: Path | None) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        what = f"the ledger {path} cannot be opened: {error}"
        raise ConfigError(what, hint="is it a ledger, on a local disk with some space?") from error
