"""The origin of a run: in its records without names of host and user, and at the top of its report."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime

import msgspec

from rose import __version__
from rose.run import origin, run_report
from rose.run.run_records import OriginRecord, records_in


def test_the_record_has_version_command_and_machine(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/rose", "run", "--name", "two words"])
    record = origin.origin_record()
    assert (record.version, record.command) == (__version__, "rose run --name 'two words'")
    assert f"{len(origin.USABLE)} core" in record.machine and "GiB" in record.machine
    assert datetime.fromisoformat(record.began_utc).tzinfo == UTC
    assert platform.node() not in record.machine and os.environ.get("USER", "root") not in record.machine
    assert list(records_in(msgspec.json.encode(record), is_lenient=False)) == [record]


def test_the_report_lists_the_first_start_and_each_resumption():
    first = OriginRecord(version="1.0", command="rose run", machine="a machine", began_utc="2026-11-19T00:00:00Z")
    again = OriginRecord(
        version="1.1", command="rose run --resume x", machine="another", began_utc="2026-11-20T00:00:00Z"
    )
    rows = run_report._origin_rows([first, again])
    assert rows == [
        ("command", "rose run"),
        ("resumed", "2026-11-20T00:00:00Z: rose run --resume x"),
        ("machine", "a machine"),
        ("began", "2026-11-19T00:00:00Z"),
        ("version", "ROSE 1.0"),
    ]
    assert run_report._origin_rows([]) == []  # runs of 0.1
