"""What a reader of a run must know and no figure says: who died, what stood still, which steps taught nothing.

Pure: lines of a run in, sentences out, none for a run in which all was well. What happened several times is one
sentence with a number. The same sentences are in the summary, on the report's page and in `rose runs show`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

Line = dict[str, Any]
NUMBERS = re.compile(r"\d+")
FAILURES_TOLD = 3
VERDICTS = {
    "spike": "had a gradient far beyond the usual and changed nothing",
    "not_finite": "would have made weights that are no numbers and changed nothing",
    "starved": "had no group to learn from",
    "rolled_back": "had no group to learn from and took the weights back to the last that had",
}


def notes_of(lines: Sequence[Line]) -> list[str]:
    """In the order of what matters most."""
    of = {kind: [line for line in lines if line["kind"] == kind] for kind in {line["kind"] for line in lines}}
    return [
        *_late(of.get("lending", [])),
        *_unmet(of.get("unmet", [])),
        *_verdicts(of.get("step", [])),
        *_given_up(of.get("step", []), "episode", "given up because their environment or agent failed"),
        *_given_up(of.get("evaluation", []), "held-out game", "not played, and counted as not won"),
        *_deaths(of.get("death", [])),
        *_standstills([*of.get("closed", []), *of.get("rest", [])]),
        *_behind(of.get("behind", [])),
    ]


def unmet_words(unmet: Line) -> str:
    """What is wrong with the bound of staleness, and what would have to be otherwise."""
    have, times = unmet.get("tokens_per_s") or 0.0, unmet["speed_needed"]
    rate = f" ({have * times:.0f} tokens/s instead of {have:.0f})" if have else ""
    return (
        f"the last {unmet['groups']} groups were too old to learn from: {unmet['versions']} versions, where "
        f"asynchrony.max_staleness is {unmet['max_staleness']}; rollouts would have to be {times:.1f} times as "
        f"quick{rate}; or set asynchrony.max_staleness={unmet['versions']}, or train on more groups a step"
    )


def commonest(failures: Sequence[str]) -> dict[str, int]:
    """Why episodes failed and how many did, the commonest reasons only."""
    return dict(_counted(failures).most_common(FAILURES_TOLD))


def _counted(reasons: Sequence[str]) -> Counter[str]:
    """Those that differ in numbers only, a seed or a time, are one; it is told as it came first."""
    kinds = [NUMBERS.sub("0", reason) for reason in reasons]
    first = dict(zip(reversed(kinds), reversed(reasons)))
    return Counter({first[kind]: count for kind, count in Counter(kinds).items()})


def _late(lendings: Sequence[Line]) -> Iterator[str]:
    told = lendings[-1]["breaches"] if lendings else {}
    late = sum(told.get(kind, 0) for kind in ("ttft", "tpot"))
    if late:
        yield f"{_count(late, 'request')} of users came late because the device was lent"


def _unmet(lines: Sequence[Line]) -> Iterator[str]:
    if lines:
        times = f"{len(lines)} times: " if len(lines) > 1 else ""
        yield times + unmet_words(lines[-1])


def _verdicts(steps: Sequence[Line]) -> Iterator[str]:
    counts = Counter(step["verdict"] for step in steps if step["verdict"] != "updated")
    for verdict, count in counts.items():
        yield f"{count} of {_count(len(steps), 'step')} {VERDICTS.get(verdict, f'ended as {verdict}')}"


def _given_up(lines: Sequence[Line], noun: str, words: str) -> Iterator[str]:
    count = sum(line.get("episodes_failed") or 0 for line in lines)
    told = [reason for line in lines for reason, times in (line.get("failures") or {}).items() for _ in range(times)]
    if count:
        most = "".join(f"; most often: {reason}" for reason in list(commonest(told))[:1])
        yield f"{_count(count, noun)} {words}{most}"


def _deaths(lines: Sequence[Line]) -> Iterator[str]:
    for role, count in Counter(line["role"] for line in lines if line["is_restarted"]).items():
        yield f"{role} died and was started again" + (f", {count} times" if count > 1 else "")


def _standstills(lines: Sequence[Line]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for line in lines:
        reasons.setdefault(line.get("worker", "borrowed"), []).append(line["why"])
    for worker, told in reasons.items():
        for why, count in _counted(told).items():
            yield f"worker {worker} took no turns for a while: {why}" + (f" ({count} times)" if count > 1 else "")


def _behind(lines: Sequence[Line]) -> Iterator[str]:
    for worker, count in Counter(line["worker"] for line in lines).items():
        last = [line for line in lines if line["worker"] == worker][-1]
        yield f"worker {worker} was late with {_count(count, 'version')} of the weights; the last time: {last['why']}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
