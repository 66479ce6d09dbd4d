"""`rose run --on ray` on real nodes: the same weights as on one machine, and what happens when a node is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.integration.devices import environment, eventually
from tests.integration.ray_nodes import PATIENCE_S, RayNodes, driver_on
from tests.integration.running import SMALL, Run, kill
from tests.integration.test_run import check_weights, model

__all__ = ["model"]

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(500)]
if find_spec("ray") is None:
    pytest.skip("Ray is not installed here: make test-ray", allow_module_level=True)

LABEL = "rose/role"


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs, which only the driver sees."""
    return tmp_path_factory.mktemp("driver")


@pytest.fixture(scope="module")
def nodes(hidden: Path, model: Path) -> Iterator[RayNodes]:
    """A head for the control plane, a node for each kind of device, and a spare one that takes every role."""
    started = RayNodes([hidden, model.parent], has_dashboard=True)  # jobs are submitted to it
    try:
        started.open()
        for labels in (f"{LABEL}=control,half/role=control", f"{LABEL}=serving", f"{LABEL}=dedicated", f"{LABEL}=any"):
            started.add(labels)
        yield started
    finally:
        started.close()
        assert started.all() == {}


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.end()


def started(runs: list[Run], nodes: RayNodes, folder: Path, model: Path, *overrides: str) -> Run:
    place = ("cluster.kind=ray", f"cluster.address={nodes.head}")
    runs.append(driver_on(nodes)(folder, model, *place, *overrides))
    return runs[-1]


def learnt(run: Run) -> list[str]:
    """Return the hash of the weights after every step."""
    assert run.wait(200) == 0, run.words
    return [step["weights_hash"] for step in run.metrics("step")]


def check_secrets(run: Run, nodes: RayNodes) -> set[str]:
    """Return the secrets of the processes on the nodes. None has Ray's token, and none is on a command line."""
    secrets = set()
    for pid, command in nodes.of_rose().items():
        variables = dict(line.partition("=")[::2] for line in _environment(pid))
        assert "RAY_AUTH_TOKEN" not in variables, command
        values = {value for name, value in variables.items() if re.fullmatch(r"ROSE_\w*(TOKEN|SECRET)", name)}
        assert not [value for value in values if value in command], command
        secrets |= values
    return secrets


def _environment(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")


def test_weights_on_ray_equal_those_of_one_machine_bit_for_bit(tmp_path, hidden, model, runs, nodes):
    runs.append(Run(tmp_path, model))
    here = learnt(runs[0])
    run = started(runs, nodes, hidden / "equal", model)
    run.until_said("ready: users are served")
    secrets = check_secrets(run, nodes)
    assert learnt(run) == here and len(here) == 2
    check_weights(run, {"borrowed", "dedicated"})
    assert nodes.of_rose() == {} and run.processes() == {}
    logs = {path.name for path in (run.folder / "logs").iterdir()}
    assert {"gateway.log", "borrowed.log", "dedicated.log", "traffic.log", "relay.log"} <= logs
    assert {"gateway", "engine_borrowed", "engine_dedicated", "traffic"} <= run.summary()["cpu_s_by_role"].keys()
    files = [path for folder in (run.folder, nodes.folder) for path in folder.rglob("*") if path.is_file()]
    holders = {path.name for path in files for secret in secrets if secret.encode() in path.read_bytes()}
    assert len(secrets) >= 6 and holders <= {"weights.secret"}, "no secret is in a log, of Ray neither"


def test_two_ranks_beside_the_run_on_ray_learn_as_on_one_machine(tmp_path, hidden, model, runs, nodes):
    runs.append(Run(tmp_path, model, "train.ranks=2"))
    here = learnt(runs[0])
    run = started(runs, nodes, hidden / "ranks", model, "train.ranks=2")
    assert learnt(run) == here and len(here) == 2
    check_weights(run, {"borrowed", "dedicated"})
    assert (run.folder / "logs" / "rank-1.log").exists()
    assert nodes.of_rose() == {} and run.processes() == {}


@pytest.mark.parametrize("role", ["dedicated", "borrowed"])
def test_a_killed_node_loses_no_trajectory_and_leaves_no_orphan(hidden, model, runs, nodes, role):
    steps = 40
    job = (f"steps={steps}", "groups.groups=4", "groups.size=8", "evaluation.every_steps=0", "checkpoint.every_steps=0")
    run = started(runs, nodes, hidden / role, model, *job)
    run.until_said(rf"step +3/{steps}")
    raylet = nodes.raylet_of(role)
    there = nodes.below(raylet)
    assert there
    kill(raylet)
    eventually(lambda: not there & nodes.of_rose().keys())
    eventually(lambda: run.has_said(f"{role} is on .* now") or run.process.poll() is not None, PATIENCE_S)
    assert run.wait(300) == 0, run.words
    summary = run.summary()
    assert summary["steps"] == steps and summary["begun"] == summary["returned"] == steps * 32
    assert (summary["lost"], summary["doubled"], summary["differing"]) == (0, 0, 0)
    assert f"{role} is on " in run.words and summary["restarts"] >= 1
    [weights] = run.metrics("weights")
    assert set(weights["workers"].values()) == {weights["hash"]}
    assert nodes.of_rose() == {}
    nodes.add(f"{LABEL}={'serving' if role == 'borrowed' else role}")  # in place of the killed one


def test_a_killed_driver_leaves_nothing_on_any_node_and_the_run_is_resumed(tmp_path, hidden, model, runs, nodes):
    runs.append(Run(tmp_path, model, "steps=4"))
    here = learnt(runs[0])
    run = started(runs, nodes, hidden / "killed", model, "steps=4")
    run.until_said(r"step +2/4")
    kill(run.process.pid)
    eventually(lambda: nodes.of_rose() == {} and run.processes() == {})
    runs.append(driver_on(nodes).resumed(run.folder))
    assert learnt(runs[-1])[-1] == here[-1]
    assert nodes.of_rose() == {}


def test_a_submitted_job_is_a_run_like_any_other(hidden, model, nodes):
    given = [f"runs={hidden / 'job'}", f"rollout_model={model}", *SMALL]
    job = [sys.executable, "-m", "rose", "run", "--on", "ray", "--name", "it"]
    job += [word for override in given for word in ("--set", override)]
    submit = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "job",
        "submit",
        "--address",
        f"http://{nodes.address(0)}:8265",
    ]
    done = subprocess.run(
        [*nodes.inside(0), *submit, "--", *job], capture_output=True, text=True, timeout=300, env=variables_of(nodes)
    )
    assert done.returncode == 0 and "trajectories lost: 0, counted twice: 0" in done.stdout, done.stdout + done.stderr
    assert (hidden / "job" / "it" / "report.html").exists()
    assert nodes.of_rose() == {}


