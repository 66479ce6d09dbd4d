"""`rose journal show FILE`: print the facts and decisions of a journal, and check every line of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rose.observe.journal import JournalEntry

SUMMARY = "print and check a journal of facts and decisions"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    # `replay` is the action's former name, an alias for one release.
    show = actions.add_parser("show", aliases=["replay"], help="print facts and decisions in order, and check the file")
    show.add_argument("file", metavar="FILE", help="a journal, *.jsonl; its rotated files are read too")
    show.add_argument("--kind", metavar="NAME", help="only entries with a fact or decision of this kind")
    show.add_argument("--quiet", action="store_true", help="check only; print the summary")
    show.add_argument("--json", action="store_true", help="print an entry per line as JSON, then the summary")


def run(arguments: argparse.Namespace) -> int:
    from rose.observe.journal import Notes, read

    notes, decisions = Notes(), 0
    for entry in read(arguments.file, notes=notes):
        decisions += len(entry.decisions)
        kinds = {type(record).__name__ for record in (entry.fact, *entry.decisions)}
        if not arguments.quiet and (arguments.kind is None or arguments.kind in kinds):
            if arguments.json:
                print(json.dumps(_as_json(entry), default=str))
                continue
            print(f"{entry.utc:27} {entry.t_s:14.6f} s  {_text(entry.fact)}")
            for decision in entry.decisions:
                print(f"{'':>44}  -> {_text(decision)}")
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(notes), "decisions": decisions}))
        return 0
    print(f"{notes.entries} facts and {decisions} decisions in {notes.files} file(s); every whole line reads back.")
    if notes.torn_bytes:
        print(f"The last line is torn ({notes.torn_bytes} bytes): its writer was stopped in the middle of it.")
    if not notes.is_whole:
        print("The oldest files were already dropped: the journal begins in the middle.")
    return 0


def _as_json(entry: JournalEntry) -> dict[str, Any]:
    decisions = [_record(decision) for decision in entry.decisions]
    return {"t_s": entry.t_s, "utc": entry.utc, "fact": _record(entry.fact), "decisions": decisions}


def _record(record: Any) -> dict[str, Any]:
    return {"kind": type(record).__name__, **dataclasses.asdict(record)}


def _text(record: Any) -> str:
    """Return a record as text, such as `Grant  tokens=512 sequences=4  because REASON`."""
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    reason = values.pop("reason", "")
    facts = " ".join(f"{name}={value}" for name, value in values.items())
    return f"{type(record).__name__}  {facts}" + (f"  because {reason}" if reason else "")
