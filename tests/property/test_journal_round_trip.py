"""Whatever is appended is read back equal, however the files are cut and however often the writer restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from rose.observe.journal import Journal, Notes, RecordTypes, read


@dataclass(frozen=True, slots=True)
class Leaf:
    name: str
    share: float
    on: bool | None = None


@dataclass(frozen=True, slots=True)
class Tree:
    size_bytes: int
    leaves: tuple[Leaf, ...] = ()
    by_name: dict[str, float] | None = None


VOCABULARY = RecordTypes([Leaf, Tree])
MOMENTS = st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.builds(Leaf, name=st.text(max_size=10), share=st.floats(allow_nan=False), on=st.none() | st.booleans())
TREES = st.builds(
    Tree,
    size_bytes=st.integers(-(2**63), 2**63 - 1),
    leaves=st.lists(LEAVES, max_size=3).map(tuple),
    by_name=st.none() | st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3),
)
ENTRIES = st.lists(st.tuples(MOMENTS, LEAVES | TREES, st.lists(LEAVES | TREES, max_size=2).map(tuple)), max_size=12)


@given(ENTRIES, st.integers(1, 2000), st.integers(1, 5))
def test_entries_come_back_equal(entries, file_bytes_max, per_writer):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        Journal(path, VOCABULARY).close()
        for start in range(0, len(entries), per_writer):
            with Journal(path, VOCABULARY, file_bytes_max=file_bytes_max, files_max=100) as journal:
                for moment_s, fact, decisions in entries[start : start + per_writer]:
                    journal.append(moment_s, fact, decisions)
        assert [(entry.t_s, entry.fact, entry.decisions) for entry in read(path, VOCABULARY)] == entries


@given(ENTRIES.filter(len), st.data())
def test_a_journal_cut_anywhere_still_tells_its_beginning(entries, data):
    with TemporaryDirectory() as folder:
        with Journal(Path(folder) / "journal.jsonl", VOCABULARY) as journal:
            for moment_s, fact, decisions in entries:
                journal.append(moment_s, fact, decisions)
        whole = journal.path.read_bytes()
        kept = data.draw(st.integers(0, len(whole)))
        journal.path.write_bytes(whole[:kept])
        notes = Notes()
        found = [(entry.t_s, entry.fact, entry.decisions) for entry in read(journal.path, VOCABULARY, notes)]
    assert found == entries[: len(found)]
    assert len(found) == whole[:kept].count(b"\n")
    assert notes.torn_bytes == kept - (whole[:kept].rfind(b"\n") + 1)


def test_not_a_number_comes_back_as_it_was(tmp_path):
    with Journal(tmp_path / "journal.jsonl", VOCABULARY) as journal:
        journal.append(0.0, Leaf("x", math.nan))
    assert math.isnan(next(read(journal.path, VOCABULARY)).fact.share)
