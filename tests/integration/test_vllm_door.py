"""A trainer made for vLLM drives a real gateway with real workers: the calls of prime-rl, AReaL and vLLM's own client.

The bodies are those of prime-rl 0.8 (`utils/client.py`), AReaL 1.0.4 (`engine/vllm_remote.py`) and vLLM 0.33
(`distributed/weight_transfer/clients.py`). The trainer here writes folders, as they do, and deletes them.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration import devices, gateways
from tests.integration.devices import eventually
from tests.integration.gateways import AGENT, TRAINER, RunningGateway

from rose.models.presets import write_preset
from rose.models.tensors import INDEX, open_tensors, write_tensors
from rose.weights.keys import SECRET
from rose.weights.manifest import folder_hash

NAME = "qwen3-3m"
RUN_SECRET = "a-secret-of-these-tests-and-no-other"
PROMPT = list(b"Once upon a time")
KEEP = "/pause?mode=keep&clear_cache=false"
UPDATE, AREAL_UPDATE = "/update_weights", "/areal_update_weights"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, RUN_SECRET)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset(NAME, tmp_path_factory.mktemp("models") / NAME, seed=0)


class Trainer:
    """A trainer that writes folders of weights, and what it asks the gateway."""

    def __init__(self, model: Path, root: Path) -> None:
        self.root, self._step = root, 0
        tensors = open_tensors(model)
        self.arrays = {name: np.array(tensors.float32(name)) for name in tensors.names()}

    def write(self, *, is_sharded: bool = False) -> Path:
        """Write the weights after another step, as prime-rl does: no config, and a mark that it is whole."""
        self._step += 1
        for array in self.arrays.values():
            array.reshape(-1)[:: 7 + self._step] += 0.01 * self._step
        folder = self.root / f"step_{self._step}"
        folder.mkdir()
        write_folder(folder, self.arrays, is_sharded=is_sharded)
        (folder / "STABLE").touch()
        return folder


def write_folder(folder: Path, arrays: dict[str, Any], *, is_sharded: bool = False) -> None:
    if not is_sharded:
        write_tensors(folder / "model.safetensors", arrays)
        return
    names = sorted(arrays)
    file_of = {name: f"model-{number % 2 + 1:05d}-of-00002.safetensors" for number, name in enumerate(names)}
    for file in set(file_of.values()):
        write_tensors(folder / file, {name: arrays[name] for name in names if file_of[name] == file})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


@contextmanager
def gateway(model: Path, root: Path, *overrides: str, port: int = 0) -> Iterator[RunningGateway]:
    """The gateway as a user starts it with `--door`."""
    arguments = ["-m", "rose", "gateway", str(model), "--port", str(port), "--door", "vllm"]
    arguments += ["--door-folder", str(root / "outputs"), "--door-relay", str(root / "relay")]
    arguments += [word for text in ("beat_s=0.2", *overrides) for word in ("--set", text)]
    (root / "outputs").mkdir(exist_ok=True)
    device = devices.start(arguments, model, variables=gateways.TOKENS)
    try:
        yield RunningGateway(device)
    finally:
        devices.end(device)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("door")


@pytest.fixture(scope="module")
def found(model: Path, place: Path) -> Iterator[RunningGateway]:
    """One gateway with one worker, for all tests that do it no harm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET, RUN_SECRET)
        with gateway(model, place) as running, gateways.worker(model, running.url, "a"):
            running.has_open(1)
            yield running


