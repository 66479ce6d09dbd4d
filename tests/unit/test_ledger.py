"""The ledger's file: what it refuses, what it does when the disk is full, and that it does not grow for ever."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from rose.config.gateway import GatewaySettings
from rose.coserve.mailbox import Mailbox
from rose.engines.base import Sampling, TokenEvent
from rose.errors import ConfigError, Unavailable
from rose.rollout import trajectories, turn_log
from rose.rollout.books import Books
from rose.rollout.ledger import Ledger, NoLedger
from rose.rollout.ledger_file import LedgerFile
from rose.rollout.messages import Join, NewVersion, Piece, Tokens, Turn
from rose.rollout.sessions import Finish

MODEL = "model"
SAMPLING = Sampling(max_tokens=4096)


class Life:
    """A gateway's books over a file, with one member that takes notes."""

    def __init__(self, path: Path, **changes: Any) -> None:
        self.ledger = Ledger(path, MODEL)
        self.books = Books(MODEL, GatewaySettings(**changes), self.ledger)
        self.told: list[Any] = []
        join = Join("a", "dedicated", MODEL, "0", 8, 10_000, 4096)
        self.member = self.books.join(join, self.told.append, 0.0)

    @property
    def turns(self) -> list[Turn]:
        return [message for message in self.told if isinstance(message, Turn)]

    def ask(self, name: str, *prompt_ids: int, whole: bool = True) -> Mailbox:
        reader = Mailbox()
        self.books.ask(name, prompt_ids, SAMPLING, reader, 0.0, whole=whole)
        return reader

    def says(self, *token_ids: int, end: Any = None, top: Any = ()) -> None:
        """About the newest turn."""
        logprobs = tuple(-0.1 * token_id for token_id in token_ids)
        self.books.heard(
            self.member, Tokens((Piece(self.turns[-1].ticket, token_ids, logprobs, "0", end, 2, top),)), 0.0
        )

    def play(self, name: str, group: str, size: int = 1) -> None:
        self.books.begin(name, 0.0, group=group, group_size=size, seed=3)
        self.ask(name, 1, 2)
        self.says(5, 6, end="stop")
        self.ask(name, 1, 2, 5, 6, 7)
        self.says(8, end="length")
        self.books.finish(name, Finish(1.0, True), 0.0)

    def killed(self) -> None:
        self.ledger.file.abandon()


def events_of(reader: Mailbox) -> list[TokenEvent]:
    return list(reader._events)


def rows(path: Path, table: str) -> int:
    with sqlite3.connect(path) as database:
        return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger.sqlite"


def test_readers_are_told_what_is_durable_and_nothing_else(path: Path) -> None:
    life = Life(path)
    whole, stream = life.ask("s", 1), life.ask("s", 1, whole=False)
    life.says(5)
    life.says(6, end="stop")
    assert events_of(whole) == events_of(stream) == []
    life.books.settle()
    assert [event.token_ids for event in events_of(whole)] == [(5, 6)]
    assert [event.token_ids for event in events_of(stream)] == [(5,), (6,)]
    late = life.ask("s", 1)
    assert [event.token_ids for event in events_of(late)] == [(5, 6)], "what is durable is told at once"


def test_a_turn_under_way_goes_on_in_the_next_life_from_what_was_received(path: Path) -> None:
    life = Life(path)
    life.ask("s", 1, 2)
    life.says(5, 6, top=(((5, -0.5), (7, -1.0)), ((6, -0.6), (8, -1.1))))
    life.books.settle()
    life.says(7)  # is lost with the gateway
    first = life.turns[-1]
    life.killed()
    life = Life(path)
    [turn] = life.turns
    assert turn.request.partial.token_ids == (5, 6) and turn.request.partial.logprobs == (-0.5, -0.1 * 6)
    assert turn.request.sampling == first.request.sampling and turn.request.prompt_ids == (1, 2)
    assert turn.ticket > first.ticket
    reader = life.ask("s", 1, 2)
    life.says(9, end="stop", top=(((9, -0.9),),))
    life.books.settle()
    [event] = events_of(reader)
    assert event.token_ids == (5, 6, 9) and event.finish_reason == "stop" and len(event.top_logprobs) == 3
    assert event.workers == ("a",)
    assert len(life.turns) == 1, "the repeated request found its turn"


