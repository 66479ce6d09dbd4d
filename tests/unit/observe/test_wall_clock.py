"""UTC beside the monotonic clock: in lines of JSON, in journals, and in logs."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime

from rose.core.facts import StepFeatures
from rose.observe.journal import Journal, read
from rose.observe.wall_clock import stamped, utc_text


def test_a_moment_is_written_as_iso_8601_in_utc():
    assert utc_text(0.0) == "1970-01-01T00:00:00.000000Z"
    assert utc_text(1_795_131_118.25) == "2026-11-19T23:31:58.250000Z"
    now = datetime.fromisoformat(utc_text())
    assert now.tzinfo == UTC and abs(now.timestamp() - time.time()) < 60


def test_a_line_of_json_gets_the_moment_first():
    assert json.loads(stamped(b'{"kind":"step","at_s":1.5}', 0.0)) == {
        "utc": "1970-01-01T00:00:00.000000Z",
        "kind": "step",
        "at_s": 1.5,
    }


def test_a_journal_has_both_clocks_and_journals_without_utc_are_read(tmp_path):
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append(12.5, StepFeatures(new_tokens=3))
    [entry] = read(tmp_path / "journal.jsonl")
    assert entry.t_s == 12.5 and datetime.fromisoformat(entry.utc).tzinfo == UTC
    line = json.loads((tmp_path / "journal.jsonl").read_text())
    del line["utc"]
    (tmp_path / "old.jsonl").write_text(json.dumps(line) + "\n")
    assert [(entry.t_s, entry.utc) for entry in read(tmp_path / "old.jsonl")] == [(12.5, "")]
