"""What happens to a device, and what its clients see of it: clients that leave or sleep, processes that die."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.devices import DEVICE, FIRST_CORE, HOST, ROOT, Answer, Device, environment, eventually, is_alive
from tests.integration.scripted_engine import CONTEXT_TOKENS, CRASH, HANG, SLOW

from rose.cli.main import main

StartScripted = Callable[..., Device]
LONG: dict[str, Any] = {"prompt": [SLOW, 1], "max_tokens": 4000}  # more than a minute, unless somebody ends it


def open_request(device: Device, **body: Any) -> http.client.HTTPConnection:
    """A request under way, whose answer nobody has read yet."""
    before = device.metric("num_requests_running")
    connection = http.client.HTTPConnection(HOST, device.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(LONG | body), {"Content-Type": "application/json"})
    eventually(lambda: device.metric("num_requests_running") > before)
    return connection


def is_serving(device: Device) -> bool:
    return device.complete(prompt="x", max_tokens=1).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled(scripted: Device, stream: bool) -> None:
    before = scripted.metric("request_success_total", finished_reason="abort")
    connection = open_request(scripted, stream=stream, n=2)
    assert connection.sock is not None
    connection.sock.close()
    eventually(scripted.is_idle)
    assert scripted.metric("request_success_total", finished_reason="abort") == before + 2
    assert is_serving(scripted)


def test_a_reader_that_sleeps_is_cut_off_and_nobody_waits_for_it(scripted: Device) -> None:
    before = scripted.metric("generation_tokens_total")
    sleeper = socket.create_connection((HOST, scripted.port), timeout=60)
    body = json.dumps({"prompt": [1], "max_tokens": 4000, "stream": True, "n": 4, "logprobs": 20}).encode()
    sleeper.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    assert sleeper.recv(12) == b"HTTP/1.1 200"
    assert is_serving(scripted)
    eventually(scripted.is_idle)
    assert scripted.metric("generation_tokens_total") - before < 4 * 4000
    watch = select.poll()
    watch.register(sleeper, 0)  # errors are reported without being asked for
    eventually(lambda: bool(watch.poll(0)))
    with pytest.raises(ConnectionResetError):
        read_all(sleeper)
    sleeper.close()
    assert is_serving(scripted)


def read_all(connection: socket.socket) -> None:
    while connection.recv(1 << 20):
        pass


def test_a_reader_that_never_takes_a_whole_answer_is_cut_off(scripted: Device) -> None:
    sleeper = socket.socket()
    sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sleeper.connect((HOST, scripted.port))
    body = json.dumps({"prompt": [1], "max_tokens": 4000, "n": 4, "logprobs": 20}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    sleeper.sendall(head + body)
    watch = select.poll()
    watch.register(sleeper, 0)  # errors are reported without being asked for
    eventually(lambda: bool(watch.poll(0)))
    with pytest.raises(ConnectionResetError):
        read_all(sleeper)
    sleeper.close()
    assert is_serving(scripted)


def test_a_body_that_never_comes(scripted: Device) -> None:
    with socket.create_connection((HOST, scripted.port), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")
    assert is_serving(scripted)


@pytest.mark.parametrize("words", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_who_never_says_what_it_wants_is_cut_off(scripted: Device, words: bytes) -> None:
    with socket.create_connection((HOST, scripted.port), timeout=60) as connection:
        connection.sendall(words)
        with pytest.raises(ConnectionResetError):
            read_all(connection)
    assert is_serving(scripted)


def test_chat_without_max_tokens_may_use_the_whole_context(scripted: Device) -> None:
    messages = [{"role": "user", "content": "x" * (CONTEXT_TOKENS - 200)}]
    usage = scripted.post("/v1/chat/completions", {"messages": messages}).json["usage"]
    assert usage["total_tokens"] == CONTEXT_TOKENS


def test_a_queue_that_is_full_says_so(start_scripted: StartScripted) -> None:
    device = start_scripted("engine.max_sequences=2", "engine.max_waiting=2")
    running = [open_request(device) for _ in range(2)]
    waiting = [http.client.HTTPConnection(HOST, device.port) for _ in range(2)]
    for connection in waiting:
        connection.request("POST", "/v1/completions", json.dumps(LONG), {})
    eventually(lambda: device.metric("num_requests_waiting") == 2)
    for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}):
        refused = device.complete(**body)
        assert refused.status == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.error["code"] == "queue_full"
    assert device.complete(prompt="x", n=5).status == 429
    for connection in running + waiting:
        connection.close()
    eventually(device.is_idle)
    assert is_serving(device)


def test_too_many_connections_are_told_so(start_scripted: StartScripted) -> None:
    device = start_scripted("front.max_connections=3")
    held = [open_request(device) for _ in range(2)]
    held.append(http.client.HTTPConnection(HOST, device.port))
    held[-1].request("POST", "/v1/completions", json.dumps(LONG), {})
    eventually(lambda: device.ask("GET", "/health").status == 503)
    assert device.ask("GET", "/health").error["code"] == "too_many_connections"
    for connection in held:
        connection.close()
    eventually(lambda: device.ask("GET", "/health").status == 200)


def test_idle_connections_make_room_for_new_ones(start_scripted: StartScripted) -> None:
    device = start_scripted("front.max_connections=3")
    silent = [socket.create_connection((HOST, device.port)) for _ in range(3)]
    for _ in range(6):
        eventually(lambda: device.ask("GET", "/health").status == 200)
    for connection in silent:
        connection.close()


def test_the_engine_is_pinned_and_the_front_keeps_off_its_core(scripted: Device) -> None:
    assert os.sched_getaffinity(scripted.engine_pid) == {FIRST_CORE}
    others = os.sched_getaffinity(0) - {FIRST_CORE}
    assert os.sched_getaffinity(scripted.process.pid) == (others or {FIRST_CORE})


def test_no_process_of_a_device_loads_torch(device: Device) -> None:
    for pid in (device.process.pid, device.engine_pid):
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


# The end of the engine process


def kill_engine(device: Device) -> None:
    os.kill(device.engine_pid, signal.SIGKILL)


def crash_engine(device: Device) -> None:
    assert device.complete(prompt=[CRASH]).status == 503


@pytest.mark.parametrize("harm", [kill_engine, crash_engine])
def test_an_engine_that_dies_is_restarted(start_scripted: StartScripted, harm: Callable[[Device], None]) -> None:
    device = start_scripted()
    assert is_serving(device)
    generated = device.metric("generation_tokens_total")
    dead = device.engine_pid
    streaming, whole = open_request(device, stream=True), open_request(device)
    harm(device)
    assert whole.getresponse().status == 503
    last_event = streaming.getresponse().read().split(b"\n\n")[-3]
    assert json.loads(last_event.removeprefix(b"data: "))["error"]["code"] == "engine_unavailable"
    eventually(lambda: is_serving(device))
    assert device.engine_pid != dead
    assert not is_alive(dead)
    assert device.metric("generation_tokens_total") > generated


def test_without_an_engine_the_reason_is_given(start_scripted: StartScripted) -> None:
    device = start_scripted("engine.max_sequences=1")
    answers: list[Answer] = []

    def watch() -> None:
        while not answers or answers[-1].status == 200:
            answers.append(device.ask("GET", "/health"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    kill_engine(device)
    watcher.join()
    assert answers[-1].status == 503
    assert int(answers[-1].headers["Retry-After"]) >= 1
    assert "signal 9" in answers[-1].error["message"]
    eventually(lambda: device.ask("GET", "/health").status == 200)


def test_an_engine_that_hangs_is_killed_and_restarted(start_scripted: StartScripted) -> None:
    device = start_scripted()
    stuck = device.engine_pid
    assert device.complete(prompt=[HANG]).status == 503
    eventually(lambda: is_serving(device))
    assert not is_alive(stuck)


def test_an_engine_that_dies_again_and_again_ends_the_device(start_scripted: StartScripted) -> None:
    device = start_scripted()

    def ended() -> bool:
        with contextlib.suppress(OSError):
            device.complete(prompt=[CRASH])
        return device.process.poll() is not None

    eventually(ended)
    assert device.process.returncode == 1


# The end of the front process


def test_when_the_front_is_killed_the_engine_goes(start_scripted: StartScripted) -> None:
    device = start_scripted()
    engine = device.engine_pid
    open_request(device)
    assert is_alive(engine)
    device.process.kill()
    eventually(lambda: not is_alive(engine))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_device_stops_at_once(start_scripted: StartScripted, number: int) -> None:
    device = start_scripted("front.shutdown_s=60")
    engine = device.engine_pid
    idle = http.client.HTTPConnection(HOST, device.port)
    idle.request("GET", "/health")
    idle.getresponse().read()
    device.process.send_signal(number)
    assert device.process.wait(30) == 0
    assert not is_alive(engine)


def test_running_requests_may_end_before_the_device_does(start_scripted: StartScripted) -> None:
    device = start_scripted("front.shutdown_s=60")
    connection = open_request(device, max_tokens=50)
    device.process.send_signal(signal.SIGTERM)
    answer = connection.getresponse()
    assert answer.status == 200
    assert json.loads(answer.read())["usage"]["completion_tokens"] == 50
    assert device.process.wait(30) == 0


def test_requests_that_take_too_long_are_ended_with_the_device(start_scripted: StartScripted) -> None:
    device = start_scripted("front.shutdown_s=0.2")
    whole, streaming = open_request(device), open_request(device, stream=True)
    device.process.send_signal(signal.SIGTERM)
    assert whole.getresponse().status == 503
    assert b'"error"' in streaming.getresponse().read()
    assert device.process.wait(30) == 0


def test_a_second_signal_means_now(start_scripted: StartScripted) -> None:
    device = start_scripted("front.shutdown_s=3600")
    connection = open_request(device)
    device.process.send_signal(signal.SIGTERM)
    eventually(lambda: refuses_connections(device))
    device.process.send_signal(signal.SIGTERM)
    assert connection.getresponse().status == 503
    assert device.process.wait(30) == 0


def refuses_connections(device: Device) -> bool:
    try:
        socket.create_connection((HOST, device.port)).close()
    except ConnectionRefusedError:
        return True
    return False


# What keeps a device from starting


def test_a_port_in_use(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", str(model_folder), "--device", DEVICE, "--port", port]) == 2
    assert f"port {port} on {HOST} is in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--host", "no such host"], "is not an address"),
        (["--host", "203.0.113.7"], "is not an address of this machine"),
        (["--device", "cpu:4095"], "core 4095"),
        (["--device", "gpu:0"], "device"),
        (["--port", "99999"], "front.port"),
        (["--set", "engine.max_seqences=3"], "engine.max_sequences"),
        (["--settings", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_settings_that_cannot_work(
    model_folder: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(model_folder), "--set", f"device={DEVICE}", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path / "nowhere"), "--device", DEVICE, "--port", "0"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_model_that_only_the_engine_finds_bad(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """KV memory too small for one context: said by the engine process, printed by this one."""
    assert main(["serve", str(model_folder), "--device", DEVICE, "--port", "0", "--kv-memory-mb", "1"]) == 2
    assert "KV memory" in capsys.readouterr().err


def test_a_signal_while_starting(model_folder: Path) -> None:
    command = [sys.executable, "-m", "rose", "serve", str(model_folder), "--device", DEVICE, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment())
    assert process.stdout is not None
    assert "loading" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130
    process.stdout.close()
