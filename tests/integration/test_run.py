"""`rose run` from beginning to end: a borrowed device, a dedicated worker, users, a trainer, and what is left."""

from __future__ import annotations

import contextlib
import io
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.devices import eventually
from tests.integration.running import Run, kill, processes_of

from rose.cli.main import main
from rose.gateway.auth import VARIABLES
from rose.private_files import is_secret
from rose.run.chargeback import bill_of_folder
from rose.run.past_runs import read_run
from rose.train.recipes import Recipe
from rose.train.warmstart import make_warm_start

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It knows little more than the form of an answer: enough for some games to go better than others."""
    recipe = Recipe(games=100, epochs=1, rows=4, learning_rate=2e-3, warm_up_updates=5, turns_max=4)
    return make_warm_start(recipe, tmp_path_factory.mktemp("model") / "frozenlake-1m")


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.end()


def started(runs: list[Run], folder: Path, model: Path, *overrides: str) -> Run:
    runs.append(Run(folder, model, *overrides))
    return runs[-1]


def test_two_steps_end_to_end(tmp_path, model, runs):
    run = started(runs, tmp_path, model)
    run.until_said("ready: users are served")
    tokens = told_tokens(run)
    assert run.wait() == 0, run.words
    check_tokens_are_nowhere(run, tokens)
    summary = run.summary()
    assert summary["steps"] == 2 and summary["trajectories"] == 16
    assert (summary["lost"], summary["doubled"], summary["differing"]) == (0, 0, 0)
    assert summary["begun"] == summary["returned"] == 16
    assert 0 <= summary["success_before"] <= 1 and 0 <= summary["success_after"] <= 1
    assert sum(summary["turns_by_pool"].values()) == summary["turns"] > 0
    assert {"gateway", "trainer", "engine_borrowed", "engine_dedicated", "traffic"} <= summary["cpu_s_by_role"].keys()
    assert (run.folder / "settings.yaml").exists() and "report:" in run.words
    assert [folder.name for folder in (run.folder / "checkpoints").iterdir()] == ["step-000002"]
    assert "<svg" in (run.folder / "report.html").read_text()
    check_weights(run, {"borrowed", "dedicated"})
    assert {cycle["name"] for cycle in run.metrics("allocation")} == {"borrowed"}
    assert run.metrics("allocation")[-1]["usable_s"] is not None
    assert len(run.metrics("lent")) == len(run.metrics("lending")), "what it lent is read with its breaches"
    for lent in run.metrics("lent")[-1:]:
        assert lent["lender"] == "borrowed" and (lent["counts"]["tokens"] > 0) == (lent["counts"]["milliseconds"] > 0)
        if summary["turns_by_pool"]["borrowed"]:
            assert bill_of_folder("run", run.folder).lent_tokens == lent["counts"]["tokens"] > 0
    assert run.processes() == {}


def told_tokens(run: Run) -> set[str]:
    """What the processes of a run know, each no more than its role needs and none by its command line."""
    known: dict[str, dict[str, str]] = {}
    for process_id, command in run.processes().items():
        variables = dict(line.partition("=")[::2] for line in _environment(process_id))
        secrets = {name: value for name, value in variables.items() if is_secret(name)}
        assert not any(secret in command for secret in secrets.values()), command
        known[command] = secrets

    def names(words: str) -> set[str]:
        return {name for command, secrets in known.items() if re.search(words, command) for name in secrets}

    assert names("rose gateway") == set(VARIABLES.values())
    assert any("rose.run.serving_traffic" in command for command in known)
    assert names("run.serving_traffic") == set()
    assert names("rose serve --lend") == {"ROSE_WORKER_TOKEN", "ROSE_RELAY_SECRET"}
    assert names("^(?!.*rose gateway)") == {"ROSE_WORKER_TOKEN", "ROSE_RELAY_SECRET", "ROSE_OWNER_TOKEN"}
    return {value for secrets in known.values() for value in secrets.values()}


def _environment(process_id: int) -> list[str]:
    return Path(f"/proc/{process_id}/environ").read_bytes().decode().split("\0")


def check_tokens_are_nowhere(run: Run, tokens: set[str]) -> None:
    """Neither in what the run said nor in its folder, but for the file of the weights' secret."""
    assert len(tokens) >= 6
    texts = {"what it said": run.words.encode()}
    texts |= {str(path): path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    holders = {name for name, text in texts.items() for token in tokens if token.encode() in text}
    assert holders <= {str(run.folder / "weights.secret")}


def check_weights(run: Run, workers: set[str]) -> None:
    """Trainer, workers and relay hold the same weights, and say so by hash."""
    [weights] = run.metrics("weights")
    assert set(weights["workers"]) == workers and set(weights["workers"].values()) == {weights["hash"]}
    assert run.metrics("behind") == []
    for step in run.metrics("step"):
        assert step["weights_bytes"] > 0 and step["weights_ratio"] > 1 and step["weights_lag"] == 0
        assert step["weights_kind"] == "delta" and step["weights_s"]["total"] > 0
        assert step["weight_sync_s"] >= step["pause_s"] > 0
    assert run.metrics("step")[-1]["weights_hash"] == weights["hash"]
    assert weights["hash"] in verified(run)


def verified(run: Run) -> str:
    """What `rose weights verify` says of the newest version in the run's relay."""
    said = io.StringIO()
    secret = str(run.folder / "weights.secret")
    with contextlib.redirect_stdout(said):
        command = ["weights", "verify", "--relay", str(run.folder / "weights"), "--run", "it", "--secret-file", secret]
        assert main(command) == 0
    return said.getvalue()


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--set", "groups.siez=4"], "groups.size"),
        (["--compare", "--set", "steps=3"], "steps=4"),
        (["nowhere.yaml"], "nowhere.yaml"),
        (["--profile", "heavy"], "rollout-heavy"),
        (["--set", "worker.device=cpu:999"], "cpu:999"),
        (["--set", "rollout_model=nowhere"], "nowhere"),
        (["--set", "environment=frozenlake-8x8"], "rollout_model=FOLDER"),
        (["--set", "weights.relay=http://127.0.0.1:1"], "ROSE_RELAY_SECRET"),
    ],
)
def test_wrong_settings_are_told_in_words(tmp_path, capsys, monkeypatch, arguments, word):
    monkeypatch.chdir(tmp_path)
    assert main(["run", *arguments]) == 2
    told = capsys.readouterr().err
    assert word in told and "Traceback" not in told


