"""The picture of a device in README, drawn from a journal."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from docs import make_picture

from rose.core.facts import Grant, LendingAsked, RolloutView, RunningRequest, ServingView, StepFeatures, WaitingRequest
from rose.observe.journal import Journal

OPEN, BLOCKED = Grant(64, 8, 100.0, "serving has no work"), Grant(0, 0, 0.0, "a prompt waits")
NO_STEP, PREFILL = StepFeatures(), StepFeatures(new_tokens=32, sequences=1)


def view(waiting=0, running=0, last_step=NO_STEP, last_step_s=0.0):
    requests = tuple(WaitingRequest(1.0, 8) for _ in range(waiting))
    decoding = tuple(RunningRequest(1.0, 16) for _ in range(running))
    serving = ServingView(1, requests, decoding, last_step=last_step, last_step_s=last_step_s)
    return LendingAsked(serving, RolloutView(decoding=1))


@pytest.fixture
def journal(tmp_path):
    """A rollout step, a user's prompt, its decode step, and a rollout step again."""
    path = tmp_path / "journal.jsonl"
    written = Journal(path)
    written.append(1.0, view(), [OPEN])
    written.append(1.1, view(waiting=1), [BLOCKED])
    written.append(1.3, view(running=1, last_step=PREFILL, last_step_s=0.2), [BLOCKED])
    written.append(1.4, view(last_step=StepFeatures(1, 32, 32, 1), last_step_s=0.1), [OPEN])
    written.append(1.6, view(last_step=StepFeatures(1, 32, 32, 1), last_step_s=0.1), [OPEN])
    written.close()
    return path


def test_steps_of_both_sides_are_read_from_the_decisions(journal):
    found = make_picture.intervals(journal)
    assert [one.kind for one in found] == ["rollout", "serving", "serving", "rollout"]
    assert [(one.requests, one.waiting) for one in found] == [(0, 0), (1, 1), (1, 0), (0, 0)]


def test_the_picture_shows_each_step_and_each_arrival(journal):
    root = ElementTree.fromstring(make_picture.picture(make_picture.intervals(journal)))
    kinds = [part.get("class") for part in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert kinds.count("area rollout") == 2
    assert kinds.count("area serving") == 3 and kinds.count("area waiting") == 1  # two steps and one request
    assert sum(part.get("class") == "budget" for part in root.iter("{http://www.w3.org/2000/svg}line")) == 1
    texts = " ".join(part.text or "" for part in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "serving 50% of the time, rollouts 50%" in texts


def test_a_journal_without_decisions_ends_with_what_to_do(tmp_path, monkeypatch):
    Journal(tmp_path / "empty.jsonl").close()
    monkeypatch.setattr("sys.argv", ["make_picture.py", str(tmp_path / "empty.jsonl"), str(tmp_path / "picture.svg")])
    with pytest.raises(SystemExit, match="rose serve --lend"):
        make_picture.main()
