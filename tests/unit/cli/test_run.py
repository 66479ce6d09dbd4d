"""`rose run`: options become settings, a finished run says what to do, an interrupted one its exit code."""

from __future__ import annotations

import pytest

from rose.cli.main import EXIT_INTERRUPTED, main
from rose.run.past_runs import Stopped


@pytest.fixture
def received(monkeypatch):
    calls = []

    async def run_locally(settings, screen, *, is_resumed):
        calls.append((settings, is_resumed))
        if settings.seed == 99:
            raise Stopped

    monkeypatch.setattr("rose.run.local.run_locally", run_locally)
    return calls


def test_options_are_settings(received):
    words = ["--set", "steps=4", "--name", "it", "--compare", "--profile", "rollout-heavy"]
    assert main(["run", *words]) == 0
    [(settings, is_resumed)] = received
    assert (settings.steps, settings.name, settings.compare, settings.profile) == (4, "it", True, "rollout-heavy")
    assert not is_resumed


def test_a_run_is_on_this_machine_unless_a_cluster_is_named(received):
    assert [main(["run"]), main(["run", "--on", "ray"]), main(["run", "--on", "local"])] == [0, 0, 0]
    assert [settings.cluster.kind for settings, _ in received] == ["local", "ray", "local"]


def test_an_interrupted_run_has_the_exit_code_of_shells(received, capsys):
    assert main(["run", "--set", "seed=99", "--asynchronous"]) == EXIT_INTERRUPTED
    assert "every process of the run has ended" in capsys.readouterr().out
    assert received[0][0].asynchrony.is_used


@pytest.mark.parametrize(
    "words", [["--set", "stpes=3"], ["--profile", "nothing"], ["missing.yaml"], ["--resume", "missing"]]
)
def test_wrong_settings_are_refused_in_a_sentence(words, received, capsys):
    assert main(["run", *words]) == 2
    assert capsys.readouterr().err.startswith("rose: ") and not received
