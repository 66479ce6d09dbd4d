"""`rose runs`: past runs as tables, and folders in which problems:."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
from tests.unit.launch_lines import run_lines, served, summary_of

from rose.cli import main as cli
from rose.config.loading import write_resolved
from rose.errors import Unavailable
from rose.run.past_runs import Stopped, exit_record, past_runs, read_run
from rose.run.run_folder import RunLock
from rose.run.run_settings import RunSettings
from rose.run.summary import priced_by


@pytest.fixture(autouse=True)
def command(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "runs", "past runs: list them, show one, compare several")


def written(runs: Path, name: str, *, is_summed_up: bool = True, at_s: float = 1.8e9, **settings: object) -> Path:
    """A run as `rose run` leaves it."""
    folder = runs / name
    write_resolved(RunSettings(name=name, **settings), folder)
    lines, rows = run_lines(), [served(100 + second / 2) for second in range(80)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "serving.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if is_summed_up:
        append(folder, {"kind": "finished", "step": 8})
        summary = summary_of(lines, rows, *priced_by(folder / "settings.yaml")) | {"name": name}
        (folder / "summary.json").write_text(json.dumps(summary))
    for file in folder.iterdir():
        os.utime(file, (at_s, at_s))
    return folder


def append(folder: Path, *lines: dict[str, object]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def said(capsys, *words: object) -> str:
    assert cli.main(["runs", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_list_from_the_oldest_to_the_newest(tmp_path, capsys):
    written(tmp_path, "second", at_s=1.8e9 + 60)
    written(tmp_path, "first", environment="frozenlake-plan")
    (tmp_path / "models").mkdir()
    head, *rows = [line.split() for line in said(capsys, "ls", "--runs", tmp_path).splitlines()[:3]]
    assert head[0] == "run" and [row[0] for row in rows] == ["first", "second"]
    assert "frozenlake-plan" in rows[0] and "60.0%" in rows[0] and rows[0][-1] == "finished"


def test_no_runs_yet(tmp_path, capsys):
    assert "rose run" in said(capsys, "ls", "--runs", tmp_path)
    assert json.loads(said(capsys, "ls", "--json", "--runs", tmp_path)) == []
    assert cli.main(["runs", "show", "--runs", str(tmp_path)]) == 2


def test_a_folder_that_is_not_there(tmp_path, capsys):
    assert cli.main(["runs", "ls", "--runs", str(tmp_path / "nowhere")]) == 2
    told = capsys.readouterr().err
    assert "nowhere" in told and "--runs FOLDER" in told


def test_one_run_at_length_by_name_by_path_or_the_newest(tmp_path, capsys):
    folder = written(tmp_path, "it")
    (folder / "report.html").write_text("x")
    shown = said(capsys, "show", "it", "--runs", tmp_path)
    assert "held-out success after" in shown and "60.0%" in shown and f"report: {folder / 'report.html'}" in shown
    assert said(capsys, "show", folder, "--runs", tmp_path) == said(capsys, "show", "--runs", tmp_path) == shown
    found = json.loads(said(capsys, "show", "it", "--json", "--runs", tmp_path))
    assert found["summary"]["cost_per_correct"] > 0 and found["settings"]["groups.size"] == 8


def test_what_no_figure_says_is_told_too(tmp_path, capsys):
    assert "notes:\n  dedicated died and was started again" in said(
        capsys, "show", written(tmp_path, "one"), "--runs", tmp_path
    )
    [shown] = [line for line in said(capsys, "show", "one", "--runs", tmp_path).splitlines() if "given back" in line]
    assert shown.split()[-1] == "0"


def test_an_unknown_run_names_the_nearest(tmp_path, capsys):
    written(tmp_path, "larger-groups")
    assert cli.main(["runs", "show", "large-groups", "--runs", str(tmp_path)]) == 2
    assert "did you mean larger-groups?" in capsys.readouterr().err


def test_two_runs_side_by_side_with_what_they_were_asked_differently(tmp_path, capsys):
    written(tmp_path, "one")
    written(tmp_path, "other", seed=7)
    shown = said(capsys, "compare", "one", "other", "--runs", tmp_path)
    assert "last / first" in shown and "x 1.00" in shown
    assert [line.split() for line in shown.splitlines() if "seed" in line] == [["seed", "0", "7"]]
    found = json.loads(said(capsys, "compare", "one", "other", "--json", "--runs", tmp_path))
    assert found["settings"] == {"seed": [0, 7]}, "their names are no difference"
    assert found["figures"]["lost"] == [0, 0] and [run["name"] for run in found["runs"]] == ["one", "other"]


def test_a_comparison_needs_two(tmp_path, capsys):
    written(tmp_path, "one")
    assert cli.main(["runs", "compare", "one", "--runs", str(tmp_path)]) == 2
    assert "rose runs compare ONE OTHER" in capsys.readouterr().err


def test_runs_with_the_same_settings(tmp_path, capsys):
    written(tmp_path, "one")
    written(tmp_path, "other")
    assert "Their settings are the same." in said(capsys, "compare", "one", "other", "one", "--runs", tmp_path)


# Not all is well


def test_a_run_that_was_killed_has_the_figures_of_what_it_wrote(tmp_path, capsys):
    folder = written(tmp_path, "killed", is_summed_up=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 9, "is_bor')
    found = read_run(folder)
    assert found.state == "broken off" and found.summary["steps"] == 8
    listed = said(capsys, "ls", "--runs", tmp_path)
    assert "broken off" in listed and f"rose run --resume {folder}" in listed


SAMPLE = {"kind": "sample", "at_s": 1.0, "turns": {}, "running": {}, "version": "1"}
FINISHED = {"kind": "finished", "step": 8}
STOPPED = msgspec.to_builtins(exit_record(Stopped()))
FAILED = msgspec.to_builtins(exit_record(Unavailable("the disk is full", hint="free some")))
RESUMED = {"kind": "resume", "step": 8}


@pytest.mark.parametrize(
    "lines, state, word",
    [
        pytest.param([FINISHED, SAMPLE], "finished", "", id="to its end"),
        pytest.param([STOPPED, SAMPLE, SAMPLE], "interrupted", "stopped before its last step", id="Ctrl-C"),
        pytest.param([FAILED], "failed", "an error ended it: the disk is full", id="an error"),
        pytest.param([STOPPED, RESUMED], "broken off", "killed", id="resumed, then killed"),
        pytest.param([STOPPED, RESUMED, FINISHED], "finished", "", id="resumed, then to its end"),
        pytest.param([FINISHED, RESUMED, STOPPED], "interrupted", "stopped", id="more steps, then Ctrl-C"),
        pytest.param([SAMPLE], "broken off", "killed", id="no word"),
    ],
)
def test_how_a_run_ended(tmp_path, capsys, lines, state, word):
    folder = written(tmp_path, "it", is_summed_up=False)
    append(folder, *lines)
    found = read_run(folder)
    assert (found.state, found.summary["steps"]) == (state, 8)
    assert word in found.trouble and bool(word) == bool(found.trouble)
    assert state in said(capsys, "ls", "--runs", tmp_path) and state in said(capsys, "show", "--runs", tmp_path)


def test_a_run_that_still_goes_on(tmp_path, capsys):
    folder = written(tmp_path, "it", is_summed_up=False)
    lock = RunLock(folder)
    assert (read_run(folder).state, read_run(folder).trouble) == ("running", "")
    assert "running" in said(capsys, "ls", "--runs", tmp_path)
    lock.close()
    assert read_run(folder).state == "broken off"


@pytest.mark.parametrize("steps, state", [(8, "finished"), (20, "interrupted")])
def test_runs_of_earlier_versions_said_nothing_of_their_end(tmp_path, steps, state):
    folder = written(tmp_path, "old", steps=steps)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(line for line in lines if "finished" not in line))
    assert read_run(folder).state == state


def test_a_summary_of_an_earlier_version_is_made_again(tmp_path):
    folder = written(tmp_path, "old")
    (folder / "summary.json").write_text('{"steps": 8}')
    found = read_run(folder)
    assert found.state == "finished" and found.summary["cost_per_correct"] > 0 and found.trouble == ""


@pytest.mark.parametrize(
    "file, content, state, word",
    [
        ("summary.json", b'{"steps": 2', "finished", "summary.json cannot be read"),
        ("summary.json", b"[1, 2]", "finished", "holds no figures"),
        ("summary.json", b"\xff\xfe", "finished", "summary.json cannot be read"),
        ("settings.yaml", b"a: b: c", "finished", "settings.yaml cannot be read"),
        ("settings.yaml", b"\xff\xfe\x00", "finished", "settings.yaml cannot be read"),
        ("settings.yaml", b"", "finished", ""),
    ],
)
def test_a_file_that_cannot_be_read_is_told(tmp_path, file, content, state, word):
    folder = written(tmp_path, "it")
    (folder / file).write_bytes(content)
    found = read_run(folder)
    assert (found.state, found.summary is not None) == (state, True)
    assert word in found.trouble


@pytest.mark.parametrize(
    "metrics",
    [b'{"kind": "step"}\n', b"[1]\n", b'{"no": "kind"}\n', b'{"kind": "step", "step_s": "long", "is_borrowed": 1}\n'],
)
def test_lines_that_are_of_something_else_are_told(tmp_path, capsys, metrics):
    written(tmp_path, "fine")
    folder = written(tmp_path, "it", is_summed_up=False)
    (folder / "metrics.jsonl").write_bytes(metrics)
    found = read_run(folder)
    assert (found.state, found.summary) == ("broken", None)
    assert "not those of a run of this version" in found.trouble
    listed = said(capsys, "ls", "--runs", tmp_path)
    assert "fine" in listed and "problems:" in listed, "the others are shown all the same"
    assert "-" in said(capsys, "compare", "it", "fine", "--runs", tmp_path)
    assert "broken" in said(capsys, "show", "it", "--runs", tmp_path)


def test_a_run_with_a_summary_is_shown_whatever_its_lines_are(tmp_path, capsys):
    folder = written(tmp_path, "it")
    for line in ('{"kind": "step"}', "[1]", '{"no": "kind"}', "half"):
        (folder / "metrics.jsonl").write_text(f'{{"kind": "finished", "step": 8}}\n{line}\n')
        found = read_run(folder)
        assert (found.state, found.trouble, found.summary["steps"]) == ("finished", "", 8), line
    assert "finished" in said(capsys, "ls", "--runs", tmp_path)


def test_a_summary_is_passed_on_as_its_file_has_it(tmp_path, capsys):
    folder, summary = written(tmp_path, "it"), {"notes": [], "steps": 8, "of_a_later_version": {"a": [1, None]}}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert json.loads(said(capsys, "show", "it", "--json", "--runs", tmp_path))["summary"] == summary


def test_lines_of_earlier_versions_have_figures(tmp_path):
    folder = written(tmp_path, "old", is_summed_up=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    left_out = ("groups_kept", "groups_total", "version", "train_s", "running", "code")
    lines = [{key: value for key, value in line.items() if key not in left_out} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_run(folder)
    assert (found.state, found.summary["steps"]) == ("broken off", 8) and found.summary["cost_per_correct"] > 0


def test_a_folder_with_settings_alone_is_a_run_that_did_nothing_yet(tmp_path, capsys):
    write_resolved(RunSettings(name="begun"), tmp_path / "begun")
    [found] = past_runs(tmp_path)
    assert (found.state, found.summary["steps"]) == ("broken off", 0)
    assert "begun" in said(capsys, "show", "begun", "--runs", tmp_path)


def test_what_is_missing_is_told_once(tmp_path):
    folder = written(tmp_path, "it", is_summed_up=False)
    (folder / "settings.yaml").unlink()
    trouble = read_run(folder).trouble
    assert trouble.count("No such file") == 1 and trouble.endswith("no figures can be made")


@pytest.mark.parametrize("usd, shown", [(8.34e-7, "0.834"), (1.2e-5, "12"), (0.0123, "12,300"), (None, "-")])
def test_money_is_shown_for_a_million_answers(tmp_path, capsys, usd, shown):
    folder = written(tmp_path, "it")
    (folder / "summary.json").write_text(json.dumps({"notes": [], "steps": 8, "cost_per_correct": usd}))
    [line] = [line for line in said(capsys, "show", "it", "--runs", tmp_path).splitlines() if "USD per" in line]
    assert line.split("answers")[1].strip() == shown


def test_figures_of_a_strange_kind_are_shown_as_they_are(tmp_path, capsys):
    folder = written(tmp_path, "it")
    summary = {"notes": "none", "steps": "many", "turns_by_pool": {"borrowed": "all"}, "lost": True}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "many" in said(capsys, "show", "it", "--runs", tmp_path)
    assert "many" in said(capsys, "ls", "--runs", tmp_path)
