"""A device that serves and lends, started and used as its owner and its guests do."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from tests.integration import devices
from tests.integration.devices import HOST, eventually
from tests.integration.lent import OWNER_TOKEN, ROLLOUT_TOKEN, LentDevice, lent, tokens_of

from rose.load.generators import generated
from rose.load.load_report import LatencyBudget, measure
from rose.load.load_run import LoadPlan, run_load
from rose.models.presets import write_preset
from rose.observe.journal import read

PROMPT = [1, 2, 3, 4, 5]
WIDE = ("--ttft-ms", "4000", "--tpot-ms", "2000")


@pytest.fixture(scope="module")
def rollout_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("frozenlake-1m", tmp_path_factory.mktemp("models") / "frozenlake-1m", seed=0)


@pytest.fixture(scope="module")
def device(model_folder: Path, rollout_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LentDevice]:
    """One for all tests that leave it as they found it. Its budgets are wide: a busy machine is not the point."""
    journal = tmp_path_factory.mktemp("journal") / "lending.jsonl"
    with lent(
        model_folder, rollout_model, "--ttft-ms", "4000", "--tpot-ms", "2000", "--journal", str(journal)
    ) as found:
        found.journal = journal  # type: ignore[attr-defined]
        yield found


def serve(device: LentDevice, prompt: str = "Hello", max_tokens: int = 16) -> str:
    answer = device.serving.complete(prompt=prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)
    assert answer.status == 200, answer.body
    text: str = answer.json["choices"][0]["text"]
    return text


def test_rollouts_have_a_door_and_a_token_of_their_own(device: LentDevice) -> None:
    assert device.rollout(PROMPT, max_tokens=8).json["choices"][0]["finish_reason"] == "length"
    for wrong in ("", "wrong", OWNER_TOKEN):
        refused = device.rollout(PROMPT, token=wrong)
        assert refused.status == 401 and refused.headers["WWW-Authenticate"] == "Bearer" and refused.error
    assert device.serving.complete(model="frozenlake-1m", prompt="x").status == 404, "serving never takes rollouts"
    assert device.lending(token=ROLLOUT_TOKEN).status == 401, "a guest is not the owner"


def test_neither_side_sees_the_other(device: LentDevice) -> None:
    device.rollout(PROMPT * 20, max_tokens=2)
    serve(device, "the same prompt " * 4)
    assert "frozenlake" not in device.metrics() and "qwen3" not in device.metrics(of="rollouts")
    assert "rose_rollout_tokens_total" in device.metrics() and "rose_slo_breaches_total" in device.metrics()
    assert device.rollouts.ask("GET", "/rose/lending").status == 401
    models = device.rollouts.ask("GET", "/v1/models", headers={"Authorization": f"Bearer {ROLLOUT_TOKEN}"})
    assert [model["id"] for model in models.json["data"]] == ["frozenlake-1m"]


def test_a_drain_ends_rollouts_with_what_they_have_and_they_go_on_elsewhere(device: LentDevice) -> None:
    whole = tokens_of(device.rollout(PROMPT, max_tokens=900, seed=3, temperature=1.0))
    before = device.status()["lent_tokens"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        cut = pool.submit(device.rollout, PROMPT, max_tokens=900, seed=3, temperature=1.0)
        eventually(lambda: device.status()["lent_tokens"] > before + 50)
        assert device.lending("drain", {}).json["running"] == 0
        answer = cut.result()
    assert answer.json["choices"][0]["finish_reason"] == "abort"
    part = tokens_of(answer)
    assert part == whole[: len(part)] and len(part) < 900
    refused = device.rollout(PROMPT)
    assert refused.status == 503 and "Retry-After" in refused.headers and "owner" in refused.error["message"]
    assert device.lending("resume", {}).json["state"] == "lending"
    assert device.rollout(PROMPT, max_tokens=4).status == 200


def test_rollouts_that_find_no_memory_are_told_to_come_later(device: LentDevice) -> None:
    device.lending("limits", {"memory_share": 0.0})
    refused = device.rollout(PROMPT)
    assert refused.status == 503 and "Retry-After" in refused.headers and "KV blocks" in refused.error["message"]
    device.lending("limits", {"memory_share": 1.0})
    eventually(lambda: device.rollout(PROMPT, max_tokens=4).status == 200)


def test_the_owners_command_line(device: LentDevice) -> None:
    def rose(*words: str) -> subprocess.CompletedProcess[str]:
        tokens = {"ROSE_OWNER_TOKEN": OWNER_TOKEN, "ROSE_ROLLOUT_TOKEN": ROLLOUT_TOKEN}
        variables = devices.environment() | tokens
        command = [sys.executable, "-m", "rose", "lend", *words, "--url", device.serving.url]
        return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=60)

    assert rose("pause").stdout.startswith("paused")
    assert rose("limits", "--memory", "0.5", "--compute", "0.5").returncode == 0
    status = json.loads(rose("status", "--json").stdout)
    assert (status["state"], status["memory_share"], status["compute_share"]) == ("paused", 0.5, 0.5)
    assert "100%" in rose("limits", "--memory", "1", "--compute", "1").stdout
    assert rose("resume").stdout.startswith("lending")
    assert "absent" in rose("drain", "--remove").stdout
    rose("resume")
    eventually(lambda: device.status()["state"] == "lending")
    assert "dry run" in rose("dry-run").stdout and rose("resume").stdout.startswith("lending")
    wrong = rose("limits")
    assert wrong.returncode != 0 and "--memory" in wrong.stderr
    assert rose("token").stdout.strip() == ROLLOUT_TOKEN


@pytest.mark.parametrize(
    "action, body, status", [("explode", {}, 404), ("limits", {"memory_share": 2}, 400), ("limits", {"x": 1}, 400)]
)
def test_a_wrong_word_of_the_owner_is_refused(device: LentDevice, action: str, body: Any, status: int) -> None:
    refused = device.lending(action, body)
    assert refused.status == status and refused.error


def test_bad_and_hasty_rollout_clients_are_not_servings_trouble(device: LentDevice) -> None:
    alone = serve(device, max_tokens=32)
    assert device.rollout([10**6]).status == 400
    assert device.rollout([-1]).status == 400
    assert device.rollout(PROMPT, max_tokens=10**6).status == 400
    body = json.dumps({"token_ids": PROMPT, "stream": True, "sampling_params": {"max_tokens": 900, "ignore_eos": True}})
    head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ROLLOUT_TOKEN}\r\n"
    raw = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    for _ in range(8):  # asked, and gone; or asked, and never read
        with socket.create_connection((HOST, device.rollouts.port)) as hasty:
            hasty.sendall(raw)
    silent = [socket.create_connection((HOST, device.rollouts.port)) for _ in range(8)]
    for each in silent:
        each.sendall(raw)
    assert serve(device, max_tokens=32) == alone
    for each in silent:
        each.close()
    eventually(lambda: device.status()["running"] + device.status()["waiting"] == 0)


def test_a_flood_of_rollouts_is_bounded_and_serving_answers(device: LentDevice) -> None:
    async def flood() -> list[int]:
        headers = {"Authorization": f"Bearer {ROLLOUT_TOKEN}"}
        body = {"token_ids": PROMPT * 20, "sampling_params": {"max_tokens": 60, "ignore_eos": True}}
        url = f"{device.rollouts.url}/inference/v1/generate"
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

            async def one() -> int:
                async with session.post(url, json=body) as reply:
                    await reply.read()
                    return reply.status

            turns = [asyncio.create_task(one()) for _ in range(300)]
            await asyncio.sleep(0.2)
            answered = [await asyncio.to_thread(serve, device, "flood", 8) for _ in range(5)]
            assert len(set(answered)) == 1
            return await asyncio.gather(*turns)

    statuses = asyncio.run(flood())
    assert set(statuses) <= {200, 429, 503} and 200 in statuses


def test_a_stopped_step_is_a_counted_breach_and_the_journal_says_why(device: LentDevice) -> None:
    """The whole engine is stopped for a while in the middle of lending, as a hypervisor might."""
    engine, before = device.process("rose.device.executor"), device.status()["breaches"]["step"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        turns = [pool.submit(device.rollout, PROMPT * 10, max_tokens=400) for _ in range(8)]
        while device.status()["breaches"]["step"] <= before:
            os.kill(engine, signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(engine, signal.SIGCONT)
            assert serve(device, max_tokens=4)
            if all(turn.done() for turn in turns):
                turns = [pool.submit(device.rollout, PROMPT * 10, max_tokens=400) for _ in range(8)]
        assert all(turn.result().status == 200 for turn in turns)
    entries = [entry.fact for entry in read(device.journal)]  # type: ignore[attr-defined]
    assert any(type(fact).__name__ == "Breach" and "upper estimate" in fact.cause for fact in entries)
    assert any(type(fact).__name__ == "LendingAsked" for fact in entries)


def test_traffic_and_rollouts_together(device: LentDevice) -> None:
    """A short trace at the serving door, rollouts at the other all the while: everybody is answered."""
    trace = generated("gamma:rate=3,cv=3", seed=1, duration_s=5)
    plan = LoadPlan(device.serving.url, budget=LatencyBudget(4.0, 2.0), seed=1)

    async def both() -> tuple[Any, int]:
        load = asyncio.create_task(run_load(trace, plan))
        turns = 0
        while not load.done():
            answers = await asyncio.gather(
                *(asyncio.to_thread(device.rollout, PROMPT, max_tokens=16) for _ in range(4))
            )
            turns += sum(answer.status == 200 for answer in answers)
        return load.result(), turns

    finished, turns = asyncio.run(both())
    measures = measure(finished.records, plan.budget)
    assert len(measures.ttft_s) == len(finished.records) == len(trace.arrival_s) and np.isfinite(measures.ttft_s).all()
    assert turns > 0 and device.status()["lent_tokens"] > 0


def test_each_process_may_die_and_the_device_heals(model_folder: Path, rollout_model: Path) -> None:
    with lent(model_folder, rollout_model, *WIDE) as device:
        alone = serve(device)
        os.kill(device.process("rose.device.rollout_front"), signal.SIGKILL)
        assert serve(device) == alone, "serving does not notice"
        eventually(lambda: device.rollout(PROMPT, max_tokens=4).status == 200)
        os.kill(device.process("rose.device.executor"), signal.SIGKILL)
        eventually(lambda: device.serving.complete(prompt="x", max_tokens=1).status == 200)
        assert serve(device) == alone
        eventually(lambda: device.rollout(PROMPT, max_tokens=4).status == 200)
        children = devices.children_of(device.serving.process.pid)
        assert device.serving.stop() == 0
        assert not any(devices.is_alive(pid) for pid in children), "nothing is left behind"


def test_the_owners_word_outlives_the_engine_and_one_that_dies_twice_serves_alone(
    model_folder: Path, rollout_model: Path
) -> None:
    with lent(model_folder, rollout_model, *WIDE) as device:
        alone = serve(device)

        def kill() -> None:
            os.kill(device.process("rose.device.executor"), signal.SIGKILL)
            eventually(lambda: device.serving.complete(prompt="x", max_tokens=1).status != 200)
            eventually(lambda: device.serving.complete(prompt="x", max_tokens=1).status == 200)
            assert serve(device) == alone

        device.lending("limits", {"compute_share": 0.5})
        device.lending("drain", {})
        kill()
        status = device.status()
        assert (status["state"], status["compute_share"], status["lent_steps"]) == ("drained", 0.5, 0)
        assert device.lending("resume", {}).json["state"] == "lending"
        kill()
        kill()
        status = device.status()
        assert (status["state"], status["compute_share"]) == ("drained", 0.5) and "held back" in status["why"]
        eventually(lambda: "held back" in device.rollout(PROMPT).error["message"])
        assert device.lending("resume", {}).json["state"] == "lending"
        eventually(lambda: device.rollout(PROMPT, max_tokens=4).status == 200)


def test_serving_comes_back_without_a_rollout_model_that_can_no_longer_be_loaded(
    model_folder: Path, rollout_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(rollout_model, tmp_path / "rollouts"))
    with lent(model_folder, folder, *WIDE) as device:
        alone = serve(device)
        assert device.rollout(PROMPT, max_tokens=4).status == 200
        (folder / "model.safetensors").write_bytes(b"spoilt")
        os.kill(device.process("rose.device.executor"), signal.SIGKILL)
        eventually(lambda: device.serving.complete(prompt="x", max_tokens=1).status != 200)
        eventually(lambda: device.serving.complete(prompt="x", max_tokens=1).status == 200)
        assert serve(device) == alone
        status = device.status()
        assert (status["state"], status["model"]) == ("failed", "absent") and "serves without it" in status["why"]
        eventually(lambda: "serves without it" in device.rollout(PROMPT).error["message"])
        assert device.lending("resume", {}).status >= 400
        assert device.serving.stop() == 0


def test_without_a_serving_model_it_is_a_dedicated_worker(rollout_model: Path) -> None:
    arguments = ["-m", "rose", "serve", "--lend", str(rollout_model), "--rollout-port", "0", "--device", devices.DEVICE]
    worker = devices.start(arguments, rollout_model, variables={"ROSE_ROLLOUT_TOKEN": ROLLOUT_TOKEN})
    try:
        found = LentDevice(worker, worker.port)
        assert found.rollout(PROMPT, max_tokens=8).status == 200
        assert found.rollout(PROMPT, token="wrong").status == 401
    finally:
        devices.end(worker)


@pytest.mark.parametrize(
    "arguments, words",
    [([], "nothing to serve"), (["--lend-mode", "always"], "lend.mode"), (["--tpot-ms", "-1"], "lend.tpot_ms")],
)
def test_wrong_commands_are_refused_in_a_sentence(arguments: list[str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rose", "serve", *arguments],
        capture_output=True, text=True, env=devices.environment(), timeout=60,
    )  # fmt: skip
    assert done.returncode != 0 and words in done.stderr and "Traceback" not in done.stderr
