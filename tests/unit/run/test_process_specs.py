"""The processes of a run: how each is started, and which secrets it gets."""

from __future__ import annotations

import os
import re
import stat
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest

from rose.errors import ConfigError
from rose.gateway.auth import VARIABLES, registered_gateway, token_for
from rose.openai.access import OWNER_VARIABLE, ROLLOUT_VARIABLE
from rose.private_files import is_secret, without_secrets
from rose.run import process_specs
from rose.run.cpu_affinity import Placement
from rose.run.process_specs import make_tokens, secrets_of_run
from rose.run.processes import Command
from rose.run.run_settings import RunSettings, load_run_settings
from rose.run.trainer_rank import RankPlan
from rose.weights.keys import SECRET, SECRET_FILE

PLACEMENT = Placement("cpu:0", "cpu:1", (1,))
MODEL, URL = Path("models/one"), "http://127.0.0.1:1"
FOR_ALL_ROLES = {*VARIABLES.values(), OWNER_VARIABLE, ROLLOUT_VARIABLE, SECRET, SECRET_FILE}
OF_WORKER = {"ROSE_WORKER_TOKEN", SECRET, SECRET_FILE}


def commands(*overrides: str) -> dict[str, Command]:
    settings = load_run_settings(None, overrides)
    found = [
        process_specs.gateway(MODEL, settings, PLACEMENT, Path("ledger")),
        process_specs.borrowed(MODEL, MODEL, settings, PLACEMENT, URL),
        process_specs.lender(MODEL, settings, PLACEMENT, URL, URL),
        process_specs.dedicated(MODEL, settings, PLACEMENT, URL),
        process_specs.traffic(settings, PLACEMENT, URL),
    ]
    return {command.role: command for command in found if command is not None}


@pytest.mark.parametrize(
    "overrides, wanted",
    [
        (
            (),
            {
                "gateway": set(VARIABLES.values()),
                "borrowed": {*OF_WORKER, OWNER_VARIABLE},
                "dedicated": OF_WORKER,
                "traffic": set(),
            },
        ),
        (
            ("serving.engine=vllm", "worker.engine=vllm"),
            {
                "gateway": set(VARIABLES.values()),
                "borrowed": set(),
                "lender": {*OF_WORKER, OWNER_VARIABLE},
                "dedicated": OF_WORKER,
                "traffic": set(),
            },
        ),
    ],
)
def test_each_process_gets_what_its_role_needs(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], wanted: dict[str, set[str]]
) -> None:
    monkeypatch.setattr(process_specs, "_missing", lambda where: ())
    assert {role: set(command.secrets) for role, command in commands(*overrides).items()} == wanted


def test_a_device_that_is_not_borrowed_gets_no_secret() -> None:
    assert commands("serving.is_borrowed=false")["borrowed"].secrets == frozenset()


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_no_command_line_holds_a_secret(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """Not even one that the operator has set, and that a setting could repeat."""
    monkeypatch.setattr(process_specs, "_missing", lambda where: ())
    for variable in FOR_ALL_ROLES:
        monkeypatch.setenv(variable, f"the-value-of-{variable}")
    secrets = secrets_of_run(make_tokens(), {SECRET: "of-this-run-alone"})
    values = {*secrets.values(), *(os.environ[variable] for variable in FOR_ALL_ROLES)}
    for command in commands(f"serving.engine={engine}", f"worker.engine={engine}").values():
        text = " ".join(command.arguments) + (command.input or b"").decode()
        assert not [value for value in values if value in text]


def test_the_relay_of_a_run_gets_the_secret_in_its_environment() -> None:
    command = process_specs.relay("runs/it/weights", "127.0.0.1")
    assert command.secrets == {SECRET} and "runs/it/weights" in command.arguments
    shown = "relay of runs/it/weights at http://127.0.0.1:7070; Ctrl-C ends it"
    found = re.search(command.patterns["url"], shown)
    assert found is not None and found[1] == "http://127.0.0.1:7070"


def test_the_operators_token_is_of_the_environment_or_found_by_rose_pool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLES["operator"], raising=False)
    tokens = make_tokens()
    with registered_gateway(process_specs.operators_entry(GATEWAY, tokens)):
        assert token_for("operator", GATEWAY) == tokens.operator and token_for("trainer", GATEWAY) is None
    assert token_for("operator", GATEWAY) is None
    monkeypatch.setenv(VARIABLES["operator"], "an-operators-token")
    assert make_tokens().operator == make_tokens().variables[VARIABLES["operator"]] == "an-operators-token"


def test_the_relay_secret_is_of_the_run_or_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_FILE, "/etc/secret")
    assert SECRET_FILE not in secrets_of_run(make_tokens(), {SECRET: "of-this-run", SECRET_FILE: ""})
    assert secrets_of_run(make_tokens(), {})[SECRET_FILE] == "/etc/secret"


def test_every_secret_variable_of_rose_is_known_as_one() -> None:
    assert all(map(is_secret, {*FOR_ALL_ROLES, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}))
    plain = {"ROSE_BOARDS": "x", "ROSE_VLLM_PYTHON": "x", "ROSE_WEIGHTS_FOLDER": "x", "HF_TOKEN": "x", "PATH": "x"}
    assert without_secrets(plain | dict.fromkeys(FOR_ALL_ROLES, "x")) == plain


SERVING, ROLLOUT, GATEWAY = Path("models/serving"), Path("models/rollout"), "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def vllm_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_specs, "_missing", lambda where: ())


def settings(*overrides: str) -> RunSettings:
    return load_run_settings(
        None, ["serving.engine=vllm", "worker.engine=vllm", "vllm_python=other/python", *overrides]
    )


