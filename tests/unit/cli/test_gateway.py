"""`rose gateway`: flags become settings, and a wrong model is refused in a sentence."""

from __future__ import annotations

import pytest

from rose.cli.main import main
from rose.config.server_settings import GatewaySettings


def test_flags_are_settings(monkeypatch, tmp_path):
    received = []

    async def run_gateway(model, settings, *, say):
        received.append((model, settings))

    monkeypatch.setattr("rose.gateway.gateway_service.run_gateway", run_gateway)
    words = ["--port", "0", "--name", "m", "--wait-s", "2.5", "--ledger", "file", "--router", "paper"]
    assert main(["gateway", str(tmp_path), *words]) == 0
    [(model, settings)] = received
    assert model == tmp_path and isinstance(settings, GatewaySettings)
    assert (settings.port, settings.model_name, settings.wait_s, settings.router) == (0, "m", 2.5, "paper")
    assert settings.ledger == "file"


@pytest.mark.parametrize("words", [["--port", "0"], ["--set", "prot=1"], ["--wait-s", "-1"]])
def test_what_cannot_work_is_refused_in_a_sentence(words, capsys):
    assert main(["gateway", "missing", *words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("rose: ") and "Traceback" not in shown
