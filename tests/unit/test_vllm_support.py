"""What is said to vLLM and what is refused before it is said: versions, schedulers, command lines, requests."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rose.engines.vllm as package
import rose.launch.vllm
from rose.cli import lend
from rose.engines.base import Partial, Request, Sampling
from rose.engines.vllm import starting, support, talking
from rose.engines.vllm.process import EngineProcess
from rose.engines.vllm.starting import RolloutEngine
from rose.errors import ConfigError, ContextTooLong, RequestRefused, Unavailable
from rose.rollout.vllm_agent import VllmLending, VllmSeat


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "0.320.0", "1.0"])
def test_another_vllm_is_refused_by_name(version: str) -> None:
    with pytest.raises(ConfigError, match=f"vLLM {version} is installed.*0.32.x"):
        support.check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.7"])
def test_the_supported_ones_are_taken(version: str) -> None:
    assert support.check_version(version) is None


@pytest.mark.parametrize("name", list(package._WHERE))
def test_another_vllm_is_refused_before_more_of_it_is_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("vllm")
    other.__version__ = "0.9.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", other)
    with pytest.raises(ConfigError, match=r"vLLM 0\.9\.1 is installed"):
        getattr(package, name)


@pytest.mark.parametrize(
    "name, is_async, wants_async, right",
    [
        ("ServingScheduler", False, True, "AsyncServingScheduler"),
        ("AsyncServingScheduler", True, False, "vllm.ServingScheduler"),
        ("AsyncRolloutScheduler", True, False, "vllm.RolloutScheduler"),
    ],
)
def test_the_wrong_scheduler_names_the_right_one(name: str, is_async: bool, wants_async: bool, right: str) -> None:
    with pytest.raises(ConfigError, match=right):
        support.check_scheduling(name, is_async=is_async, wants_async=wants_async)
    support.check_scheduling(name, is_async=is_async, wants_async=is_async)


def test_a_grant_needs_chunked_prefill() -> None:
    with pytest.raises(ConfigError, match="chunked prefill"):
        support.check_chunked(False)


def test_only_schedulers_are_found_by_name() -> None:
    with pytest.raises(AttributeError, match="Nonsense"):
        package.Nonsense  # noqa: B018


def test_nothing_but_the_schedulers_needs_vllm() -> None:
    for name in (
        "board",
        "desk",
        "finding",
        "gate",
        "mapped",
        "patching",
        "process",
        "publishing",
        "starting",
        "worker",
    ):
        assert importlib.import_module(f"rose.engines.vllm.{name}")


# Starting


def test_a_rollout_engine_on_a_cpu_shares_its_process_with_its_worker(tmp_path: Path) -> None:
    engine = RolloutEngine(tmp_path, "cpu:1-2", step_tokens=64, max_sequences=8)
    words = " ".join(starting.command(engine, tmp_path))
    flags = ("rose.engines.vllm.RolloutScheduler", "UniProcExecutor", f"--uds {tmp_path}", "--no-async-scheduling")
    for wanted in (*flags, "--logprobs-mode processed_logprobs", "--max-num-batched-tokens 64"):
        assert wanted in words
    environment = starting.environment(engine, tmp_path)
    assert (environment["OMP_NUM_THREADS"], environment["ROSE_ROLLOUT_DESK"]) == ("2", str(tmp_path))
    assert "CUDA_VISIBLE_DEVICES" not in words and "--gpu-memory-utilization" not in words


def test_on_a_gpu_vllm_chooses_for_itself(tmp_path: Path) -> None:
    engine = RolloutEngine(tmp_path, "cuda:3")
    words = " ".join(starting.command(engine, tmp_path))
    assert "UniProcExecutor" not in words and "float32" not in words
    assert "--gpu-memory-utilization 0.01" in words, "most of it is serving's"
    assert starting.environment(engine, tmp_path)["CUDA_VISIBLE_DEVICES"] == "3"


def test_what_cannot_be_started_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a device"):
        starting.check(RolloutEngine(tmp_path, "gpu0"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        starting.check(RolloutEngine(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="core 4000"):
        starting.check(RolloutEngine(tmp_path, "cpu:4000"))


def test_a_rollout_engine_is_the_first_that_the_kernel_ends(tmp_path: Path) -> None:
    prepare = starting.in_child(RolloutEngine(tmp_path, f"cpu:{min(starting.USABLE)}"))
    command = ["cat", "/proc/self/oom_score_adj"]
    told = subprocess.run(command, preexec_fn=prepare, capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "1000"


def test_further_flags_of_vllm_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[VllmLending]()

    async def note(lending: VllmLending, doors: Any) -> int:
        asked.append(lending)
        return 0

    monkeypatch.setattr(rose.launch.vllm, "lend", note)
    parser = argparse.ArgumentParser()
    lend.configure(parser)
    words = ["vllm", "--rollout-model", str(tmp_path), "--vllm-flag=--dtype=bfloat16", "--vllm-flag=--seed=3"]
    assert lend.run(parser.parse_args(words)) == 0
    assert starting.command(asked[0].engine, Path("desk"))[-2:] == ["--dtype=bfloat16", "--seed=3"]


def test_desks_of_killed_agents_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_BOARDS", str(tmp_path / "boards"))
    (tmp_path / "config.json").write_text("{}")
    engine = RolloutEngine(tmp_path, f"cpu:{min(starting.USABLE)}")
    first = EngineProcess(engine)
    left = first.folder.with_name("-".join([*first.folder.name.split("-")[:2], "999999999", "abc"]))
    left.mkdir()
    second = EngineProcess(engine)
    assert sorted((tmp_path / "boards").iterdir()) == sorted([first.folder, second.folder])


# Talking


def test_a_turn_that_goes_on_asks_only_for_the_rest() -> None:
    sampling = Sampling(max_tokens=10, min_tokens=4, seed=3, top_k=0, stop_token_ids=(5,))
    request = Request("a", (1, 2), sampling, priority=2, partial=Partial((7, 8, 9), (0.0,) * 3))
    body = talking.body_of(request, salt="x")
    params = body["sampling_params"]
    assert body["token_ids"] == [1, 2, 7, 8, 9]
    assert (params["max_tokens"], params["min_tokens"], params["stop_token_ids"]) == (7, 1, [5])
    assert params["seed"] != talking.body_of(Request("a", (1, 2), sampling), salt="")["sampling_params"]["seed"]
    assert (body["cache_salt"], body["priority"]) == ("x", 2)
    assert "cache_salt" not in talking.body_of(request, salt="")


class FakeReply:
    """As much of aiohttp's response as is read."""

    def __init__(self, *messages: Any, status: int = 200) -> None:
        self.lines = [b"data: " + json.dumps(message).encode() + b"\n" for message in messages]
        self.status = status

    @property
    def content(self) -> Any:
        async def lines() -> Any:
            for line in [*self.lines, b"\n", b"data: [DONE]\n"]:
                yield line

        return lines()

    async def text(self) -> str:
        return self.lines[0].decode().removeprefix("data: ")


