"""A run whose devices are vLLM: which processes it has, and how they are started."""

from __future__ import annotations

import stat
import sys
from functools import partial
from pathlib import Path

import pytest

from rose.errors import ConfigError
from rose.launch import cast, vllm_cast
from rose.launch.placement import Placement
from rose.launch.settings import RunSettings, load_run_settings

SERVING, ROLLOUT, GATEWAY = Path("models/serving"), Path("models/rollout"), "http://127.0.0.1:1"
PLACEMENT = Placement("cpu:0", "cpu:1", (1,))


@pytest.fixture(autouse=True)
def vllm_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_cast, "_missing", lambda where: ())


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


# An interpreter that does not have it


def interpreter(folder: Path, says: str, code: int = 0) -> str:
    """That answers every question so."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho {says}\nexit {code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    "says, what, hint",
    [
        pytest.param("vllm rose", "environment of its own", "make venv-vllm", id="neither"),
        pytest.param(
            "vllm", "environment of its own", "vllm_python=.venv-vllm/bin/python, or ROSE_VLLM_PYTHON", id="vllm"
        ),
        pytest.param("rose", "has vLLM but not ROSE", "pip install --no-deps -e .", id="rose"),
    ],
)
@pytest.mark.parametrize("name", ["serving", "worker"])
def test_what_is_missing_is_said_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str, what: str, hint: str
) -> None:
    monkeypatch.undo()
    python = interpreter(tmp_path, says)
    other = "worker" if name == "serving" else "serving"
    chosen = settings(f"vllm_python={python}", f"{other}.engine=embedded")
    with pytest.raises(ConfigError, match=what) as told:
        vllm_cast.check(chosen)
    assert told.value.what.startswith(f"{name}.engine is vllm") and python in told.value.what
    assert told.value.hint is not None and hint in told.value.hint
    start = partial(cast.borrowed, SERVING) if name == "serving" else cast.dedicated
    with pytest.raises(ConfigError, match=what):
        start(ROLLOUT, chosen, PLACEMENT, GATEWAY)


def test_what_is_no_interpreter_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for python in (str(tmp_path / "nowhere"), interpreter(tmp_path, "", code=1)):
        with pytest.raises(ConfigError, match="no interpreter that works") as told:
            vllm_cast.check(settings(f"vllm_python={python}"))
        assert told.value.hint == vllm_cast.INSTALL


def test_this_interpreter_is_asked_what_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert "rose" not in vllm_cast._missing(sys.executable)


def test_an_interpreter_that_has_both_is_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    vllm_cast.check(settings(f"vllm_python={interpreter(tmp_path, '')}"))
    vllm_cast.check(load_run_settings(None, [f"vllm_python={tmp_path / 'nowhere'}"]))
