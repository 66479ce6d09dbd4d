"""Notes on a run that no figure shows: which processes died, what stalled, which steps taught nothing.

Pure: records of a run in, sentences out, none for a run without problems. What happened several times is one
sentence with a number. The same sentences are in the summary, on the report's page and in `rose runs show`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from rose.run.run_records import (
    BehindRecord,
    ClosedRecord,
    DeathRecord,
    EvaluationRecord,
    LendingRecord,
    RestRecord,
    RunRecord,
    StepRecord,
    UnmetRecord,
    of_kind,
)

NUMBERS = re.compile(r"\d+")
FAILURES_SHOWN = 3
VERDICTS = {
    "spike": "had a gradient far beyond the usual and changed nothing",
    "not_finite": "would have made weights that are no numbers and changed nothing",
    "starved": "had no group to learn from",
    "rolled_back": "had no group to learn from and took the weights back to the last that had",
}


def notes_of(lines: Sequence[RunRecord]) -> list[str]:
    """Return the notes, the most important first."""
    steps, evaluations = of_kind(lines, StepRecord), of_kind(lines, EvaluationRecord)
    return [
        *_late(of_kind(lines, LendingRecord)),
        *_unmet(of_kind(lines, UnmetRecord)),
        *_verdicts(steps),
        *_given_up(steps, "episode", "given up because their environment or agent failed"),
        *_given_up(evaluations, "held-out game", "not played, and counted as not won"),
        *_deaths(of_kind(lines, DeathRecord)),
        *_standstills([*of_kind(lines, ClosedRecord), *of_kind(lines, RestRecord)]),
        *_behind(of_kind(lines, BehindRecord)),
    ]


def unmet_note(unmet: UnmetRecord) -> str:
    """Return how the staleness bound is missed, and what would meet it."""
    have, times = unmet.tokens_per_s or 0.0, unmet.speed_needed
    rate = f" ({have * times:.0f} tokens/s instead of {have:.0f})" if have else ""
    return (
        f"the last {unmet.groups} groups were too old to learn from: {unmet.versions} versions, where "
        f"asynchrony.max_staleness is {unmet.max_staleness}; rollouts would have to be {times:.1f} times as "
        f"quick{rate}; or set asynchrony.max_staleness={unmet.versions}, or train on more groups a step"
    )


def commonest(failures: Sequence[str]) -> dict[str, int]:
    """Return the commonest reasons why episodes failed, with their counts."""
    return dict(_counted(failures).most_common(FAILURES_SHOWN))


def _counted(reasons: Sequence[str]) -> Counter[str]:
    """Count reasons; those that differ in numbers only, a seed or a time, are one, shown as it came first."""
    kinds = [NUMBERS.sub("0", reason) for reason in reasons]
    first = dict(zip(reversed(kinds), reversed(reasons)))
    return Counter({first[kind]: count for kind, count in Counter(kinds).items()})


def _late(lendings: Sequence[LendingRecord]) -> Iterator[str]:
    late = lendings[-1].late_requests if lendings else 0
    if late:
        yield f"{_count(late, 'request')} of users came late, or may have, because the device was lent"


def _unmet(lines: Sequence[UnmetRecord]) -> Iterator[str]:
    if lines:
        times = f"{len(lines)} times: " if len(lines) > 1 else ""
        yield times + unmet_note(lines[-1])


def _verdicts(steps: Sequence[StepRecord]) -> Iterator[str]:
    counts = Counter(step.verdict for step in steps if step.verdict != "updated")
    for verdict, count in counts.items():
        yield f"{count} of {_count(len(steps), 'step')} {VERDICTS.get(verdict, f'ended as {verdict}')}"


def _given_up(lines: Sequence[StepRecord | EvaluationRecord], noun: str, outcome: str) -> Iterator[str]:
    count = sum(line.episodes_failed or 0 for line in lines)
    reasons = [reason for line in lines for reason, times in (line.failures or {}).items() for _ in range(times)]
    if count:
        most = "".join(f"; most often: {reason}" for reason in list(commonest(reasons))[:1])
        yield f"{_count(count, noun)} {outcome}{most}"


def _deaths(lines: Sequence[DeathRecord]) -> Iterator[str]:
    for role, count in Counter(line.role for line in lines if line.is_restarted).items():
        yield f"{role} died and was started again" + (f", {count} times" if count > 1 else "")


def _standstills(lines: Sequence[ClosedRecord | RestRecord]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for line in lines:
        reasons.setdefault(line.worker if isinstance(line, ClosedRecord) else "borrowed", []).append(line.why)
    for worker, ones in reasons.items():
        for why, count in _counted(ones).items():
            yield f"worker {worker} took no turns for a while: {why}" + (f" ({count} times)" if count > 1 else "")


def _behind(lines: Sequence[BehindRecord]) -> Iterator[str]:
    for worker, count in Counter(line.worker for line in lines).items():
        last = [line for line in lines if line.worker == worker][-1]
        yield f"worker {worker} was late with {_count(count, 'version')} of the weights; the last time: {last.why}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
