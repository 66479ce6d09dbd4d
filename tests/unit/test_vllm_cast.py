"""A run whose devices are vLLM: which processes it has, and how they are started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rose.errors import ConfigError
from rose.launch import cast, vllm_cast
from rose.launch.placement import Placement
from rose.launch.settings import RunSettings, load_run_settings

SERVING, ROLLOUT, GATEWAY = Path("models/serving"), Path("models/rollout"), "http://127.0.0.1:1"
PLACEMENT = Placement("cpu:0", "cpu:1", (1,))


def settings(*overrides: str) -> RunSettings:
    return load_run_settings(
        None, ["serving.engine=vllm", "worker.engine=vllm", "vllm_python=other/python", *overrides]
    )


def words_after(arguments: tuple[str, ...], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_serving_is_a_plain_vllm_with_our_scheduler_on_its_own_cores() -> None:
    command = cast.borrowed(SERVING, ROLLOUT, settings("serving.kv_memory_mb=64"), PLACEMENT, GATEWAY)
    assert (command.role, command.niceness, command.cores, command.is_kept) == ("borrowed", 0, (0,), True)
    assert command.arguments[0] == "-c" and "other/python" in command.arguments
    assert words_after(command.arguments, "--scheduler-cls") == "rose.engines.vllm.ServingScheduler"
    assert words_after(command.arguments, "--kv-cache-memory-bytes") == str(32 << 20)
    assert words_after(command.arguments, "--model") == str(SERVING)


def test_its_lender_has_the_terms_and_the_name_of_the_borrowed_device() -> None:
    terms = ("serving.lend.mode=idle", "serving.lend.ttft_ms=250", "serving.lend.memory_share=0.5")
    command = cast.lender(ROLLOUT, settings(*terms), PLACEMENT, GATEWAY, "http://127.0.0.1:2")
    assert command is not None
    assert (command.role, command.cores, cast.owner_role(settings())) == ("lender", (), "lender")
    for flag, value in {
        "--serving-url": "http://127.0.0.1:2",
        "--gateway": GATEWAY,
        "--worker-name": "borrowed",
        "--device": "cpu:0",
        "--mode": "idle",
        "--ttft-ms": "250",
        "--kv-memory-mb": "64",
        "--vllm-python": "other/python",
    }.items():
        assert words_after(command.arguments, flag) == value


def test_a_dedicated_worker_is_a_lender_without_a_server() -> None:
    command = cast.dedicated(ROLLOUT, settings("worker.max_sequences=3"), PLACEMENT, GATEWAY)
    assert (command.role, command.cores) == ("dedicated", (1,))
    assert "--serving-url" not in command.arguments
    assert words_after(command.arguments, "--max-sequences") == "3"
    assert words_after(command.arguments, "--worker-name") == "dedicated"


@pytest.mark.parametrize("overrides", [("serving.is_borrowed=false",), ("serving.engine=embedded",)])
def test_there_is_no_lender_where_nothing_is_borrowed_or_the_device_lends_itself(overrides: tuple[str, ...]) -> None:
    assert cast.lender(ROLLOUT, settings(*overrides), PLACEMENT, GATEWAY, "http://127.0.0.1:2") is None


def test_a_mode_that_vllm_cannot_lend_in_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be lent in the mode paper"):
        settings("serving.lend.mode=paper")


def test_the_interpreter_is_the_one_named_or_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load_run_settings(None, [])
    monkeypatch.delenv(vllm_cast.PYTHON_VARIABLE, raising=False)
    assert vllm_cast.python(plain) == sys.executable
    monkeypatch.setenv(vllm_cast.PYTHON_VARIABLE, "elsewhere/python")
    assert vllm_cast.python(plain) == "elsewhere/python"
    assert vllm_cast.python(settings()) == "other/python"