def variables_of(nodes: RayNodes) -> dict[str, str]:
    return environment() | dict(driver_on(nodes).variables)


def test_ctrl_c_ends_everything_on_every_node(hidden, model, runs, nodes):
    run = started(runs, nodes, hidden / "stopped", model, "steps=1000")
    run.until_said(r"step +1/1000")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.words
    assert nodes.of_rose() == {} and run.processes() == {}
    assert (run.folder / "report.html").exists() and "Traceback" not in run.words


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["cluster.address=127.0.0.1:1"], ["no Ray cluster answers at 127.0.0.1:1", "ray start --head"]),
        (["cluster.address=ray://here:1"], ["Ray's client", "ray job submit"]),
        (["cluster.cpus=64"], ["no node for serving has 64 CPUs", "There are", f"{LABEL}=control"]),
        (
            ["cluster.label=half/role"],
            ["no node has the label half/role=serving (or half/role=any)", "half/role=control"],
        ),
        (["serving.engine=vllm"], ["have the embedded engine"]),
    ],
)
def test_what_a_cluster_lacks_is_said_in_words(hidden, model, nodes, overrides, words):
    told = refused(nodes, hidden / "refused", model, *overrides)
    assert all(word in told for word in words), told
    assert not (hidden / "refused").exists(), "no run was begun"


def refused(nodes: RayNodes, folder: Path, model: Path, *overrides: str) -> str:
    given = [f"runs={folder}", f"rollout_model={model}", *SMALL, f"cluster.address={nodes.head}", *overrides]
    words = [word for override in given for word in ("--set", override)]
    done = subprocess.run(
        [*nodes.inside(0), sys.executable, "-m", "rose", "run", "--on", "ray", *words],
        capture_output=True, text=True, timeout=60, env=variables_of(nodes),
    )  # fmt: skip
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    return done.stderr


def test_another_version_of_rose_on_a_node_is_said(tmp_path, hidden, model, nodes):
    (tmp_path / "rose").mkdir()
    (tmp_path / "rose" / "__init__.py").write_text('__version__ = "0.0.9"\n')
    number = nodes.add(f"{LABEL}=any", variables={"PYTHONPATH": str(tmp_path)})
    try:
        told = refused(nodes, hidden / "refused", model)
    finally:
        os.killpg(nodes.processes[number].pid, signal.SIGTERM)
        nodes.processes[number].wait(60)
    assert f"node {nodes.address(number)} has rose 0.0.9" in told and "the same on every node" in told
