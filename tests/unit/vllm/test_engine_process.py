"""A rollout engine listens on a socket that only its user can open, and gets none of the secrets."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.errors import ConfigError, ModelError
from rose.gateway.auth import VARIABLES
from rose.vllm import discovery, engine_process
from rose.vllm.engine_process import EngineProcess, RolloutEngineSettings

# Stands in for vLLM's server: answers on the socket it is given, and writes its status to the desk.
SERVER = """
import argparse, os, sys
from pathlib import Path
from aiohttp import web
from rose.vllm.control_segment import Status, open_status

parser = argparse.ArgumentParser()
parser.add_argument("--uds", required=True)
options, _ = parser.parse_known_args()
sheet = open_status(Path(os.environ["ROSE_ROLLOUT_DESK"]), create=True)
sheet.write(Status(os.getpid(), version="first"))

async def health(request):
    return web.Response()

async def called(request):
    body = await request.json()
    found = {"busy": False, "failure": f"called {body['method']}", "version": "", "numbers": 0}
    return web.json_response({"results": [found]})

application = web.Application()
application.add_routes([web.get("/health", health), web.post("/collective_rpc", called)])
web.run_app(application, path=options.uds, print=None)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def boards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rose-") as folder:  # a socket's path is short
        monkeypatch.setenv(discovery.FOLDER_VARIABLE, f"{folder}/boards")
        yield Path(folder) / "boards"


def engine_of(model: Path) -> RolloutEngineSettings:
    return RolloutEngineSettings(model, f"cpu:{min(os.sched_getaffinity(0))}", python=sys.executable)


def test_the_rollout_engine_listens_on_a_socket_and_on_no_port(model: Path) -> None:
    words = engine_process.launch_command(engine_of(model), Path("/run/desk"))
    assert words[words.index("--uds") + 1] == "/run/desk/http"
    assert "--port" not in words and "--host" not in words


