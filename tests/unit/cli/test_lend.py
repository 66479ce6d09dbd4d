"""`rose lend`: finding the device, its token, commands and the status as text."""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from rose.cli.main import main
from rose.device.device_registry import DeviceEntry, registered_device


@pytest.mark.parametrize(
    "typed", ["http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://localhost:8000", "http://127.0.0.1:8000/v1"]
)
def test_a_device_is_found_by_every_form_of_its_address(typed: str) -> None:
    from rose.cli.lend import address_of

    assert address_of(typed) == "http://127.0.0.1:8000"


STATUS = {
    "state": "lending", "why": "serving is idle", "mode": "decode", "model": "loaded", "model_bytes": 3 << 20,
    "activation_s": 0.5, "parking_s": None, "running": 2, "waiting": 1, "evictions": 4, "lent_steps": 5,
    "lent_tokens": 6000, "lent_s": 7.5, "breaches": {"missed": 1, "late": 0}, "breaker_trips": 2, "page_bytes": 1 << 20,
    "pages": 30, "rollout_pages": 8, "rollout_pages_max": 9, "serving_pages": 10, "memory_state": "open",
    "lending_stretch": 1.25, "memory_share": 0.5, "compute_share": 0.25, "dry_run": None, "serving": None,
}  # fmt: skip


class FakeDevice:
    """A device's admin routes: keeps what it was sent and answers with one status."""

    def __init__(self, code: int = 200, body: Any = None) -> None:
        self.requests: list[tuple[str, str, str | None, Any]] = []
        device = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                sent = json.loads(data) if data else None
                device.requests.append((self.command, self.path, self.headers["Authorization"], sent))
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(STATUS if body is None else body).encode())

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                return

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROSE_OWNER_TOKEN", "the-owners-token")
    monkeypatch.delenv("ROSE_ROLLOUT_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    "words, request_line, body",
    [
        (["status"], ("GET", "/rose/lending"), None),
        (["pause"], ("POST", "/rose/lending/pause"), {}),
        (["drain"], ("POST", "/rose/lending/drain"), {}),
        (["drain", "--remove"], ("POST", "/rose/lending/remove"), {}),
        (["limits", "--memory", "0.5"], ("POST", "/rose/lending/limits"), {"memory_share": 0.5}),
    ],
)
def test_every_action_is_one_request_with_the_token(owner, words, request_line, body, capsys) -> None:
    device = FakeDevice()
    assert main(["lend", *words, "--url", device.url + "/v1", "--json"]) == 0
    assert device.requests == [(*request_line, "Bearer the-owners-token", body)]
    assert json.loads(capsys.readouterr().out) == STATUS


def test_the_status_is_shown_in_lines(owner, capsys) -> None:
    serving = {"requests": 1200}
    for name in ("ttft", "tpot"):
        for share in (50, 99):
            serving |= {f"{name}_p{share}_s": share / 1000, f"{name}_p{share}_added_s": 0.001}
    dry_run = {"tokens": 500, "seconds": 10.0, "lent_s": 2.5}
    device = FakeDevice(body=STATUS | {"serving": serving, "dry_run": dry_run})
    assert main(["lend", "status", "--url", device.url]) == 0
    shown = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    lines = {name: text.strip() for name, text in shown.items()}
    assert lines["lending"] == "serving is idle"
    assert lines["model"] == "loaded, 3.0 MiB of weights, activated in 500.0 ms"
    assert lines["breaches"] == "1 missed, 0 late (2 breaker trips)"
    assert lines["ttft"] == "P50 50.0 ms (+1.0), P99 99.0 ms (+1.0) by lending, last 1,200 requests"
    assert lines["dry run"] == "500 tokens would have been computed in 10 s: 50 per second, in 25% of the time"
    assert lines["limits"] == "50% of the memory, 25% of the time"


def test_a_refusal_and_a_silent_device_are_sentences(owner, capsys) -> None:
    device = FakeDevice(401, {"error": {"message": "this needs a token"}})
    assert main(["lend", "pause", "--url", device.url]) == 1
    assert "the device answered 401: this needs a token" in capsys.readouterr().err
    assert main(["lend", "pause", "--url", "http://127.0.0.1:9"]) == 1
    assert "did not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, why",
    [
        (["limits"], "no limit was given"),
        (["vllm"], "which model should the rollouts run?"),
        (["sglang"], "rose lend sglang --serving-url"),
        (["vllm", "--rollout-model", "x", "--compute", "3"], "--compute 3 is not a share"),
        (["token"], "no lent device of yours runs on this machine"),
    ],
)
def test_wrong_commands_are_refused_in_a_sentence(owner, words, why, capsys) -> None:
    assert main(["lend", *words, "--url", FakeDevice().url] if words[0] == "limits" else ["lend", *words]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("engine, client", [("vllm", None), ("sglang", "SglangEngineClient")])
def test_lending_beside_an_engine_starts_its_client(engine, client, monkeypatch, tmp_path) -> None:
    calls: list[tuple[object, ...]] = []

    async def lend(*arguments: object) -> int:
        calls.append(arguments)
        return 0

    monkeypatch.setattr("rose.vllm.lend_session.lend", lend)
    flags = ["--rollout-model", str(tmp_path), "--engine-python", "a-python", "--engine-flag=--more"]
    address = ["--owner-host", "127.0.0.2", "--owner-port", "9100"]
    assert main(["lend", engine, *flags, *address, "--gateway", "http://g", "--label", "zone=a"]) == 0
    [(lending, gateway, _, admin, client_type, labels)] = calls
    assert (admin.host, admin.port, labels) == ("127.0.0.2", 9100, {"zone": "a"})
    assert (lending.engine.python, lending.engine.extra, gateway) == ("a-python", ("--more",), "http://g")
    assert client_type.__name__ == (client or "VllmEngineClient")


def test_with_several_devices_one_must_be_named(owner, capsys, monkeypatch) -> None:
    monkeypatch.delenv("ROSE_OWNER_TOKEN")
    first, second = FakeDevice(), FakeDevice()
    entries = [
        DeviceEntry(os.getpid(), "m", "r", device.url, "http://127.0.0.1:1", token, "rollout-token")
        for device, token in ((first, "first-token"), (second, ""))
    ]
    with registered_device(entries[0]), registered_device(entries[1]):
        assert main(["lend", "status"]) == 2
        assert "name one of them with --url" in capsys.readouterr().err
        assert main(["lend", "status", "--url", first.url.replace("127.0.0.1", "localhost")]) == 0
        assert first.requests[0][2] == "Bearer first-token"
        assert main(["lend", "status", "--url", second.url]) == 2
        assert "started with ROSE_OWNER_TOKEN set" in capsys.readouterr().err
