"""`rose journal replay FILE`: reads a journal aloud, checks every line of it, and says what it found."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

SUMMARY = "read a journal of facts and decisions"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    replay = actions.add_parser("replay", help="print facts and decisions in order, and check the journal")
    replay.add_argument("file", help="a journal, *.jsonl; its rotated files are read too")
    replay.add_argument("--kind", help="print only entries with a fact or decision of this kind")
    replay.add_argument("--quiet", action="store_true", help="check only; print the summary")


def run(arguments: argparse.Namespace) -> int:
    from rose.observe.journal import Notes, read

    notes, decisions = Notes(), 0
    for entry in read(arguments.file, notes=notes):
        decisions += len(entry.decisions)
        kinds = {type(record).__name__ for record in (entry.fact, *entry.decisions)}
        if not arguments.quiet and (arguments.kind is None or arguments.kind in kinds):
            print(f"{entry.t_s:14.6f} s  {_shown(entry.fact)}")
            for decision in entry.decisions:
                print(f"{'':>16}  -> {_shown(decision)}")
    print(f"{notes.entries} facts and {decisions} decisions in {notes.files} file(s); every whole line reads back.")
    if notes.torn_bytes:
        print(f"The last line is torn ({notes.torn_bytes} bytes): its writer was stopped in the middle of it.")
    if not notes.is_whole:
        print("The oldest files were already dropped: the story begins in the middle.")
    return 0


def _shown(record: Any) -> str:
    """`Grant  tokens=512 sequences=4` and, if it has one, its reason as words."""
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    reason = values.pop("reason", "")
    facts = " ".join(f"{name}={value}" for name, value in values.items())
    return f"{type(record).__name__}  {facts}" + (f"  because {reason}" if reason else "")
