"""Which process of a run gets which secret: each only what its role needs, and none on its command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rose.config.environment import is_secret, without_secrets
from rose.front.tokens import OWNER_VARIABLE, ROLLOUT_VARIABLE
from rose.launch import cast, vllm_cast
from rose.launch.placement import Placement
from rose.launch.processes import Command
from rose.launch.role_secrets import make_tokens, secrets_of_run
from rose.launch.settings import load_run_settings
from rose.rollout.roles import VARIABLES
from rose.weights.connecting import SECRET, SECRET_FILE

PLACEMENT = Placement("cpu:0", "cpu:1", (1,))
MODEL, URL = Path("models/one"), "http://127.0.0.1:1"
FOR_ALL_ROLES = {*VARIABLES.values(), OWNER_VARIABLE, ROLLOUT_VARIABLE, SECRET, SECRET_FILE}
OF_WORKER = {"ROSE_WORKER_TOKEN", SECRET, SECRET_FILE}


def commands(*overrides: str) -> dict[str, Command]:
    settings = load_run_settings(None, overrides)
    found = [
        cast.gateway(MODEL, settings, PLACEMENT, Path("ledger")),
        cast.borrowed(MODEL, MODEL, settings, PLACEMENT, URL),
        cast.lender(MODEL, settings, PLACEMENT, URL, URL),
        cast.dedicated(MODEL, settings, PLACEMENT, URL),
        cast.traffic(settings, PLACEMENT, URL),
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
    monkeypatch.setattr(vllm_cast, "_missing", lambda where: ())
    assert {role: set(command.secrets) for role, command in commands(*overrides).items()} == wanted


def test_a_device_that_is_not_borrowed_gets_no_secret() -> None:
    assert commands("serving.is_borrowed=false")["borrowed"].secrets == frozenset()


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_no_command_line_holds_a_secret(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """Not even one that the operator has set, and that a setting could repeat."""
    monkeypatch.setattr(vllm_cast, "_missing", lambda where: ())
    for variable in FOR_ALL_ROLES:
        monkeypatch.setenv(variable, f"the-value-of-{variable}")
    secrets = secrets_of_run(make_tokens(), {SECRET: "of-this-run-alone"})
    values = {*secrets.values(), *(os.environ[variable] for variable in FOR_ALL_ROLES)}
    for command in commands(f"serving.engine={engine}", f"worker.engine={engine}").values():
        told = " ".join(command.arguments) + (command.input or b"").decode()
        assert not [value for value in values if value in told]


def test_the_relay_secret_is_the_one_of_the_run_or_else_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_FILE, "/etc/secret")
    assert SECRET_FILE not in secrets_of_run(make_tokens(), {SECRET: "of-this-run", SECRET_FILE: ""})
    assert secrets_of_run(make_tokens(), {})[SECRET_FILE] == "/etc/secret"


def test_every_secret_variable_of_rose_is_known_as_one() -> None:
    assert all(map(is_secret, FOR_ALL_ROLES))
    plain = {"ROSE_BOARDS": "x", "ROSE_VLLM_PYTHON": "x", "ROSE_WEIGHTS_FOLDER": "x", "HF_TOKEN": "x", "PATH": "x"}
    assert without_secrets(plain | dict.fromkeys(FOR_ALL_ROLES, "x")) == plain
