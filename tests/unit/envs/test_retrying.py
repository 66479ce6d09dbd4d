"""A client of the gateway sends a failed request again for a time, and counts an answer once it has it whole."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rose.envs import retrying
from rose.envs.openai_agent import AgentEndpoint, AgentFailed, AgentTask, run_agent
from rose.envs.retrying import Retries

REPLY = json.dumps(
    {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "north"}}],
    }
).encode()


class Failing(ThreadingHTTPServer):
    """Fails as it is told to, request by request, then answers."""

    def __init__(self, *failures: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.failures, self.bodies = list(failures), list[bytes]()


class Handler(BaseHTTPRequestHandler):
    server: Failing

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        failure = self.server.failures.pop(0) if self.server.failures else ""
        self.close_connection = True
        if failure == "no answer":
            return
        self.send_response(int(failure) if failure.isdigit() else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(REPLY)))
        if failure == "429":
            self.send_header("Retry-After", "0.01")
        self.end_headers()
        self.wfile.write(REPLY[:20] if failure == "half an answer" else REPLY)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PAUSE_S", 0.01)
    monkeypatch.setattr(retrying, "PAUSE_LONGEST_S", 0.01)


@pytest.fixture
def serving() -> Iterator[Any]:
    started: list[Failing] = []

    def serve(*failures: str) -> Failing:
        server = Failing(*failures)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return server

    yield serve
    for server in started:
        server.shutdown()
        server.server_close()


def endpoint_of(server: Failing, patience_s: float = 60.0) -> AgentEndpoint:
    return AgentEndpoint(f"http://127.0.0.1:{server.server_port}", "a-token", "m", patience_s)


def play(client: Any, task: AgentTask) -> float:
    reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Where to?"}])
    return float(reply.choices[0].message.content == "north")


async def play_asynchronously(client: Any, task: AgentTask) -> float:
    reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Where to?"}])
    return float(reply.choices[0].message.content == "north")


AGENTS = pytest.mark.parametrize("agent", [play, play_asynchronously])


@AGENTS
def test_a_request_is_sent_again_and_its_answer_counted_once(serving: Any, agent: Any) -> None:
    failures = [*("no answer", "503", "half an answer", "429", "502", "504"), *["no answer"] * 10]
    server, task = serving(*failures), AgentTask(0)
    assert asyncio.run(run_agent(agent, endpoint_of(server), "t", task, 60.0)).reward == 1.0
    assert len(server.bodies) == len(failures) + 1 and len(set(server.bodies)) == 1, "the very same request"
    assert task.answers == 1


@AGENTS
def test_a_gateway_that_stays_away_ends_the_episode_after_patience_s(serving: Any, agent: Any) -> None:
    server = serving(*["no answer"] * 10_000)
    with pytest.raises(AgentFailed, match="onnection"):
        asyncio.run(run_agent(agent, endpoint_of(server, patience_s=0.1), "t", AgentTask(0), 60.0))
    assert len(server.bodies) > 1


@AGENTS
def test_a_refused_request_is_not_sent_again(serving: Any, agent: Any) -> None:
    server = serving("400")
    with pytest.raises(AgentFailed, match="400"):
        asyncio.run(run_agent(agent, endpoint_of(server), "t", AgentTask(0), 60.0))
    assert len(server.bodies) == 1


@pytest.mark.parametrize("asked", [None, "1", "0.2", "-1", "nan", "soon", "1e9"])
def test_retries_go_on_for_patience_s(asked: str | None) -> None:
    now_s = 0.0
    retries = Retries(60.0, lambda: now_s)
    while (pause_s := retries.pause_s(asked)) is not None:
        assert pause_s > 0
        now_s += pause_s
    assert now_s == pytest.approx(60.0)
