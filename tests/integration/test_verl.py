"""verl's own parts, as released, play on the devices of a gateway and publish for them; verl's step needs a GPU.

verl lives in an environment of its own (`make venv-verl`, or the interpreter that ROSE_VERL_PYTHON names). All tests
use the configuration that verl itself makes of examples/verl.sh.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration import devices, gateways

from rose.models.presets import write_preset
from rose.weights.keys import SECRET

PYTHON = Path(os.environ.get("ROSE_VERL_PYTHON", devices.ROOT / ".venv-verl" / "bin" / "python"))
PARTS, TOOLS = (Path(__file__).with_name(name) for name in ("verl_parts.py", "verl_tools.py"))
EXAMPLE = devices.ROOT / "examples" / "verl.sh"
TIMEOUT_S = 1500
PATIENT_RAY = {  # on a machine that does other work too
    "RAY_raylet_start_wait_time_s": "600",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_health_check_failure_threshold": "100",
    "RAY_USAGE_STATS_ENABLED": "0",
}
PROMPTS, N = 4, 2  # of a batch
OWN_TOKEN = 7  # what verl's own replica answers
ROLLOUT = "actor_rollout_ref.rollout"
SMALL = (
    f"{ROLLOUT}.agent.num_workers=2",
    f"{ROLLOUT}.n={N}",
    f"{ROLLOUT}.multi_turn.enable=True",
    f"{ROLLOUT}.multi_turn.format=always",
    f"{ROLLOUT}.multi_turn.function_tool_path={TOOLS}",
    f"{ROLLOUT}.multi_turn.max_assistant_turns=3",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "data.max_response_length=1024",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(TIMEOUT_S + 60),
    pytest.mark.skipif(not PYTHON.exists(), reason="verl is not here: make venv-verl, or name it by ROSE_VERL_PYTHON"),
]


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in gateways.TOKENS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(SECRET, "a-secret-of-these-tests-and-no-other")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("qwen3-3m", tmp_path_factory.mktemp("models") / "qwen3-3m", seed=0)


def composed(model: Path, url: str, folder: Path, *more: str) -> dict[str, Any]:
    """Return the configuration of the example, as verl's own command composes it."""
    variables = {"PYTHON": str(PYTHON), "GATEWAY": url, "RELAY": str(folder / "relay")}
    command = [str(EXAMPLE), str(model), "train.parquet", "test.parquet", *more, "--cfg", "job", "--resolve"]
    environment = devices.environment() | {"OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = yaml.safe_load(done.stdout)
    return found


@contextmanager
def parts(story: str, config: dict[str, Any], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a story of verl_parts.py. Its Ray processes are of its group, and end with it."""
    (folder / "request.json").write_text(json.dumps({"config": config, "folder": str(folder)}))
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            [str(PYTHON), str(PARTS), story, str(folder / "request.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            env=devices.environment() | PATIENT_RAY | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def lines_of(process: subprocess.Popen[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects that the story prints, to its end."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"'):
            yield json.loads(line)
    process.wait()
    assert process.returncode == 0, errors_of(folder)


def errors_of(folder: Path) -> str:
    return (folder / "stderr").read_text()[-8000:]


def told(story: str, model: Path, url: str, folder: Path, *more: str) -> list[dict[str, Any]]:
    with parts(story, composed(model, url, folder, *more), folder) as process:
        return list(lines_of(process, folder))


def test_verl_composes_and_accepts_the_example(model: Path, tmp_path: Path) -> None:
    config = composed(model, "http://gw:8002", tmp_path)
    rollout = config["actor_rollout_ref"]["rollout"]
    assert rollout["name"] == rollout["checkpoint_engine"]["backend"] == "rose"
    assert rollout["checkpoint_engine"]["engine_kwargs"]["rose"] == {
        "model": str(model),
        "gateway": "http://gw:8002",
        "relay": str(tmp_path / "relay"),
        "run": "my-run",
    }
    with parts("check", config, tmp_path) as process:
        [line] = lines_of(process, tmp_path)
    assert line == {"trainer": "PPOTrainerSeparateAsync", "manager": "RoseAgentLoopManager", "replica": "RoseReplica"}


def test_verls_checkpoint_manager_publishes_what_two_ranks_hold(model: Path, tmp_path: Path) -> None:
    """Weights of another shape are refused with their names, and workers keep the version before."""
    with gateways.gateway(model, "max_staleness=1", "beat_s=0.2") as running, gateways.worker(model, running.url, "a"):
        config = composed(model, running.url, tmp_path)
        version = ""
        with parts("weights", config, tmp_path) as process:
            for line in lines_of(process, tmp_path):
                if line["step"] == 2:
                    assert re.search(r"ModelError: the trainer's weights are not those of .*, in", line["error"])
                else:
                    assert line["metrics"]["rose/published_mb"] > 0
                    devices.eventually(lambda wanted=line["hash"]: running.members(hash=wanted) == ["a"])
                    version = running.pool()["version"]
                    assert version.endswith(f".{line['step']}-{line['hash'][:8]}")
                assert running.members(version=version) == ["a"]
                process.stdin.write("next\n")
                process.stdin.flush()
    assert line["step"] == 3


def test_verls_agent_loops_play_on_the_pool_and_know_their_weights(model: Path, tmp_path: Path) -> None:
    """In verl's Ray actors and in one process that is watched; then weights come in the middle of a turn."""
    with (
        gateways.gateway(model, "max_staleness=1", "beat_s=0.2") as running,
        gateways.worker(model, running.url, "a"),
        gateways.worker(model, running.url, "b"),
    ):
        actors, here, ended, swap = told("loops", model, running.url, tmp_path, *SMALL)
    for rows in (actors["actors"], here["here"]):
        assert len(rows) == len({row["key"] for row in rows}) == len({tuple(row["responses"]) for row in rows})
        assert len(rows) == PROMPTS * N
        assert all(row["steps"] == [0, 0] and row["difference"] < 1e-3 for row in rows)
        assert any(row["given"] for row in rows)  # what the tool answered
    sessions: dict[str, list[dict[str, Any]]] = {}
    for turn in here["turns"]:
        sessions.setdefault(turn["session"], []).append(turn)
    assert len(sessions) == PROMPTS * N and any(len(turns) > 1 for turns in sessions.values())
    assert all([turn["turn"] for turn in turns] == list(range(len(turns))) for turns in sessions.values())
    assert not any(turn["is_fork"] for turn in here["turns"])
    assert len(ended["ended"]) == len(sessions) and all("has finished" in what for what in ended["ended"])
    steps = [int(re.match(r"\d+\.(\d+)-", span["version"])[1]) for span in swap["spans"]]
    assert len(steps) > 1 and steps == sorted(steps)
    assert swap["spans"][0]["start"] == 0 and swap["spans"][-1]["end"] == swap["tokens"]
    assert swap["steps"] == {"global_steps": steps[-1], "min_global_steps": steps[0], "max_global_steps": steps[-1]}


def test_a_pool_beside_verls_own_replica_gets_the_same_weights_and_its_share(model: Path, tmp_path: Path) -> None:
    with gateways.gateway(model, "beat_s=0.2") as running, gateways.worker(model, running.url, "a"):
        [line] = told("mixed", model, running.url, tmp_path)
        assert running.members(hash=line["hash"]) == ["a"]
    assert line["own_is_same"] and line["metrics"]["own/tensors"] > 0 and line["metrics"]["rose/published_mb"] > 0
    assert line["servers"] == {"rose-0": 0, "rose-1": 0}  # verl's own has left, and its turn has ended on the pool
    assert len(line["resumed"]) == 4 and line["resumed"][0] == OWN_TOKEN
    kinds = [outputs[0] for outputs in line["outputs"]]
    assert {tuple(kind) for kind in kinds} == {(1, 5), (4, 5)}  # tokens and step: of verl's own, and of the pool
    assert all(first == second for first, second in line["outputs"])


def start_gateway(model: Path, folder: Path, port: int) -> devices.Device:
    arguments = [f"port={port}", f"ledger={folder / 'ledger'}", "max_staleness=1", "beat_s=0.2", "lease_s=3"]
    return devices.start(["-m", "tests.integration.gateway_process", str(model), *arguments], model)


def test_a_gateway_that_restarts_costs_time_and_one_that_is_gone_is_an_error(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    with ExitStack() as stack:
        gateway = start_gateway(model, tmp_path, port)
        stack.callback(lambda: devices.end(gateway))
        stack.enter_context(gateways.worker(model, gateway.url, "a"))
        more = (*SMALL, f"+{ROLLOUT}.checkpoint_engine.engine_kwargs.rose.patience_s=60")
        process = stack.enter_context(parts("trouble", composed(model, gateway.url, tmp_path, *more), tmp_path))
        lines = lines_of(process, tmp_path)
        assert next(lines) == {"now": "away"}
        os.kill(gateway.process.pid, signal.SIGKILL)
        gateway.process.wait()
        gateway = start_gateway(model, tmp_path, port)
        assert next(lines) == {"tokens": 2000}
        assert next(lines) == {"now": "gone"}
        devices.end(gateway)
        process.stdin.write("it is gone\n")
        process.stdin.flush()
        status, publish = lines
    away = rf"the gateway at http://127\.0\.0\.1:{port} cannot be reached"
    assert status == {"status": "failure"} and re.search(rf"Unavailable: {away}", errors_of(tmp_path))
    assert re.search(away, publish["publish"])


def test_a_wrong_token_ends_verl_before_the_first_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gateways.gateway(model) as running:
        monkeypatch.setenv("ROSE_TRAINER_TOKEN", "not-the-token-of-this-gateway")
        with pytest.raises(AssertionError, match="RequestRefused: the gateway answered 401"):
            told("weights", model, running.url, tmp_path)