def test_a_name_is_used_once(tmp_path, capsys):
    (tmp_path / "it").mkdir()
    assert main(["run", "--name", "it", "--set", f"runs={tmp_path}"]) == 2
    assert "another name" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_everything_and_leaves_a_report(tmp_path, model, runs):
    run = started(runs, tmp_path, model, "steps=1000")
    run.until_said(r"step +1/1000")
    assert len(run.processes()) >= 7
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.words
    assert run.processes() == {}
    assert run.summary()["steps"] >= 1 and (run.folder / "report.html").exists()
    assert "Traceback" not in run.words
    assert read_run(run.folder).state == "interrupted"


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_nothing_behind(tmp_path, model, runs):
    run = started(runs, tmp_path, model, "steps=1000")
    run.until_said(r"step +1/1000")
    assert read_run(run.folder).state == "running"
    kill(run.process.pid)
    eventually(lambda: run.processes() == {})
    assert run.wait() == -signal.SIGKILL
    assert read_run(run.folder).state == "broken off"


@pytest.mark.slow
@pytest.mark.parametrize(
    "role, command",
    [
        ("dedicated", "rose serve .*--worker-name dedicated"),
        ("borrowed", "rose serve .*--worker-name borrowed"),
        ("gateway", "rose gateway"),
    ],
)
def test_what_is_killed_is_started_again_and_nothing_is_lost(tmp_path, model, runs, role, command):
    run = started(runs, tmp_path, model, "steps=12", "groups.groups=4", "groups.size=8", "evaluation.every_steps=0")
    run.until_said(r"step +2/12")
    [killed] = processes_of(run.processes(), command)
    kill(killed)
    assert run.wait() == 0, run.words
    summary = run.summary()
    assert summary["restarts"] == 1 and f"{role} died" in run.words
    assert summary["steps"] == 12 and summary["begun"] == summary["returned"] == 12 * 32
    assert (summary["lost"], summary["doubled"], summary["differing"]) == (0, 0, 0)
    [weights] = run.metrics("weights")
    assert set(weights["workers"].values()) == {weights["hash"]} and weights["hash"] in verified(run)