def read(*messages: Any) -> list[talking.Chunk]:
    async def story() -> list[talking.Chunk]:
        return [chunk async for chunk in talking.chunks(FakeReply(*messages))]  # type: ignore[arg-type]

    return asyncio.run(story())


def test_a_stream_becomes_chunks() -> None:
    content = [{"token_id": 7, "logprob": -0.5, "top_logprobs": [{"token_id": 7, "logprob": -0.5}]}]
    first = {"choices": [{"token_ids": [7], "logprobs": {"content": content}, "finish_reason": None}]}
    last = {"choices": [{"token_ids": [], "logprobs": None, "finish_reason": "abort"}]}
    assert read(first, last) == [
        talking.Chunk((7,), (-0.5,), (((7, -0.5),),), None),
        talking.Chunk((), (), (), "abort"),
    ]


@pytest.mark.parametrize(
    "message, words",
    [
        ({"error": {"message": "boom"}}, "boom"),
        ({"choices": [{"token_ids": [], "finish_reason": "error"}]}, "error"),
    ],
)
def test_a_stream_that_fails_is_unavailable(message: Any, words: str) -> None:
    with pytest.raises(Unavailable, match=words):
        read(message)


@pytest.mark.parametrize(
    "status, body, kind",
    [
        (400, {"error": {"message": "maximum context length is 5"}}, ContextTooLong),
        (400, {"error": {"message": "no"}}, RequestRefused),
        (422, {"detail": "what"}, RequestRefused),
        (500, {"error": {"message": "boom"}}, Unavailable),
    ],
)
def test_refusals_become_errors_of_ours(status: int, body: Any, kind: type[Exception]) -> None:
    error = asyncio.run(talking.refusal(FakeReply(body, status=status)))  # type: ignore[arg-type]
    assert type(error) is kind


# The agent


def test_two_agents_on_one_device_are_one_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_BOARDS", str(tmp_path))

    async def story() -> None:
        lending = VllmLending(RolloutEngine(tmp_path), "http://127.0.0.1:8000")
        seat = VllmSeat(lending)
        with pytest.raises(ConfigError, match="another agent"):
            VllmSeat(lending)
        await seat.close()
        await VllmSeat(lending).close()

    asyncio.run(story())


def seat_of(folder: Path, device: str, serving_url: str = "") -> VllmSeat:
    return VllmSeat(VllmLending(RolloutEngine(folder, device), serving_url))


@pytest.mark.parametrize(
    "first, second, what",
    [
        pytest.param(("cpu:0-1",), ("cpu:1",), "cpu:1", id="one of its cores"),
        pytest.param(("cpu:1",), ("cpu:0-1",), "cpu:1", id="a core of another's"),
        pytest.param(("cuda:0", "http://a:8000"), ("cuda:0",), "cuda:0", id="a GPU beside a server"),
        pytest.param(("cpu:0", "http://a"), ("cpu:1", "http://a:80"), "http://a:80", id="the usual port"),
        pytest.param(("cpu:0", "https://a"), ("cpu:1", "https://a:443"), "https://a:443", id="that of https"),
    ],
)
def test_what_one_agent_lends_no_other_does(
    first: tuple[str, ...], second: tuple[str, ...], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_BOARDS", str(tmp_path))

    async def story() -> None:
        seat = seat_of(tmp_path, *first)
        with pytest.raises(ConfigError, match=f"another agent lends {what} already"):
            seat_of(tmp_path, *second)
        others = [seat_of(tmp_path, device) for device in ("cpu:2", "cuda:1")]
        for one in (seat, *others):
            await one.close()
        await seat_of(tmp_path, *second).close()

    asyncio.run(story())


def test_who_was_refused_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_BOARDS", str(tmp_path))

    async def story() -> None:
        seats = [seat_of(tmp_path, "cpu:1")]
        with pytest.raises(ConfigError):
            seat_of(tmp_path, "cpu:0-1")
        seats.append(seat_of(tmp_path, "cpu:0"))
        for seat in seats:
            await seat.close()

    asyncio.run(story())


def test_a_server_without_the_flag_is_not_lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_BOARDS", str(tmp_path))

    async def story() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        seat = VllmSeat(VllmLending(RolloutEngine(tmp_path), url))
        with pytest.raises(ConfigError, match="shows no board") as refusal:
            await seat.start()
        assert "--scheduler-cls" in str(refusal.value)
        assert seat.trouble is not None
        await seat.close()
        server.close()

    asyncio.run(story())
