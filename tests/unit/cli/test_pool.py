"""`rose pool` against a gateway that answers what it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rose.cli.main import main

TOKEN = "an-operators-token"
SERVING = {
    "requests": 100, "ttft_p50_s": 0.05, "ttft_p99_s": 0.2, "tpot_p50_s": 0.01, "tpot_p99_s": 0.02,
    "ttft_budget_s": 0.5, "tpot_budget_s": 0.05, "lent_share": 0.4, "counted": 1, "ambiguous": 2,
    "breaker_trips": 0, "is_resting": False,
}  # fmt: skip
WORKER = {
    "name": "gpu-1", "kind": "borrowed", "state": "open", "trouble": "", "ordered": "lending", "turns": 3, "seats": 16,
    "turns_ended": 9, "tokens_per_s": 250.4, "version": "7", "labels": {"rack": "a3"}, "serving": SERVING,
}  # fmt: skip
OTHER = {**WORKER, "name": "spare", "kind": "dedicated", "labels": {}, "serving": None}


class ScriptedGateway:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any, str | None]] = []
        self.reply: tuple[int, dict[str, Any]] = (200, {"members": [WORKER, OTHER]})
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                gateway.asked.append((self.command, self.path, body, self.headers["Authorization"]))
                status, reply = gateway.reply
                content = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = answer

            def log_message(self, *parts: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedGateway]:
    monkeypatch.setenv("ROSE_OPERATOR_TOKEN", TOKEN)
    found = ScriptedGateway()
    thread = threading.Thread(target=found.server.serve_forever, daemon=True)
    thread.start()
    yield found
    found.server.shutdown()
    found.server.server_close()


def ordered(gateway: ScriptedGateway, *words: str) -> Any:
    gateway.reply = 200, {"matched": ["gpu-1"], "absent": [], "is_durable": True, "number": 1, "action": words[0]}
    assert main(["pool", *words, "--gateway", gateway.url]) == 0
    method, path, body, authorization = gateway.asked[-1]
    assert (method, path, authorization) == ("POST", "/v1/pool/orders", f"Bearer {TOKEN}")
    return body


def test_workers_are_listed_with_their_users(gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "ls", "--gateway", gateway.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "200.0 ms of 500" in lines[1] and "1 + 2?" in lines[1] and "rack=a3" in lines[1]
    assert main(["pool", "ls", "--gateway", gateway.url, "--label", "rack=a3", "--json"]) == 0
    assert [worker["name"] for worker in json.loads(capsys.readouterr().out)] == ["gpu-1"]
    assert main(["pool", "show", "gpu-1", "--gateway", gateway.url]) == 0
    shown = capsys.readouterr().out
    assert "P50 50.0 ms, P99 200.0 ms of 500" in shown and "40% of the time" in shown
    assert main(["pool", "show", "nothing", "--gateway", gateway.url]) != 0


def test_a_worker_cannot_control_the_terminal(gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.reply = 200, {"members": [{**WORKER, "name": "a\x1b[2J", "trouble": "b\rc"}]}
    assert main(["pool", "ls", "--gateway", gateway.url]) == 0
    assert main(["pool", "show", "a\x1b[2J", "--gateway", gateway.url]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\r" not in said and "a?[2J" in said


def test_an_order_names_workers_or_labels_or_all(gateway: ScriptedGateway) -> None:
    assert ordered(gateway, "pause", "a", "b") == {"action": "pause", "workers": ["a", "b"]}
    assert ordered(gateway, "drain", "--label", "rack=a3") == {"action": "drain", "labels": {"rack": "a3"}}
    assert ordered(gateway, "resume", "--all") == {"action": "resume", "all": True}
    assert ordered(gateway, "limits", "--all", "--turns", "4") == {"action": "limits", "all": True, "turns_max": 4}
    assert ordered(gateway, "limits", "a", "--no-limit") == {"action": "limits", "workers": ["a"], "turns_max": None}


def test_the_reply_says_what_holds(gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"w{number}" for number in range(9)]
    gateway.reply = 200, {"matched": names, "absent": ["x"], "is_durable": False, "number": 1, "action": "drain"}
    assert main(["pool", "drain", *names, "x", "--gateway", gateway.url]) == 0
    said = capsys.readouterr().out
    assert "drained: 9 workers (w0, w1" in said and "not in the pool now: x" in said and "--ledger" in said


@pytest.mark.parametrize(("words", "what"), [
    (["pause"], "which workers"),
    (["pause", "a", "--all"], "one of the three"),
    (["pause", "--label", "rack"], "not a label"),
    (["limits", "--all"], "which limit"),
    (["limits", "--all", "--turns", "0"], "not a limit"),
    (["limits", "--all", "--turns", "3", "--no-limit"], "which limit"),
    (["ls", "--gateway", "localhost:8002"], "not an address"),
    (["ls", "--gateway", "http://127.0.0.1:9"], "did not answer"),
])  # fmt: skip
def test_a_wrong_command_line_says_what_to_do(
    gateway: ScriptedGateway, words: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [] if "--gateway" in words else ["--gateway", gateway.url]
    assert main(["pool", *words, *more]) != 0
    assert what in capsys.readouterr().err and not gateway.asked


def test_a_refusal_of_the_gateway_is_shown(gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.reply = 403, {"error": {"message": "this is for the role operator"}}
    assert main(["pool", "ls", "--gateway", gateway.url]) != 0
    assert "403: this is for the role operator" in capsys.readouterr().err


def test_the_token_is_printed_for_the_page(gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "token", "--gateway", gateway.url]) == 0
    assert capsys.readouterr().out.strip() == TOKEN
