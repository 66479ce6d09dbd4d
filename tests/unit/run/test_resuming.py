"""Going on with a run: from which checkpoint, under which settings, and never beside another that still runs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rose.cli.main import main
from rose.core.facts import RunResumed
from rose.errors import ConfigError, ModelError
from rose.observe.journal import read
from rose.run.resuming import ResumePoint, is_finished, read_start, settings_to_resume, start_of
from rose.run.run_folder import RunFolder
from rose.run.run_records import EvaluationRecord, FinishedRecord, ResumeRecord
from rose.run.run_settings import ClusterSettings, RunSettings, load_run_settings
from rose.run.trajectory_ledger import Balance
from rose.train.checkpoint_state import write_state


@pytest.fixture
def settings(tmp_path: Path) -> RunSettings:
    return replace(load_run_settings(), runs=str(tmp_path), name="it")


@pytest.fixture
def folder(settings: RunSettings) -> Iterator[RunFolder]:
    made = RunFolder(settings)
    yield made
    made.close()


def write_checkpoint(folder: RunFolder, step: int, **more: Any) -> Path:
    """As a trainer writes one, but for the tensors."""
    path = folder.checkpoints / f"step-{step:06d}"
    (path / "trainer").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights %d" % step)
    (path / "trainer" / "state.safetensors").write_bytes(b"moments %d" % step)
    counts = asdict(Balance(begun=8 * step, returned=8 * step))
    extra = {"run_step": step, "version": step, "epoch": 17, "next_group": 2 * step, "balance": counts}
    write_state(path, {"step": step, "extra": extra | more})
    return path


def spoil(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


# Which checkpoint


def test_the_newest_checkpoint_is_taken(folder):
    for step in (2, 9, 10):
        write_checkpoint(folder, step)
    start, words = start_of(folder)
    assert (start.step, start.version, start.epoch, start.next_group) == (10, 10, 17, 20)
    assert start.balance == Balance(begun=80, returned=80)
    assert start.outstanding == (), "as in a checkpoint that says nothing of them"
    assert words == [f"going on after step 10, from {folder.checkpoints / 'step-000010'}"]


def test_groups_that_no_step_has_learnt_from_are_known(folder):
    assert read_start(write_checkpoint(folder, 4, outstanding=[5, 7])).outstanding == (5, 7)


@pytest.mark.parametrize("outstanding", [[8], [-1], [True], ["5"], 5, {"5": 1}])
def test_groups_that_were_never_drawn_cannot_be_drawn_again(folder, outstanding):
    with pytest.raises(ModelError, match="outstanding must be a list of groups before 8"):
        read_start(write_checkpoint(folder, 4, outstanding=outstanding))


def test_steps_beyond_six_digits_are_newer(folder):
    for step in (999_999, 1_000_000):
        write_checkpoint(folder, step)
    assert start_of(folder)[0].step == 1_000_000
    folder.prune(folder.checkpoints, 1)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-1000000"]


@pytest.mark.parametrize("part", ["model.safetensors", "trainer/state.safetensors", "trainer/state.json"])
def test_a_corrupted_one_is_left_out_with_a_word_and_its_name_is_free_again(folder, part):
    write_checkpoint(folder, 3)
    spoil(write_checkpoint(folder, 4) / part)
    start, words = start_of(folder)
    assert start.step == 3 and start.checkpoint == folder.checkpoints / "step-000003"
    assert words[0].startswith("step-000004 is left out: ") and len(words) == 2
    assert read_start(write_checkpoint(folder, 4)).step == 4


@pytest.mark.parametrize("part", ["model.safetensors", "trainer/state.safetensors", "trainer/state.json"])
def test_a_half_deleted_one_is_left_out(folder, part):
    (write_checkpoint(folder, 4) / part).unlink()
    start, words = start_of(folder)
    assert start == ResumePoint() and "step-000004 is left out" in words[0]
    assert "the run begins again, with the same settings" in words[1]


def test_a_changed_number_in_the_state_is_found(folder):
    path = write_checkpoint(folder, 4) / "trainer" / "state.json"
    path.write_text(path.read_text().replace('"next_group": 8', '"next_group": 9'))
    with pytest.raises(ModelError, match="not as it was written"):
        read_start(folder.checkpoints / "step-000004")


def test_without_any_the_run_begins_again(folder):
    start, words = start_of(folder)
    assert start == ResumePoint() and words == [
        "there is no checkpoint to go on from: the run begins again, with the same settings"
    ]


def test_what_the_attempt_before_left_behind_is_taken_away(folder):
    write_checkpoint(folder, 1)
    (folder.checkpoints / ".step-000002.ab12cd34").mkdir()
    left = [folder.path / name for name in ("ledger.sqlite", "ledger.sqlite-wal", "summary.json", "report.html")]
    for path in left:
        path.write_text("x")
    start_of(folder)
    assert not any(path.exists() for path in left)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-000001"]
    assert (folder.path / "settings.yaml").exists()


@pytest.mark.parametrize("told, is_evaluated", [([0], False), ([0, 5], True), ([0, 5, 10], True)])
def test_an_evaluation_behind_the_checkpoint_is_made_if_it_was_not(folder, told, is_evaluated):
    write_checkpoint(folder, 5)
    for step in told:
        folder.record(EvaluationRecord(step=step, success_rate=0.5))
    assert start_of(folder)[0].is_evaluated is is_evaluated


# Which settings


def test_the_settings_are_those_of_the_run(folder, settings):
    assert settings_to_resume(folder.path) == settings
    assert settings_to_resume(folder.path, None, ["groups.size=8"]) == settings


def test_others_are_refused_by_their_keys(folder, tmp_path):
    with pytest.raises(ConfigError) as caught:
        settings_to_resume(folder.path, None, ["groups.size=4", "train.learning_rate=0.5", "steps=30"])
    assert "groups.size is 8, not 4" in caught.value.what and "train.learning_rate" in caught.value.what
    assert "steps" not in caught.value.what
    given = tmp_path / "job.yaml"
    given.write_text("groups: {groups: 3}\nseed: 0\n")
    with pytest.raises(ConfigError, match=r"groups.groups is 8, not 3"):
        settings_to_resume(folder.path, given)
    with pytest.raises(ConfigError, match="profile"):
        settings_to_resume(folder.path, None, ["profile=rollout-heavy"])


def test_a_run_goes_on_where_there_are_machines(folder, settings):
    moved = settings_to_resume(folder.path, None, ["cluster.kind=ray", "cluster.address=10.0.0.1:6379"])
    assert moved.cluster.address == "10.0.0.1:6379"
    assert replace(moved, cluster=settings.cluster) == settings


def test_options_of_the_environment_are_kept_and_no_others_taken(settings):
    made = RunFolder(replace(settings, environment_options={"turns_max": 12}))
    made.close()
    assert settings_to_resume(made.path).environment_options == {"turns_max": 12}
    settings_to_resume(made.path, None, ["environment_options.turns_max=12"])
    for option, words in (("size=8", "size is not set, not 8"), ("turns_max=9", "turns_max is 12, not 9")):
        with pytest.raises(ConfigError, match=f"environment_options.{words}"):
            settings_to_resume(made.path, None, [f"environment_options.{option}"])


EVIL = "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\ndef play(client, task): ...\n"


@pytest.fixture
def agents_folder(settings: RunSettings, tmp_path: Path) -> Iterator[RunFolder]:
    """A run whose settings name code, as somebody may send it."""
    (tmp_path / "agent.py").write_text(EVIL)
    made = RunFolder(replace(settings, agent=str(tmp_path / "agent.py:play")))
    yield made
    made.close()


@pytest.mark.parametrize("part", ["", "settings.yaml"])
@pytest.mark.parametrize("how", ["another user's", "writable by all"])
def test_code_that_another_user_may_have_named_is_not_imported(agents_folder, tmp_path, part, how, monkeypatch):
    path = agents_folder.path
    if how == "writable by all":
        (path / part).chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(path / part, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="name code to run") as refused:
        settings_to_resume(path)
    assert not (tmp_path / "agent.ran").exists()
    assert refused.value.hint is not None and "--set agent=" in refused.value.hint
    with pytest.raises(ConfigError, match="name code to run"):
        settings_to_resume(path, overrides=["agent=other.py:play"])
    agent = f"{tmp_path}/agent.py:play"
    assert settings_to_resume(path, overrides=[f"agent={agent}"]).agent == agent


def test_code_named_by_a_folder_of_this_user_is_imported(agents_folder, tmp_path):
    assert settings_to_resume(agents_folder.path).agent == f"{tmp_path}/agent.py:play"
    assert (tmp_path / "agent.ran").exists()


def test_an_interpreter_that_another_user_may_have_named_is_refused(settings):
    made = RunFolder(replace(settings, vllm_python="/tmp/python"))
    made.close()
    made.path.chmod(0o770)
    with pytest.raises(ConfigError, match="vllm_python is /tmp/python"):
        settings_to_resume(made.path)


def test_a_cluster_that_another_user_may_have_named_is_not_joined(settings):
    made = RunFolder(replace(settings, cluster=ClusterSettings("ray", "10.0.0.9:6379")))
    made.close()
    made.path.chmod(0o770)
    with pytest.raises(ConfigError, match=r"cluster\.address is 10\.0\.0\.9:6379"):
        settings_to_resume(made.path)
    for named in ("cluster.kind=local", "cluster.address=10.0.0.9:6379", "cluster.address=10.0.0.1:6379"):
        assert settings_to_resume(made.path, overrides=[named]).steps == settings.steps


def test_steps_may_grow_only(folder):
    assert settings_to_resume(folder.path, None, ["steps=30"]).steps == 30
    with pytest.raises(ConfigError, match="not only 5"):
        settings_to_resume(folder.path, None, ["steps=5"])


def test_a_run_may_go_on_on_another_number_of_ranks(folder):
    assert settings_to_resume(folder.path, None, ["train.ranks=4"]).train.ranks == 4


def test_a_folder_that_was_moved_is_found_where_it_is(folder, settings, tmp_path):
    folder.close()
    (tmp_path / "elsewhere").mkdir()
    moved = folder.path.rename(tmp_path / "elsewhere" / "other")
    assert settings_to_resume(moved) == replace(settings, runs=str(moved.parent), name="other")


def test_a_model_is_found_from_wherever_the_run_is_resumed(settings, tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    RunFolder(replace(settings, rollout_model="models")).close()
    monkeypatch.chdir("/")
    assert settings_to_resume(tmp_path / "it").rollout_model == str(tmp_path / "models")


def test_a_folder_without_a_run_is_told(tmp_path, capsys):
    assert main(["run", "--resume", str(tmp_path / "nowhere")]) == 2
    told = capsys.readouterr().err
    assert "nowhere" in told and "rose runs ls" in told and "Traceback" not in told


# Alone in the folder


def test_a_run_that_goes_on_is_not_resumed(folder, settings):
    with pytest.raises(ConfigError, match="still going on, in process"):
        RunFolder(settings, is_resumed=True)
    folder.close()
    again = RunFolder(settings, is_resumed=True)
    again.close()
    assert again.path == folder.path


# What is written


def end(folder: RunFolder, step: int) -> None:
    folder.record(FinishedRecord(step=step))
    folder.write("report.html", "x")


def test_a_finished_run_says_so(folder, capsys):
    end(folder, 20)
    assert is_finished(folder.path, 20) and not is_finished(folder.path, 30)
    assert main(["run", "--resume", str(folder.path)]) == 0
    assert "is finished: all of its 20 steps are done" in capsys.readouterr().out


def test_a_run_is_not_finished_while_it_has_more_to_do_or_no_report(folder):
    assert not is_finished(folder.path, 20)
    end(folder, 20)
    folder.record(ResumeRecord(step=20))
    assert not is_finished(folder.path, 20)
    folder.record(FinishedRecord(step=30))
    assert is_finished(folder.path, 30)
    (folder.path / "report.html").unlink()
    assert not is_finished(folder.path, 30)


@pytest.mark.parametrize("line", [b"[1]", b'{"no": "kind"}', b'{"kind": "step"}', b"half"])
def test_a_line_of_something_else_stops_no_resuming(folder, line):
    end(folder, 20)
    with (folder.path / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")
    assert is_finished(folder.path, 20) and not is_finished(folder.path, 30)


def test_the_journal_says_from_where_a_run_went_on(folder):
    folder.decided(RunResumed(3, 12, (10, 11)), [])
    folder.close()
    [entry] = read(folder.path / "journal.jsonl")
    assert entry.fact == RunResumed(3, 12, (10, 11))


def test_a_resume_line_names_the_checkpoint(folder):
    path = write_checkpoint(folder, 3)
    line: dict[str, Any] = json.loads(msgspec.json.encode(read_start(path).record()))
    assert 0 < line.pop("at_s") <= time.monotonic()
    assert line == {"kind": "resume", "step": 3, "version": 3, "next_group": 6, "checkpoint": "step-000003"}
    assert ResumePoint().record().checkpoint is None