def test_a_turn_that_runs_for_long_is_kept_whole_and_the_log_stays_short(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_log, "ROWS_KEPT", 4)
    life = Life(path)
    life.ask("long", 1, 2)
    long = life.turns[-1].ticket
    said: list[int] = []
    for number in range(100):
        version, said = str(number // 50), [*said, number]
        piece = Piece(long, (number,), (-0.1 * number,), version, None, None, (((number, -0.5),),))
        life.books.pool.restore([NewVersion(version, "folder")])
        life.books.heard(life.member, Tokens((piece,)), 0.0)
        life.books.settle()
    assert 0 < rows(path, "log") <= 8 + turn_log.ROWS_DROPPED
    life.killed()
    life = Life(path)
    assert rows(path, "log") <= 8 + turn_log.ROWS_DROPPED
    for _ in range(2):  # also if it dies again before it has said anything
        [turn] = [turn for turn in life.turns if turn.request.prompt_ids == (1, 2)]
        assert list(turn.request.partial.token_ids) == said
        assert turn.request.partial.logprobs == tuple(-0.1 * number for number in range(100))
        assert [(span.version, span.start, span.end) for span in turn.request.partial.spans] == [
            ("0", 0, 50),
            ("1", 50, 100),
        ]
        life.books.settle()
        assert rows(path, "log") <= 8 + turn_log.ROWS_DROPPED
        life.killed()
        life = Life(path)


def test_turns_that_run_beside_each_other_come_back_in_their_order(path: Path) -> None:
    life = Life(path)
    life.ask("s", 1, 2)
    first = life.turns[-1].ticket
    life.ask("s", 1, 3)
    life.says(6, end="stop")
    life.books.heard(life.member, Tokens((Piece(first, (5,), (-0.5,), "0", None),)), 0.0)
    life.books.settle()
    life.killed()
    life = Life(path)
    session = life.books.trajectories.get("s")
    assert session is not None and [turn.ordinal for turn in session.turns] == [0, 1]
    assert [turn.finish_reason for turn in session.turns] == [None, "stop"]
    assert [turn.request.partial.token_ids for turn in life.turns] == [(5,)]
    assert session.turn_of((1, 4), SAMPLING, None)[0].ordinal == 2


def test_an_answer_that_was_lost_on_the_way_is_given_again_by_the_next_life(path: Path) -> None:
    life = Life(path)
    life.ask("s", 1, 2)
    life.says(5, 6, end="stop")
    life.books.settle()
    life.killed()
    life = Life(path)
    again = life.ask("s", 1, 2)
    [event] = events_of(again)
    assert (event.token_ids, event.finish_reason, event.cached_tokens) == ((5, 6), "stop", 2) and not life.turns
    life.ask("s", 1, 2, 5, 6, 7)
    session = life.books.trajectories.get("s")
    assert session is not None and session.turns[1].parent is session.turns[0], "and what follows goes on from it"


def test_what_a_conversation_said_is_known_to_the_next_life(path: Path) -> None:
    life = Life(path)
    opening = [{"role": "user", "content": "hello"}]
    session = life.books.trajectories.open("talk", 0.0)
    for number, prompt_ids in enumerate([(1,), (1, 5, 6, 2)]):
        turn, _ = session.turn_of(prompt_ids, SAMPLING, None)
        turn.messages = opening + [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "?"}] * number
        life.ask("talk", *prompt_ids)
        life.says(5, 6, 7, end="length")
        life.books.cut(turn, 2, 0.0)
        turn.reply_text = "hi"
    life.killed()
    restored = Life(path).books.trajectories.get("talk")
    assert restored is not None
    assert [turn.messages for turn in restored.turns] == [turn.messages for turn in session.turns]
    assert [turn.reply_text for turn in restored.turns] == ["hi", "hi"]
    assert [turn.produced.token_ids for turn in restored.turns] == [[5, 6], [5, 6]]
    assert [turn.finish_reason for turn in restored.turns] == ["stop", "stop"]