def test_the_rollout_engine_gets_no_token_or_secret(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = [*VARIABLES.values(), "ROSE_OWNER_TOKEN", "ROSE_ROLLOUT_TOKEN", "ROSE_RELAY_SECRET"]
    for name in (*secrets, "ROSE_RELAY_SECRET_FILE"):
        monkeypatch.setenv(name, "not-for-the-engine")
    found = engine_process.launch_environment(engine_of(model), Path("/run/desk"))
    assert "not-for-the-engine" not in found.values()
    assert found["VLLM_SERVER_DEV_MODE"] == "1" and found["PATH"] == os.environ["PATH"]


def test_a_socket_path_that_is_too_long_names_the_variable_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long for a Unix socket") as refused:
        engine_process.socket_path(tmp_path / ("x" * 100))
    assert refused.value.hint is not None and discovery.FOLDER_VARIABLE in refused.value.hint


def test_on_a_cpu_the_worker_runs_in_the_engine_process(tmp_path: Path) -> None:
    engine = RolloutEngineSettings(tmp_path, "cpu:1-2", step_tokens=64, max_sequences=8)
    words = " ".join(engine_process.launch_command(engine, tmp_path))
    flags = ("rose.vllm.RolloutScheduler", "UniProcExecutor", f"--uds {tmp_path}", "--no-async-scheduling")
    for wanted in (*flags, "--logprobs-mode processed_logprobs", "--max-num-batched-tokens 64"):
        assert wanted in words
    environment = engine_process.launch_environment(engine, tmp_path)
    assert (environment["OMP_NUM_THREADS"], environment["ROSE_ROLLOUT_DESK"]) == ("2", str(tmp_path))
    assert "CUDA_VISIBLE_DEVICES" not in words and "--gpu-memory-utilization" not in words


def test_on_a_gpu_vllm_keeps_its_defaults_and_uses_little_memory(tmp_path: Path) -> None:
    engine = RolloutEngineSettings(tmp_path, "cuda:3")
    words = " ".join(engine_process.launch_command(engine, tmp_path))
    assert "UniProcExecutor" not in words and "float32" not in words
    assert "--gpu-memory-utilization 0.01" in words, "most of it is serving's"
    assert engine_process.launch_environment(engine, tmp_path)["CUDA_VISIBLE_DEVICES"] == "3"


def test_every_gpu_has_a_rank(tmp_path: Path) -> None:
    engine = RolloutEngineSettings(tmp_path, "cuda:4-7")
    words = " ".join(engine_process.launch_command(engine, tmp_path))
    assert "--tensor-parallel-size 4" in words and "--distributed-executor-backend mp" in words
    assert engine_process.launch_environment(engine, tmp_path)["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert engine.parts == ["cuda:4", "cuda:5", "cuda:6", "cuda:7"]


def test_ranks_share_the_cores_of_a_cpu_only_if_they_are_asked_for(tmp_path: Path) -> None:
    threads, ranks = (RolloutEngineSettings(tmp_path, "cpu:0-3", tensor_parallel=number) for number in (0, 2))
    assert (threads.ranks, ranks.ranks) == (1, 2)
    words = " ".join(engine_process.launch_command(ranks, tmp_path))
    assert "--tensor-parallel-size 2" in words and "UniProcExecutor" not in words and "float32" in words
    assert engine_process.launch_environment(ranks, tmp_path)["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    "device, ranks, words",
    [
        ("cpu:0-2", 2, "3 cores of cpu:0-2 cannot be shared by 2"),
        ("cpu:0", -1, "cannot be shared by -1"),
        ("cuda:0-3", 2, "4 GPUs.*2 ranks were given"),
        ("cuda:3-2", 0, "ends before it begins"),
    ],
)
def test_ranks_that_do_not_fit_the_devices_are_refused(tmp_path: Path, device: str, ranks: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_process.check_engine(RolloutEngineSettings(tmp_path, device, tensor_parallel=ranks))


def test_settings_that_cannot_work_here_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a device"):
        engine_process.check_engine(RolloutEngineSettings(tmp_path, "gpu0"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        engine_process.check_engine(RolloutEngineSettings(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="core 4000"):
        engine_process.check_engine(RolloutEngineSettings(tmp_path, "cpu:4000"))


def test_a_rollout_engine_has_the_highest_oom_score(tmp_path: Path) -> None:
    prepare = engine_process.prepare_child(RolloutEngineSettings(tmp_path, f"cpu:{min(engine_process.USABLE)}"))
    command = ["cat", "/proc/self/oom_score_adj"]
    told = subprocess.run(command, preexec_fn=prepare, capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "1000"


def test_an_engine_process_answers_at_its_socket_and_opens_no_port(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "fake" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(SERVER)
    sources = str(Path(engine_process.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "fake"), sources]))

    async def story() -> None:
        process = EngineProcess(engine_of(model))
        try:
            worker = await process.start()
            assert stat.S_IMODE(process.folder.stat().st_mode) == 0o700
            assert stat.S_ISSOCK(process.socket.stat().st_mode)
            assert not _tcp_sockets(process.process_id)
            with pytest.raises(ModelError, match="called stage_weights"):
                await worker.stage("new", "folder")
        finally:
            await process.close()

    asyncio.run(story())


def _tcp_sockets(process_id: int) -> set[str]:
    """Sockets of the process that listen at some TCP port."""
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{process_id}/net/{table}").read_text().splitlines()[1:]
    ]
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == discovery.LISTENING}
    held = {os.readlink(path) for path in Path(f"/proc/{process_id}/fd").iterdir()}
    return listening & held


def test_the_log_of_an_engine_is_cut_while_it_writes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.vllm.engine_process.LOG_BYTES_MAX", 1000)
    monkeypatch.setattr("rose.vllm.engine_process.LOG_BYTES_KEPT", 100)
    process = EngineProcess(engine_of(model))
    with process.log.open("ab", buffering=0) as engines:
        for number in range(1000):
            engines.write(b"line %d\n" % number)
            process.cut_log()
            assert process.log.stat().st_size <= 1000
    assert process.log.read_bytes().endswith(b"line 998\nline 999\n")
    assert b"\0" not in process.log.read_bytes()


def test_folders_of_killed_agents_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_BOARDS", str(tmp_path / "boards"))
    (tmp_path / "config.json").write_text("{}")
    engine = RolloutEngineSettings(tmp_path, f"cpu:{min(engine_process.USABLE)}")
    first = EngineProcess(engine)
    left = first.folder.with_name("-".join([*first.folder.name.split("-")[:2], "999999999", "abc"]))
    left.mkdir()
    second = EngineProcess(engine)
    assert sorted((tmp_path / "boards").iterdir()) == sorted([first.folder, second.folder])
