"""The journal loses nothing that was appended, says what is torn, refuses what is damaged, and replays."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

from rose.core.facts import Grant, StepFeatures
from rose.errors import ConfigError, JournalCorrupt, Unavailable
from rose.observe.journal import Journal, Notes, RecordTypes, UnknownRecord, core_vocabulary, line_of, read

FACT = StepFeatures(new_tokens=3, sequences=1)
GRANT = Grant(tokens=512, sequences=4, until_s=2.5, reason="serving is idle")


def write(path, count=3, **options):
    with Journal(path, **options) as journal:
        for number in range(count):
            journal.append(float(number), StepFeatures(new_tokens=number), [GRANT])
    return path


def numbers(path, notes=None):
    return [entry.fact.new_tokens for entry in read(path, notes=notes)]


def test_what_was_appended_is_read_back(tmp_path):
    with Journal(tmp_path / "deep" / "journal.jsonl") as journal:
        journal.append(1.5, FACT, [GRANT])
        journal.append(2.5, FACT)
    first, second = read(journal.path)
    assert (first.t_s, first.fact, first.decisions, first.line) == (1.5, FACT, (GRANT,), 1)
    assert (second.t_s, second.fact, second.decisions, second.line) == (2.5, FACT, (), 2)


def test_every_line_can_be_read_by_other_tools(tmp_path):
    path = write(tmp_path / "journal.jsonl", 1)
    utc = next(read(path)).utc
    assert path.read_text() == (
        f'{{"utc":"{utc}","t":0.0,'
        '"fact":{"kind":"StepFeatures","new_tokens":0,"kv_read_tokens":0,"new_by_context":0,"sequences":0},'
        '"decisions":[{"kind":"Grant","tokens":512,"sequences":4,"until_s":2.5,"reason":"serving is idle",'
        '"step_s_max":{"$float":"inf"}}]}\n'
    )


def test_infinity_survives(tmp_path):
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append(0.0, FACT, [Grant(1, 1, math.inf)])
    assert next(read(journal.path)).decisions[0].until_s == math.inf


@pytest.mark.parametrize("cut_bytes", [1, 2, 40])
def test_a_torn_last_line_is_told_and_then_cut_off(tmp_path, cut_bytes):
    path = write(tmp_path / "journal.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut_bytes])
    notes = Notes()
    assert numbers(path, notes) == [0, 1]
    assert notes.torn_bytes == len(whole) // 3 - cut_bytes
    write(path, 1)
    notes = Notes()
    assert numbers(path, notes) == [0, 1, 0] and notes.torn_bytes == 0


def test_a_file_that_is_one_torn_line_is_empty(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"t": 1' + b" " * 200_000)
    assert numbers(path) == []
    write(path, 1)
    assert numbers(path) == [0]


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"\x00\x00\x00",
        b"not json",
        b"[]",
        b"{}",
        b'{"t":1.0,"fact":{"kind":"StepFeatures"}}',
        b'{"t":1.0,"fact":{"new_tokens":1},"decisions":[]}',
        b'{"t":1.0,"fact":{"kind":"Nobody"},"decisions":[]}',
        b'{"t":1.0,"fact":{"kind":"StepFeatures","new_tokens":"x"},"decisions":[]}',
        b'{"t":1.0,"fact":{"kind":"StepFeatures","colour":1},"decisions":[]}',
        b'{"t":1.0,"fact":{"kind":"Grant","tokens":1},"decisions":[]}',
        b'{"t":null,"fact":{"kind":"StepFeatures"},"decisions":[]}',
        b'{"t":1.0,"fact":{"kind":"StepFeatures"},"decisions":[1]}',
        b'{"t":1.0,"fact":{"kind":"StepFeatures"},"decisions":[],"more":1}',
        b'{"t":1.0,"fact":{"kind":"\xff"},"decisions":[]}',
    ],
)
def test_a_broken_line_in_the_middle_is_named_by_its_number(tmp_path, broken):
    path = write(tmp_path / "journal.jsonl")
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], broken, lines[2]]) + b"\n")
    with pytest.raises(JournalCorrupt, match=r"line 2 of journal .*journal\.jsonl"):
        numbers(path)


def test_no_journal_is_said_plainly(tmp_path):
    with pytest.raises(ConfigError, match="there is no journal"):
        numbers(tmp_path / "journal.jsonl")


def test_size_is_bounded_and_order_kept(tmp_path):
    path = write(tmp_path / "journal.jsonl", 100, file_bytes_max=1000, files_max=3)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4 and all(file.stat().st_size <= 1000 for file in files)
    notes = Notes()
    found = numbers(path, notes)
    assert found == list(range(100 - len(found), 100)) and len(found) > 5
    assert notes.files == 4 and not notes.is_whole and notes.entries == len(found)


def test_a_rotated_journal_is_whole_until_files_are_dropped(tmp_path):
    path = write(tmp_path / "journal.jsonl", 10, file_bytes_max=600)
    write(path, 2, file_bytes_max=600)
    notes = Notes()
    assert numbers(path, notes) == [*range(10), 0, 1]
    assert notes.is_whole and notes.files > 2


def test_a_line_larger_than_a_file_gets_its_own(tmp_path):
    path = write(tmp_path / "journal.jsonl", 3, file_bytes_max=10)
    assert numbers(path) == [0, 1, 2]


def test_one_writer_at_a_time(tmp_path):
    path = tmp_path / "journal.jsonl"
    with Journal(path), pytest.raises(Unavailable, match="another process"):
        Journal(path)
    write(path, 1)
    assert numbers(path) == [0]


def test_closing_twice_is_fine(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.close()
    journal.close()
    assert numbers(journal.path) == []


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path, monkeypatch):
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append(0.0, FACT)
        real = os.write
        monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:10]))
        with pytest.raises(Unavailable, match="disk is full"):
            journal.append(1.0, FACT)
        monkeypatch.undo()
        journal.append(2.0, FACT)
    assert [entry.t_s for entry in read(journal.path)] == [0.0, 2.0]


def test_a_killed_writer_loses_nothing_it_appended(tmp_path):
    path = tmp_path / "journal.jsonl"
    program = (
        "import os, signal, sys\n"
        "from rose.core.facts import StepFeatures\n"
        "from rose.observe.journal import Journal\n"
        "journal = Journal(sys.argv[1])\n"
        "for number in range(50): journal.append(float(number), StepFeatures(new_tokens=number))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert numbers(path) == list(range(50))


def decide_by_size(fact, now_s):
    return [Grant(fact.new_tokens, 1, now_s + 1.0)] if fact.new_tokens else []


def first_difference(path, decide):
    """Return the first entry at which `decide` differs from the journal, and its decisions; None if none does."""
    vocabulary = core_vocabulary()
    for entry in read(path, vocabulary):
        decided = tuple(decide(entry.fact, entry.t_s))
        # As text: what was recorded has been through it, and NaN is not equal to itself.
        if line_of(vocabulary, 0.0, entry.fact, decided) != line_of(vocabulary, 0.0, entry.fact, entry.decisions):
            return entry, decided
    return None


def test_a_replay_that_decides_the_same_finds_no_difference(tmp_path):
    with Journal(tmp_path / "journal.jsonl") as journal:
        for number in range(5):
            fact = StepFeatures(new_tokens=number)
            journal.append(number, fact, decide_by_size(fact, number))
    assert first_difference(journal.path, decide_by_size) is None
    assert len(list(read(journal.path))) == 5


def test_a_replay_names_the_first_decision_that_differs(tmp_path):
    with Journal(tmp_path / "journal.jsonl") as journal:
        for number in range(5):
            fact = StepFeatures(new_tokens=number)
            journal.append(float(number), fact, [GRANT] if number == 3 else decide_by_size(fact, float(number)))
    entry, decided = first_difference(journal.path, decide_by_size)
    assert entry.line == 4
    assert entry.decisions == (GRANT,) and decided == (Grant(3, 1, 4.0),)


def test_a_vocabulary_knows_its_records_only():
    @dataclass(frozen=True)
    class Stranger:
        pass

    vocabulary = core_vocabulary()
    assert vocabulary.from_tree(vocabulary.to_tree(GRANT)) == GRANT
    with pytest.raises(AssertionError, match="Stranger"):
        vocabulary.to_tree(Stranger())
    with pytest.raises(UnknownRecord, match="Stranger"):
        vocabulary.from_tree({"kind": "Stranger"})


def test_a_vocabulary_refuses_what_it_could_not_tell_apart():
    @dataclass(frozen=True)
    class Grant:
        pass

    @dataclass(frozen=True)
    class Kinded:
        kind: str

    with pytest.raises(AssertionError, match="two records"):
        RecordTypes([Grant, type(GRANT)])
    with pytest.raises(AssertionError, match="field `kind`"):
        RecordTypes([Kinded])
    with pytest.raises(AssertionError, match="not a dataclass"):
        RecordTypes([int])


@pytest.mark.parametrize(
    "damage, why",
    [
        (
            b'{"t": 1.0, "fact": {"kind": "RunResumed", "step": %d, "next_group": 0}, "decisions": []}' % (2**70),
            "64 bits",
        ),
        (b"[" * 100_000, "cannot be read"),
    ],
)
def test_a_line_that_could_not_be_written_again_is_corrupt(tmp_path, damage, why):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(damage + b"\n")
    with pytest.raises(JournalCorrupt, match=why):
        list(read(path))