def test_a_batch_stays_the_same_until_it_is_taken_and_then_its_rows_go(path: Path) -> None:
    life = Life(path)
    for name, group in (("b1", "b"), ("a1", "a")):
        life.play(name, group)
    batch = life.books.batch(2, 0)
    assert batch is not None and [group.group for group in batch.groups] == ["b", "a"], (
        "in the order they were complete"
    )
    life.books.settle()
    life.killed()
    life = Life(path)
    assert life.books.batch(2, 0) == batch
    life.play("b2", "b")  # a name that is used again meanwhile
    life.books.settle()
    life.killed()
    life = Life(path)
    assert life.books.batch(2, 0) == batch
    following = life.books.batch(1, 1)
    assert following is not None and following.batch == 2 and following.groups[0].trajectories[0].trajectory_id == "b2"
    assert life.books.batch(1, 2) is None
    life.books.settle()
    assert rows(path, "turns") == rows(path, "groups") == 0
    life.killed()
    life = Life(path)
    assert life.books.finish("a1", Finish(1.0, True), 0.0).turn_count == 2, "how it ended is remembered"
    assert life.books.begin("a1", 0.0, group="a").finish is not None, "and that it had begun"


def test_what_is_remembered_of_the_past_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories, "REMEMBERED_MAX", 3)
    life = Life(path)
    for number in range(10):
        life.play(f"t{number}", f"g{number}")
        assert life.books.batch(1, number) is not None
    for number in range(10):
        life.books.trajectories.open(f"s{number}", 0.0)
        life.books.finish(f"s{number}", Finish(), 0.0)
    life.books.settle()
    assert rows(path, "sessions") <= 3 + 1 and rows(path, "groups") == 1


def test_published_versions_are_wanted_in_the_next_life(path: Path) -> None:
    life = Life(path, max_staleness=1)
    for name in ("v1", "v2", "v3"):
        life.books.publish(NewVersion(name, "folder", hash=f"hash of {name}"), 0.0)
    life.books.settle()
    life.killed()
    life = Life(path, max_staleness=1)
    assert [version.hash for version in life.books.pool.published] == ["hash of v2", "hash of v3"]
    assert life.told == [NewVersion("v3", "folder", hash="hash of v3")]


def test_numbers_of_two_lives_never_meet(path: Path) -> None:
    seen: set[int] = set()
    for _ in range(3):
        life = Life(path)
        life.ask("s", 1)
        assert life.turns[-1].ticket not in seen and life.member.lease not in seen
        seen |= {life.turns[-1].ticket, life.member.lease}
        life.killed()
    assert NoLedger().first_number != NoLedger().first_number


def test_a_full_disk_is_told_and_nothing_is_lost_when_it_is_not_full_any_more(path: Path) -> None:
    life = Life(path)
    life.books.begin("t", 0.0, group="g")
    reader = life.ask("t", *range(2000))
    life.books.settle()
    database = life.ledger.file._database
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}")
    life.says(*range(2000), end="stop")
    life.books.settle()
    assert life.ledger.trouble is not None and "full" in life.ledger.trouble.what and life.ledger.trouble.hint
    assert not events_of(reader) and reader._error is life.ledger.trouble, "the reader is told why it gets no answer"
    for refused in (
        lambda: life.books.begin("u", 0.0),
        lambda: life.ask("t", 1),
        lambda: life.books.finish("t", Finish(), 0.0),
        lambda: life.books.batch(1, 0),
        lambda: life.books.publish(NewVersion("v1", "folder"), 0.0),
    ):
        with pytest.raises(Unavailable, match="ledger"):
            refused()
    life.books.tick(0.1)
    assert life.ledger.trouble is not None
    database.execute("PRAGMA max_page_count = 1000000")
    life.books.tick(0.2)
    assert life.ledger.trouble is None
    assert len(events_of(life.ask("t", *range(2000)))[0].token_ids) == 2000
    life.killed()
    assert len(events_of(Life(path).ask("t", *range(2000)))[0].token_ids) == 2000


@pytest.mark.parametrize("spoil, words", [
    ("another model", "belongs to the model `other`"),
    ("another schema", "schema 99"),
    ("another database", "not a ledger"),
    ("no database", "cannot be opened"),
    ("in use", "another gateway"),
    ("no folder", "cannot be opened"),
])  # fmt: skip
def test_a_file_that_is_not_this_gateways_is_refused_in_words(path: Path, spoil: str, words: str) -> None:
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


def test_the_log_is_brought_into_the_database_beside_the_writer(path: Path) -> None:
    life = Life(path)
    for number in range(300):
        life.play(f"t{number}", f"g{number}")
        life.books.settle()
        assert life.books.batch(1, number) is not None
        life.ledger.checkpoint()
    log = path.with_name(path.name + "-wal")
    assert log.stat().st_size < 4 << 20
    life.ledger.close()
    assert rows(path, "groups") == 1
