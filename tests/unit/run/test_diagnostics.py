"""Notes on a run that no figure shows."""

from __future__ import annotations

import pytest
from tests.unit.launch_lines import notes_of, run_lines, step

UNMET = {"kind": "unmet", "groups": 3, "versions": 5, "max_staleness": 1, "speed_needed": 3.0}


@pytest.mark.parametrize(
    "story, lines, expected",
    [
        ("all was well", [step(1, 0.0)], []),
        ("late", [{"kind": "lending", "breaches": {"ttft": 1, "tpot": 1, "ambiguous": 1, "step": 9}}],
         ["3 requests of users came late, or may have, because the device was lent"]),
        ("late steps alone", [{"kind": "lending", "breaches": {"step": 9}}], []),
        ("starved", [step(1, 0.0, verdict="starved"), step(2, 9.0)], ["1 of 2 steps had no group to learn from"]),
        ("a verdict of another version", [step(1, 0.0, verdict="bored")], ["1 of 1 step ended as bored"]),
        ("environments", [step(1, 0.0, episodes_failed=5, failures={"ice": 4, "wind": 1}), step(2, 9.0, failures={})],
         ["5 episodes given up because their environment or agent failed; most often: ice"]),
        ("by the seed", [step(n, 0.0, episodes_failed=1, failures={f"reset({n}): ice": 1}) for n in (4, 5)],
         ["2 episodes given up because their environment or agent failed; most often: reset(4): ice"]),
        ("an older run", [step(1, 0.0, episodes_failed=1)],
         ["1 episode given up because their environment or agent failed"]),
        ("held-out games", [{"kind": "evaluation", "episodes_failed": 2, "failures": {"fog": 2}}],
         ["2 held-out games not played, and counted as not won; most often: fog"]),
        ("killed", [{"kind": "death", "role": "gateway", "is_restarted": True}] * 2,
         ["gateway died and was started again, 2 times"]),
        ("the end", [{"kind": "death", "role": "traffic", "is_restarted": False}], []),
        ("shut", [{"kind": "closed", "worker": "borrowed", "why": "late"}, {"kind": "rest", "why": "late"}],
         ["worker borrowed took no turns for a while: late (2 times)"]),
        ("shut again and again", [*({"kind": "rest", "why": f"{late} of 99 lent steps were late"} for late in (11, 12)),
                                  {"kind": "closed", "worker": "b2", "why": "9 of 99 lent steps were late"}],
         ["worker b2 took no turns for a while: 9 of 99 lent steps were late",
          "worker borrowed took no turns for a while: 11 of 99 lent steps were late (2 times)"]),
        ("behind", [{"kind": "behind", "worker": "a", "why": why} for why in ("slow", "gone")],
         ["worker a was late with 2 versions of the weights; the last time: gone"]),
        ("most important first", [UNMET, {"kind": "lending", "breaches": {"ttft": 1}}],
         ["1 request of users came late, or may have, because the device was lent",
          "the last 3 groups were too old to learn from: 5 versions, where asynchrony.max_staleness is 1; rollouts "
          "would have to be 3.0 times as quick; or set asynchrony.max_staleness=5, or train on more groups a step"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_notes(story, lines, expected):
    assert notes_of(lines) == expected, story


def test_a_death_is_one_note():
    assert notes_of(run_lines()) == ["dedicated died and was started again"]