@pytest.mark.slow
def test_a_comparison_alternates_and_keeps_the_device_in_sync(tmp_path, model, runs):
    # Few seats on the dedicated worker: what is left over is for the borrowed device.
    run = started(
        runs, tmp_path, model, "compare=true", "steps=4", "evaluation.every_steps=0", "worker.max_sequences=2"
    )
    assert run.wait() == 0, run.words
    steps = run.metrics("step")
    assert [step["is_borrowed"] for step in steps] == [True, False, False, True]
    assert [step["turns_by_pool"]["borrowed"] > 0 for step in steps] == [True, False, False, True]
    assert run.metrics("behind") == []
    assert run.summary()["throughput_ratio"] > 0


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_a_word_and_nothing_half(tmp_path, model, runs):
    """A limit on the size of files stands for the disk: the weights of the next version do not fit."""
    run = started(runs, tmp_path, model, "steps=1000", "checkpoint.every_steps=0", "weights.patience_s=0.2")
    run.until_said("ready: users are served")
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (1 << 17, 1 << 17))
    assert run.wait() == 1, run.words
    assert "no room for" in run.words and "Traceback" not in run.words
    assert "is whole" in verified(run)
    assert run.processes() == {}
    for line in (run.folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.slow
def test_weights_go_through_the_relay_that_is_named(tmp_path, model, runs, monkeypatch):
    """A relay server of one's own, with a secret that trainer and workers have from their environment."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of the relay's and the run's\n")
    monkeypatch.setenv("ROSE_RELAY_SECRET_FILE", str(secret))
    command = [sys.executable, "-m", "rose", "relay", "up", "--folder", str(tmp_path / "relay")]
    with subprocess.Popen(
        [*command, "--secret-file", str(secret), "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split(" at ")[1].split(";")[0]
            run = started(runs, tmp_path, model, f"weights.relay={address}")
            assert run.wait() == 0, run.words
        finally:
            server.kill()
    [weights] = run.metrics("weights")
    assert set(weights["workers"].values()) == {weights["hash"]} and run.metrics("behind") == []
    assert not list((run.folder / "weights").iterdir()) and not (run.folder / "weights.secret").exists()


@pytest.mark.slow
def test_the_journal_tells_what_became_of_every_trajectory(tmp_path, model, runs):
    run = started(runs, tmp_path, model)
    assert run.wait() == 0, run.words
    lines = [json.loads(line) for line in (run.folder / "journal.jsonl").read_text().splitlines()]
    ended = [line["fact"] for line in lines if line["fact"]["kind"] == "MemberEnded"]
    assert len({fact["trajectory_id"] for fact in ended}) == len(ended) == run.summary()["begun"]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: the report is not looked at in a browser")
def test_the_report_opens_in_a_browser_without_a_complaint(tmp_path, model, runs):
    run = started(runs, tmp_path, model)
    assert run.wait() == 0, run.words
    picture = tmp_path / "report.png"
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += ["--virtual-time-budget=2000", "--window-size=1000,2400", f"--screenshot={picture}"]
    done = subprocess.run(
        [*command, (run.folder / "report.html").as_uri()], capture_output=True, text=True, timeout=100
    )
    assert picture.stat().st_size > 20_000, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    dump = subprocess.run(
        [*command[:4], "--dump-dom", (run.folder / "report.html").as_uri()], capture_output=True, text=True, timeout=100
    )
    assert dump.stdout.count("<svg") == 5
