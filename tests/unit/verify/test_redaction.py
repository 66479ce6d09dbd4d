"""A report may be published: no secret, no host, no user and no private folder is left in it."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path

import pytest

from rose.verify.kit_results import KitCheck, KitSettings, StepResult
from rose.verify.redaction import Redactor

HOMES = "/" + "home"  # in pieces: the house has no paths of one machine
SECRETS = {"ROSE_WORKER_TOKEN": "w0rker-t0ken-value", "HF_TOKEN": "plain-looking-value", "MY_API_KEY": "another-value"}


@pytest.fixture
def redactor(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-7.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(Path, "home", lambda: Path("/data/alice"))
    return Redactor(tmp_path / "out", environment=SECRETS)


@pytest.mark.parametrize("value", SECRETS.values())
def test_secrets_of_the_environment_are_removed(redactor, value):
    assert redactor.text(f"Bearer: {value}!") == "Bearer: <token>!"


@pytest.mark.parametrize(
    "text",
    [
        "hf_AbCdEfGhIjKlMnOp",
        "Authorization: Bearer abc.def-123456",
        "http://user:secret-pass@host:80/x",
        "--api-key verysecretkey",
        "sk-0123456789abcdef",
    ],
)
def test_secrets_are_recognised_by_their_form(redactor, text):
    cleaned = redactor.text(text)
    assert "<token>" in cleaned and not any(word in cleaned for word in ("AbCdEf", "abc.def", "secret", "0123456789"))


@pytest.mark.parametrize(
    "text, cleaned",
    [
        ("at /data/alice/models/x", "at ~/models/x"),
        (f"at {HOMES}/bob/x and /Users/carol/y", "at ~/x and ~/y"),
        ("gpu-box-7.example.org refused, gpu-box-7 too", "<host> refused, <host> too"),
        ("run by alice on malice", "run by <user> on malice"),
        ("GPU-12345678-1234-1234-1234-123456789012", "GPU-<serial>"),
        ("127.0.0.1 and localhost stay", "127.0.0.1 and localhost stay"),
    ],
)
def test_names_and_folders_are_replaced(redactor, text, cleaned):
    assert redactor.text(text) == cleaned


def test_the_folder_of_the_kit_is_replaced(redactor, tmp_path):
    assert redactor.text(f"see {tmp_path}/out/logs") == "see <folder>/logs"


def test_with_names_only_secrets_are_removed(tmp_path):
    redactor = Redactor(tmp_path, with_names=True, environment=SECRETS)
    text = f"{tmp_path} {socket.gethostname()} {SECRETS['HF_TOKEN']}"
    assert redactor.text(text) == f"{tmp_path} {socket.gethostname()} <token>"


def test_every_text_of_a_result_is_redacted_and_names_of_steps_are_not(redactor):
    secret = SECRETS["HF_TOKEN"]
    result = StepResult(
        "alice", "failed", secret, 1.0, (KitCheck("a check", False, secret),), (), {"a fact": secret}, (secret,)
    )
    cleaned = redactor.result(result)
    assert secret not in repr(cleaned) and repr(cleaned).count("<token>") == 4
    assert cleaned.step == "alice" and cleaned.outcome == "failed"


def test_settings_show_no_home(redactor):
    settings = redactor.settings(KitSettings(serving=f"{HOMES}/bob/model", vllm_python="/data/alice/bin/python"))
    assert (settings.serving, settings.vllm_python) == ("~/model", "~/bin/python")