def value_after(arguments: tuple[str, ...], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_serving_is_a_vllm_with_our_scheduler_on_its_cores() -> None:
    command = process_specs.borrowed(SERVING, ROLLOUT, settings("serving.kv_memory_mb=64"), PLACEMENT, GATEWAY)
    assert (command.role, command.niceness, command.cores, command.is_kept) == ("borrowed", 0, (0,), True)
    assert command.arguments[0] == "-c" and "other/python" in command.arguments
    assert value_after(command.arguments, "--scheduler-cls") == "rose.vllm.ServingScheduler"
    assert value_after(command.arguments, "--kv-cache-memory-bytes") == str(32 << 20)
    assert value_after(command.arguments, "--model") == str(SERVING)


def test_the_lender_has_terms_and_name_of_the_borrowed_device() -> None:
    terms = ("serving.lend.mode=idle", "serving.lend.ttft_ms=250", "serving.lend.memory_share=0.5")
    command = process_specs.lender(ROLLOUT, settings(*terms), PLACEMENT, GATEWAY, "http://127.0.0.1:2")
    assert command is not None
    assert (command.role, command.cores, process_specs.owner_role(settings())) == ("lender", (), "lender")
    for flag, value in {
        "--serving-url": "http://127.0.0.1:2",
        "--gateway": GATEWAY,
        "--worker-name": "borrowed",
        "--device": "cpu:0",
        "--mode": "idle",
        "--ttft-ms": "250",
        "--tpot-ms": "150",
        "--tpot": "mean",
        "--kv-memory-mb": "64",
        "--vllm-python": "other/python",
    }.items():
        assert value_after(command.arguments, flag) == value
    command = process_specs.lender(
        ROLLOUT, settings("serving.lend.tpot_ms=null"), PLACEMENT, GATEWAY, "http://127.0.0.1:2"
    )
    assert command is not None and "--tpot-ms" not in command.arguments


def test_a_dedicated_worker_is_a_lender_without_a_server() -> None:
    command = process_specs.dedicated(ROLLOUT, settings("worker.max_sequences=3"), PLACEMENT, GATEWAY)
    assert (command.role, command.cores) == ("dedicated", (1,))
    assert "--serving-url" not in command.arguments
    assert value_after(command.arguments, "--max-sequences") == "3"
    assert value_after(command.arguments, "--worker-name") == "dedicated"


@pytest.mark.parametrize("overrides", [("serving.is_borrowed=false",), ("serving.engine=embedded",)])
def test_only_a_borrowed_vllm_device_has_a_lender(overrides: tuple[str, ...]) -> None:
    assert process_specs.lender(ROLLOUT, settings(*overrides), PLACEMENT, GATEWAY, "http://127.0.0.1:2") is None


def test_a_lending_mode_that_vllm_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be lent in the mode paper"):
        settings("serving.lend.mode=paper")


def test_the_interpreter_is_that_of_the_settings_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load_run_settings(None, [])
    monkeypatch.delenv(process_specs.PYTHON_VARIABLE, raising=False)
    assert process_specs.vllm_python(plain) == sys.executable
    monkeypatch.setenv(process_specs.PYTHON_VARIABLE, "elsewhere/python")
    assert process_specs.vllm_python(plain) == "elsewhere/python"
    assert process_specs.vllm_python(settings()) == "other/python"


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
def test_a_missing_vllm_is_reported_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str, what: str, hint: str
) -> None:
    monkeypatch.undo()
    python = interpreter(tmp_path, says)
    other = "worker" if name == "serving" else "serving"
    chosen = settings(f"vllm_python={python}", f"{other}.engine=embedded")
    with pytest.raises(ConfigError, match=what) as caught:
        process_specs.check_vllm(chosen)
    assert caught.value.what.startswith(f"{name}.engine is vllm") and python in caught.value.what
    assert caught.value.hint is not None and hint in caught.value.hint
    start = partial(process_specs.borrowed, SERVING) if name == "serving" else process_specs.dedicated
    with pytest.raises(ConfigError, match=what):
        start(ROLLOUT, chosen, PLACEMENT, GATEWAY)


def test_a_broken_interpreter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for python in (str(tmp_path / "nowhere"), interpreter(tmp_path, "", code=1)):
        with pytest.raises(ConfigError, match="no interpreter that works") as caught:
            process_specs.check_vllm(settings(f"vllm_python={python}"))
        assert caught.value.hint == process_specs.INSTALL


def test_an_interpreter_is_asked_which_packages_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert "rose" not in process_specs._missing(sys.executable)


def test_an_interpreter_that_has_both_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    has_both = settings(f"vllm_python={interpreter(tmp_path, '')}")
    needs_none = load_run_settings(None, [f"vllm_python={tmp_path / 'nowhere'}"])
    assert [process_specs.check_vllm(chosen) for chosen in (has_both, needs_none)] == [None, None]  # type: ignore[func-returns-value]


def test_ranks_of_the_trainer_get_the_secret_on_their_input_and_nowhere_else(tmp_path):
    settings = load_run_settings(None, ["train.ranks=3"])
    specs = process_specs.trainer_ranks(settings, PLACEMENT, tmp_path / "meeting", b"a secret of the run")
    assert [spec.role for spec in specs] == ["rank-1", "rank-2"] and not any(spec.is_kept for spec in specs)
    for number, spec in enumerate(specs, start=1):
        plan = msgspec.json.decode(spec.input or b"", type=RankPlan)
        assert (plan.rank, plan.secret, plan.train) == (number, b"a secret of the run", settings.train)
        assert spec.secrets == frozenset() and "secret" not in "".join(spec.arguments)
    assert process_specs.trainer_ranks(load_run_settings(), PLACEMENT, tmp_path, b"") == []