@pytest.fixture(autouse=True)
def resumed(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails in a pause must not hold up those after it."""
    yield
    if "found" in request.fixturenames:
        request.getfixturevalue("found").ask("POST", "/resume")


@pytest.fixture(scope="module")
def trainer(model: Path, place: Path, found: RunningGateway) -> Trainer:
    return Trainer(model, place / "outputs")


def ok(found: RunningGateway, method: str, path: str, body: Any = None) -> Any:
    reply = found.ask(method, path, body)
    assert reply.status == 200, (path, reply.status, reply.body)
    return reply.json


def version(found: RunningGateway) -> str:
    named: str = ok(found, "GET", "/weight_info")["weight_version"]
    return named


def check_runs(found: RunningGateway, expected_hash: str) -> None:
    """Every worker runs these weights, and plays turns on them."""
    members = found.pool()["members"]
    assert members and {member["hash"] for member in members} == {expected_hash}
    [choice] = found.turn(PROMPT, max_tokens=2).json["choices"]
    assert {span["version"] for span in choice["weight_versions"]} == {version(found)}


def test_the_calls_of_prime_rl_in_order_and_again(found: RunningGateway, trainer: Trainer) -> None:
    ok(found, "GET", "/health")
    assert [entry["id"] for entry in ok(found, "GET", "/v1/models")["data"]] == [NAME]
    for is_sharded in (False, True, False):
        folder = trainer.write(is_sharded=is_sharded)
        wanted, before = _hash(trainer), version(found)
        assert ok(found, "POST", KEEP)["status"] == "paused"
        ok(found, "POST", KEEP)
        (folder / "NCCL_READY").touch()  # which prime-rl makes in any case
        reply = ok(found, "POST", UPDATE, {"weight_dir": folder.as_posix()})
        assert reply["workers"] == ["a"] and ok(found, "GET", "/is_paused") == {"is_paused": True}
        assert ok(found, "POST", UPDATE, {"weight_dir": folder.as_posix()})["weight_version"] == version(found)
        assert ok(found, "POST", "/resume")["status"] == "resumed"
        ok(found, "POST", "/resume")
        once = version(found)
        assert once != before and once.endswith(wanted[:8])
        ok(found, "POST", UPDATE, {"weight_dir": folder.as_posix()})  # late, and not paused
        assert version(found) == once and ok(found, "GET", "/is_paused") == {"is_paused": False}
        check_runs(found, wanted)


def _hash(trainer: Trainer) -> str:
    """Return the hash of the folder that the trainer wrote last."""
    folder = trainer.root / f"step_{trainer._step}"
    if (folder / "model.safetensors").exists():
        return folder_hash(folder)
    whole = trainer.root / "whole"
    whole.mkdir(exist_ok=True)
    write_folder(whole, trainer.arrays)
    return folder_hash(whole)


def test_a_folder_is_not_needed_after_the_answer(found: RunningGateway, model: Path, trainer: Trainer) -> None:
    folder = trainer.write()
    wanted = _hash(trainer)
    ok(found, "POST", UPDATE, {"weight_dir": str(folder)})
    shutil.rmtree(folder)
    check_runs(found, wanted)
    with gateways.worker(model, found.url, "late"):
        found.has_open(2)
        check_runs(found, wanted)
    eventually(lambda: found.members() == ["a"])


def test_the_calls_of_areal(found: RunningGateway, trainer: Trainer) -> None:
    folder = trainer.write()
    wanted = _hash(trainer)
    for _ in range(2):
        assert ok(found, "POST", "/areal_pause_generation", {})["success"] is True
    assert ok(found, "POST", AREAL_UPDATE, {"model_path": str(folder)})["success"] is True
    assert ok(found, "POST", "/areal_continue_generation", {})["success"] is True
    shutil.rmtree(folder)
    check_runs(found, wanted)


def test_a_trainer_may_go_back_to_an_earlier_folder(found: RunningGateway, trainer: Trainer) -> None:
    earlier = trainer.write()
    wanted = _hash(trainer)
    for folder in (earlier, trainer.write(), earlier):
        ok(found, "POST", UPDATE, {"weight_dir": str(folder)})
    check_runs(found, wanted)


def test_a_pause_holds_placements_and_running_turns_go_on(found: RunningGateway) -> None:
    running = gateways.Stream(found, "runs", PROMPT, max_tokens=200)
    running.read(4)
    ok(found, "POST", KEEP)
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(found.turn, PROMPT, "held", max_tokens=3)
        running.read()
        assert running.finish_reason == "length" and len(running.token_ids) == 200
        eventually(lambda: found.pool()["waiting_turns"] == 1)
        ok(found, "POST", "/pause?mode=wait")
        assert found.pool()["running_turns"] == 0
        metrics = found.ask("GET", "/metrics").body.decode()
        assert f'vllm:num_requests_waiting{{model_name="{NAME}"}} 1.0' in metrics
        assert f'vllm:num_requests_running{{model_name="{NAME}"}} 0.0' in metrics
        ok(found, "POST", "/resume")
        assert len(held.result().json["choices"][0]["token_ids"]) == 3


def test_the_metrics_show_the_memory_of_the_pool(found: RunningGateway) -> None:
    members = found.pool()["members"]
    [line] = [
        line
        for line in found.ask("GET", "/metrics").body.decode().splitlines()
        if line.startswith("vllm:cache_config_info{")
    ]
    labels = dict(part.split("=") for part in line[line.index("{") + 1 : line.index("}")].split(","))
    tokens = int(labels["num_gpu_blocks"].strip('"')) * int(labels["block_size"].strip('"'))
    assert tokens == sum(member["kv_tokens"] for member in members)


def _other_shapes(folder: Path, arrays: dict[str, Any]) -> None:
    write_folder(folder, arrays | {"model.norm.weight": np.ones(3, np.float32)})


def _other_names(folder: Path, arrays: dict[str, Any]) -> None:
    names = sorted(arrays)
    write_folder(folder, {f"{name}.renamed" if name == names[3] else name: arrays[name] for name in names})


def _infinite(folder: Path, arrays: dict[str, Any]) -> None:
    write_folder(folder, arrays | {"model.norm.weight": np.full_like(arrays["model.norm.weight"], np.inf)})


def _half_written(folder: Path, arrays: dict[str, Any]) -> None:
    write_folder(folder, arrays)
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def _no_weights(folder: Path, arrays: dict[str, Any]) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"pickle")


def _one_shard(folder: Path, arrays: dict[str, Any]) -> None:
    write_folder(folder, arrays, is_sharded=True)
    next(iter(folder.glob("model-00002*"))).unlink()


def _pipe(folder: Path, arrays: dict[str, Any]) -> None:
    os.mkfifo(folder / "model.safetensors")


def _link_to_outside(folder: Path, arrays: dict[str, Any]) -> None:
    outside = folder.parents[1] / "outside"
    outside.mkdir(exist_ok=True)
    write_folder(outside, arrays)
    (folder / "model.safetensors").symlink_to(outside / "model.safetensors")


BAD = {
    "other shapes": (_other_shapes, 400, "model.norm.weight"),
    "other names": (_other_names, 400, "lack"),
    "numbers that are not finite": (_infinite, 400, "finite"),
    "half written": (_half_written, 503, "not a whole safetensors file"),
    "no safetensors": (_no_weights, 503, "missing"),
    "a shard that is missing": (_one_shard, 503, "not in the folder"),
    "a pipe": (_pipe, 400, "not a regular file"),
    "a link to a file outside": (_link_to_outside, 400, "is not below"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_folder_that_cannot_be_used_changes_nothing(found: RunningGateway, trainer: Trainer, what: str) -> None:
    spoil, status, shown = BAD[what]
    folder = trainer.root / what.replace(" ", "_")
    folder.mkdir()
    spoil(folder, trainer.arrays)
    before = version(found)
    for path, body in ((UPDATE, {"weight_dir": str(folder)}), (AREAL_UPDATE, {"model_path": str(folder)})):
        reply = found.ask("POST", path, body)
        assert reply.status == status and shown in reply.error["message"], reply.body
    assert version(found) == before
    good = trainer.write()
    ok(found, "POST", UPDATE, {"weight_dir": str(good)})
    check_runs(found, _hash(trainer))


def test_only_folders_below_the_named_one_are_read(
    found: RunningGateway, model: Path, place: Path, trainer: Trainer
) -> None:
    link = trainer.root / "link"
    link.symlink_to(model)
    for folder in (model, link, trainer.root / ".." / ".." / NAME, place, "outputs/step_1", "relative", "\0"):
        reply = found.ask("POST", UPDATE, {"weight_dir": str(folder)})
        assert reply.status == 400, (folder, reply.body)
    missing, outside = (found.ask("POST", UPDATE, {"weight_dir": str(root / "no")}) for root in (trainer.root, place))
    assert (missing.status, outside.status) == (503, 400)


BODIES = (
    {}, {"weight_dir": None}, {"weight_dir": 7}, {"weight_dir": "/x", "update_info": None, "more": 1},
    {"update_info": {"names": ["a"], "shapes": [[1]]}}, {"update_info": [{"version": "v"}]},
)  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_bodies_of_other_backends_are_refused(found: RunningGateway, body: Any) -> None:
    assert found.ask("POST", UPDATE, body).status == 400


def test_the_routes_are_for_the_trainer_only(found: RunningGateway) -> None:
    calls = (
        ("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused"), ("GET", "/get_world_size"),
        ("GET", "/weight_info"), ("GET", "/server_info"), ("POST", "/reset_prefix_cache"), ("POST", "/finish_session"),
        ("POST", "/init_weight_transfer_engine"), ("POST", "/start_weight_update"), ("POST", UPDATE),
        ("POST", "/finish_weight_update"), ("POST", "/shutdown_weight_transfer_engine"),
        ("POST", "/areal_pause_generation"), ("POST", AREAL_UPDATE), ("POST", "/areal_continue_generation"),
    )  # fmt: skip
    for method, path in calls:
        for token in (AGENT, gateways.WORKER, gateways.OPERATOR):
            assert found.ask(method, path, {} if method == "POST" else None, token=token).status == 403, path
        assert found.device.ask(method, path).status == 401, path
    assert ok(found, "GET", "/is_paused") == {"is_paused": False}
    basic = base64.b64encode(f":{TRAINER}".encode()).decode()
    assert found.device.ask("GET", "/get_world_size", headers={"Authorization": f"Basic {basic}"}).json == {
        "world_size": 1
    }


def test_a_gateway_without_the_flag_has_none_of_the_routes(model: Path) -> None:
    with gateways.gateway(model) as plain:
        assert plain.ask("POST", "/pause").status == 404
        assert plain.ask("POST", UPDATE, {"weight_dir": "/x"}).status == 404


def test_finish_session_ends_a_session_and_no_trajectory(found: RunningGateway) -> None:
    assert found.turn(PROMPT, "free", max_tokens=2).json["rose"]["turn"] == 0
    ok(found, "POST", "/v1/trajectories", {"id": "begun", "group": "g"})
    for session in ("free", "free", "begun", "never-seen", "x" * 400):
        ok(found, "POST", f"/finish_session?session_id={session}")
    again = found.turn([*PROMPT, 9], "free", max_tokens=2)
    assert again.status == 400 and "`free` has finished" in again.json["error"]["message"]
    ok(found, "POST", "/v1/trajectories/begun/finish", {"reward": 1.0})


def test_updates_go_on_over_kill_nine_of_the_gateway(model: Path, tmp_path: Path) -> None:
    """The gateway is killed after an answered update and while paused: ledger and relay know the newest version."""
    with gateway(model, tmp_path) as probe:
        port = probe.device.port
    ledger = f"ledger={tmp_path / 'ledger.sqlite'}"
    with gateway(model, tmp_path, ledger, port=port) as running, gateways.worker(model, running.url, "a"):
        trainer = Trainer(model, tmp_path / "outputs")
        running.has_open(1)
        first = trainer.write()
        ok(running, "POST", UPDATE, {"weight_dir": str(first)})
        once, wanted = version(running), _hash(trainer)
        ok(running, "POST", KEEP)
        os.kill(running.device.process.pid, signal.SIGKILL)
        running.device.process.wait()
        with gateway(model, tmp_path, ledger, port=port) as again:
            again.has_open(1)
            ok(again, "POST", UPDATE, {"weight_dir": str(first)})  # its answer was lost
            assert version(again) == once, "the same weights are no new version"
            ok(again, "POST", "/resume")
            check_runs(again, wanted)
            second = trainer.write()
            ok(again, "POST", UPDATE, {"weight_dir": str(second)})
            assert version(again) == f"2-{_hash(trainer)[:8]}"
            check_runs(again, _hash(trainer))


def test_a_publisher_that_is_killed_is_started_again(found: RunningGateway, trainer: Trainer) -> None:
    for _ in range(2):
        ok(found, "POST", UPDATE, {"weight_dir": str(trainer.write())})
        [publisher] = devices.children_of(found.device.process.pid)
        os.kill(publisher, signal.SIGKILL)
        eventually(lambda publisher=publisher: not devices.is_alive(publisher))  # type: ignore[misc]
        folder = trainer.write()
        reply = found.ask("POST", UPDATE, {"weight_dir": str(folder)})
        assert reply.status in (200, 503)
        if reply.status == 503:
            assert "ended" in reply.error["message"]
            ok(found, "POST", UPDATE, {"weight_dir": str(folder)})
        check_runs(found, _hash(trainer))


REFUSED = {
    "no secret": (["--door-folder", "{root}", "--door-relay", "{root}/relay"], SECRET),
    "a folder without the routes": (["--set", "control.folder={root}"], "--door vllm"),
    "no relay": (["--door-folder", "{root}"], "--door-relay"),
    "no folder": (["--door-folder", "{root}/none", "--door-relay", "{root}/relay"], "is not a folder"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_start_that_cannot_work_is_refused(
    model: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rose.cli.main import main

    monkeypatch.delenv(SECRET)
    words, shown = REFUSED[what]
    flags = [] if "routes" in what else ["--door", "vllm"]
    assert main(["gateway", str(model), "--port", "0", *flags, *(word.format(root=tmp_path) for word in words)]) == 2
    assert shown in capsys.readouterr().err
