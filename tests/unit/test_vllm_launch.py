"""How a rollout engine is started and reached: on a Unix socket that only its user can open, without ROSE's secrets."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from rose.engines.vllm import finding, starting
from rose.engines.vllm.desk import Status, control_sheet, status_sheet
from rose.engines.vllm.process import EngineProcess
from rose.engines.vllm.starting import RolloutEngine
from rose.engines.vllm.worker import VllmWorker
from rose.errors import ConfigError, ModelError
from rose.rollout.roles import VARIABLES

# Stands in for vLLM's server: answers on the socket it is given, and writes its status to the desk.
SERVER = """
import argparse, os, sys
from pathlib import Path
from aiohttp import web
from rose.engines.vllm.desk import Status, status_sheet

parser = argparse.ArgumentParser()
parser.add_argument("--uds", required=True)
options, _ = parser.parse_known_args()
sheet = status_sheet(Path(os.environ["ROSE_ROLLOUT_DESK"]), create=True)
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
        monkeypatch.setenv(finding.FOLDER_VARIABLE, f"{folder}/boards")
        yield Path(folder) / "boards"


def engine_of(model: Path) -> RolloutEngine:
    return RolloutEngine(model, f"cpu:{min(os.sched_getaffinity(0))}", python=sys.executable)


def test_the_rollout_engine_listens_on_a_socket_and_on_no_port(model: Path) -> None:
    words = starting.command(engine_of(model), Path("/run/desk"))
    assert words[words.index("--uds") + 1] == "/run/desk/http"
    assert "--port" not in words and "--host" not in words


def test_the_rollout_engine_is_given_no_token_or_secret(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = [*VARIABLES.values(), "ROSE_OWNER_TOKEN", "ROSE_ROLLOUT_TOKEN", "ROSE_RELAY_SECRET"]
    for name in (*secrets, "ROSE_RELAY_SECRET_FILE"):
        monkeypatch.setenv(name, "not-for-the-engine")
    found = starting.environment(engine_of(model), Path("/run/desk"))
    assert "not-for-the-engine" not in found.values()
    assert found["VLLM_SERVER_DEV_MODE"] == "1" and found["PATH"] == os.environ["PATH"]


def test_a_socket_path_that_linux_cannot_bind_is_refused_with_the_variable_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long for a Unix socket") as refused:
        starting.socket_path(tmp_path / ("x" * 100))
    assert refused.value.hint is not None and finding.FOLDER_VARIABLE in refused.value.hint


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_board_folder_that_is_a_link_or_a_file_is_refused(boards: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    if kind == "link":
        boards.symlink_to(tmp_path / "elsewhere")
    else:
        boards.touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        finding.own_folder()


def test_a_board_folder_that_others_may_enter_is_closed(boards: Path) -> None:
    boards.mkdir(mode=0o777)
    boards.chmod(0o777)
    assert stat.S_IMODE(finding.own_folder().stat().st_mode) == 0o700


def test_an_engine_process_is_reached_over_its_socket_and_opens_no_port(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "fake" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(SERVER)
    sources = str(Path(starting.__file__).parents[3])
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


def test_the_log_of_an_engine_is_cut_while_it_writes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.engines.vllm.process.LOG_BYTES_MAX", 1000)
    monkeypatch.setattr("rose.engines.vllm.process.LOG_BYTES_KEPT", 100)
    process = EngineProcess(engine_of(model))
    with process.log.open("ab", buffering=0) as engines:
        for number in range(1000):
            engines.write(b"line %d\n" % number)
            process.cut_log()
            assert process.log.stat().st_size <= 1000
    assert process.log.read_bytes().endswith(b"line 998\nline 999\n")
    assert b"\0" not in process.log.read_bytes()


def test_a_worker_talks_to_the_socket_it_is_attached_to(tmp_path: Path) -> None:
    """Whatever proxy the environment names."""

    async def story() -> None:
        asked: list[str] = []

        async def called(request: web.Request) -> web.Response:
            asked.append(request.path)
            return web.json_response({"results": [{"busy": False, "failure": "", "version": "new", "numbers": 1}]})

        application = web.Application()
        application.add_routes([web.post("/collective_rpc", called)])
        runner = web.AppRunner(application)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "http")).start()
        control, status = control_sheet(tmp_path, create=True), status_sheet(tmp_path, create=True)
        status.write(Status(1, version="old"))
        worker = await VllmWorker.attach(tmp_path / "http", tmp_path, control, lambda: True)
        try:
            await worker.stage("new", "folder")
        finally:
            await worker.close()
            await runner.cleanup()
        assert asked == ["/collective_rpc"]

    asyncio.run(story())


def _tcp_sockets(process_id: int) -> set[str]:
    """Sockets of the process that listen at some TCP port."""
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{process_id}/net/{table}").read_text().splitlines()[1:]
    ]
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == finding.LISTENING}
    held = {os.readlink(path) for path in Path(f"/proc/{process_id}/fd").iterdir()}
    return listening & held
