"""The HTTP server of a device towards callers it does not know: names, keys, headers, encodings, connections."""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
import ssl
import subprocess
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.front_world import FrontWorld, front_world

from rose.config.device import FrontSettings, RolloutFrontSettings
from rose.errors import ConfigError
from rose.front import bodies, connections, ports, tokens, tools
from rose.front.connections import Connection
from rose.front.structure import CONTAINERS_MAX
from rose.models.folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset

COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"
KEY = "a-key-of-the-serving-port"
Story = Callable[[FrontWorld], Awaitable[None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("qwen3-3m", tmp_path_factory.mktemp("models") / "m", seed=0))


@pytest.fixture(autouse=True)
def no_brake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "BRAKE_S", 0.0)


def tell(folder: ModelFolder, story: Story, settings: FrontSettings | None = None, **options: Any) -> None:
    async def run() -> None:
        async with front_world(folder, settings, **options) as found:
            await story(found)

    asyncio.run(run())


# Who calls

LOOPBACK = ["localhost", "localhost:8000", "127.0.0.1", "127.0.0.1:1", "[::1]:8000", "LOCALHOST", "a.localhost"]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "", "[", "127.0.0.1.evil.example"]


@pytest.mark.parametrize("host", [*LOOPBACK, *FOREIGN])
def test_a_loopback_server_answers_to_loopback_names_only(folder: ModelFolder, host: str) -> None:
    async def story(found: FrontWorld) -> None:
        for _ in range(2):
            status, _answer = await found.ask("GET", "/health", headers={"Host": host})
            assert status == (200 if host in LOOPBACK else 403)

    tell(folder, story)


def test_a_setting_adds_names(folder: ModelFolder) -> None:
    async def story(found: FrontWorld) -> None:
        assert (await found.ask("GET", "/health", headers={"Host": "models.example:80"}))[0] == 200
        assert (await found.ask("GET", "/health", headers={"Host": "evil.example"}))[0] == 403

    tell(folder, story, FrontSettings(allowed_hosts=("Models.example",)))


def test_a_server_for_other_machines_answers_to_any_name(folder: ModelFolder) -> None:
    async def story(found: FrontWorld) -> None:
        headers: dict[str, str | bytes] = {"Host": "models.example", "Origin": "http://models.example:3000"}
        assert (await found.ask("GET", "/health", headers=headers))[0] == 200
        assert (await found.ask("GET", "/health", headers=headers | {"Origin": "http://evil.example"}))[0] == 403

    tell(folder, story, FrontSettings(host="0.0.0.0"))


@pytest.mark.parametrize(
    "origin, status",
    [("http://localhost:3000", 200), ("http://127.0.0.1", 200), ("http://evil.example", 403), ("null", 403), ("", 403)],
)
def test_pages_of_other_sites_are_refused(folder: ModelFolder, origin: str, status: int) -> None:
    async def story(found: FrontWorld) -> None:
        body = {"prompt": [1], "max_tokens": 1}
        found_status, answer = await found.post(COMPLETIONS, body, Origin=origin)
        assert found_status == status
        assert len(found.engine.requests) == (status == 200)
        if status == 403:
            assert answer["error"]["code"] == "origin_not_allowed"

    tell(folder, story)


@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded", "text/plain", ""])
def test_the_content_type_is_not_asked_for(folder: ModelFolder, kind: str) -> None:
    async def story(found: FrontWorld) -> None:
        assert (await found.post(COMPLETIONS, {"prompt": [1]}, **{"Content-Type": kind}))[0] == 200

    tell(folder, story)


# Keys and headers


def test_a_key_guards_the_serving_port(folder: ModelFolder) -> None:
    async def story(found: FrontWorld) -> None:
        for path in (COMPLETIONS, GENERATE, "/tokenize", "/detokenize", "/v1/models", "/openapi.json", "/v1/models/m"):
            method = "GET" if path.startswith(("/v1/models", "/openapi")) else "POST"
            for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
                assert (await found.ask(method, path, b"{}", dict(header)))[0] == 401, path
            assert (await found.ask(method, path, b"{}", {"Authorization": f"Bearer {KEY}"}))[0] in (200, 400)
        for path in ("/health", "/version", "/metrics"):
            assert (await found.ask("GET", path))[0] == 200

    tell(folder, story, api_key=KEY)


@pytest.mark.parametrize("value", [b"Bearer \xff\xfe", b"\xff", b"Bearer ", b"Bearer", b"", b"Bearer \x80" * 100])
def test_a_malformed_authorization_is_401(folder: ModelFolder, value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def story(found: FrontWorld) -> None:
        assert (await found.ask("POST", GENERATE, b"{}", {"Authorization": value}))[0] == 401

    with caplog.at_level(logging.DEBUG):
        tell(folder, story, RolloutFrontSettings(), token=KEY)
    assert not [record for record in caplog.records if record.exc_info]


def test_bytes_that_are_no_text_are_never_a_500(folder: ModelFolder) -> None:
    async def story(found: FrontWorld) -> None:
        for headers in (
            {"Host": b"\xff"},
            {"Origin": b"http://\xff"},
            {"Content-Encoding": b"\xff"},
            {"X-Odd": b"\xff"},
        ):
            status, answer = await found.ask("POST", COMPLETIONS, b'{"prompt":[1]}', dict(headers))
            assert status in (200, 400, 403, 415) and answer
        for path in ("/v1/models/%ff", "/v1/models/%00", "/%ff", "/v1/models/\u00e9"):
            assert (await found.ask("GET", path))[0] in (400, 404)

    tell(folder, story)


def test_a_wrong_token_is_answered_late_and_closes_the_connection(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(found: FrontWorld) -> None:
        waits: list[float] = []

        async def note(seconds: float) -> None:
            waits.append(seconds)

        monkeypatch.setattr(tokens, "BRAKE_S", 0.25)
        monkeypatch.setattr(tokens.asyncio, "sleep", note)
        reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer guess\r\n\r\n" * 2)
        said = await reader.read()
        assert said.count(b"HTTP/1.1 401") == 1 and waits == [0.25]
        writer.close()

    tell(folder, story, RolloutFrontSettings(), token=KEY)


# Bodies


@pytest.mark.parametrize(
    "encoding, packed",
    [
        ("gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda data: zlib.compress(data, wbits=-15)),
        ("identity", lambda data: data),
    ],
)
def test_a_compressed_body_is_read(folder: ModelFolder, encoding: str, packed: Callable[[bytes], bytes]) -> None:
    async def story(found: FrontWorld) -> None:
        headers: dict[str, str | bytes] = {"Content-Encoding": encoding}
        assert (await found.ask("POST", COMPLETIONS, packed(b'{"prompt":[1]}'), headers))[0] == 200

    tell(folder, story)


@pytest.mark.parametrize(
    "encoding, body, status",
    [
        ("br", b"x", 415),
        ("gzip, gzip", gzip.compress(gzip.compress(b"{}")), 415),
        ("gzip", b"not gzip", 400),
        ("gzip", gzip.compress(b'{"prompt":[1]}')[:-9], 400),
        ("gzip", gzip.compress(bytes(8 << 20)), 413),
        ("deflate", b"\xff\xff", 400),
    ],
)
def test_a_body_that_cannot_be_decompressed_is_refused(
    folder: ModelFolder, encoding: str, body: bytes, status: int
) -> None:
    async def story(found: FrontWorld) -> None:
        assert (await found.ask("POST", COMPLETIONS, body, {"Content-Encoding": encoding}))[0] == status

    tell(folder, story)


def test_too_many_prompts_are_refused_before_any_is_tokenised(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(found: FrontWorld) -> None:
        for prompt, n in ((["a"] * 129, 1), (["a"] * 65, 2), ([[1]] * 129, 1)):
            status, answer = await found.post(COMPLETIONS, {"prompt": prompt, "n": n})
            assert status == 400 and "more than 128 choices" in answer["error"]["message"]

    def encode(*_: Any) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(folder.tokenizer, "encode", encode)
    monkeypatch.setattr(folder.tokenizer, "encode_many", encode)
    tell(folder, story)


LISTS = b"[" + b",".join([b"[]"] * CONTAINERS_MAX) + b"]"


def test_a_body_with_too_many_values_is_refused_before_it_is_decoded(folder: ModelFolder) -> None:
    async def story(found: FrontWorld) -> None:
        for body in (b'{"prompt":%s}' % LISTS, b'{"prompt":"x","a":%s}' % LISTS):
            status, answer = await found.post(COMPLETIONS, body)
            assert (status, answer["error"]["code"]) == (400, "body_too_complex")
        quoted = b'{"prompt":"%s","max_tokens":1}' % LISTS  # the same, but a text
        assert (await found.post(COMPLETIONS, quoted))[1]["error"]["code"] == "context_length_exceeded"

    tell(folder, story)


def test_arguments_with_too_many_values_are_refused_before_they_are_decoded(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    keep = tools._loaded

    def note(text: str) -> Any:
        decoded.append(len(text))
        return keep(text)

    monkeypatch.setattr(tools, "_loaded", note)

    async def story(found: FrontWorld) -> None:
        for arguments, status in (('{"a": 1}', 200), (f'{{"a": {LISTS.decode()}}}', 400)):
            call = {"function": {"name": "f", "arguments": arguments}}
            messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "x"}]
            body = {"messages": messages, "max_tokens": 1}
            assert (await found.post("/v1/chat/completions", body))[0] == status
        assert decoded == [8]

    tell(folder, story)


def test_no_more_text_is_detokenised_than_a_context_holds(folder: ModelFolder) -> None:
    async def story(found: FrontWorld) -> None:
        assert (await found.post("/detokenize", {"tokens": [97] * 64}))[1] == {"prompt": "a" * 64}
        status, answer = await found.post("/detokenize", {"tokens": [97] * 65})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

    tell(folder, story, context_tokens=64)


def test_a_suggestion_looks_at_the_beginning_of_a_name_only(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def note(name: str, *_: Any, **__: Any) -> list[str]:
        seen.append(name)
        return []

    monkeypatch.setattr(bodies.difflib, "get_close_matches", note)

    async def story(found: FrontWorld) -> None:
        assert (await found.post(COMPLETIONS, {"prompt": "x", "n" * 10_000: 1}))[0] == 400
        assert [len(name) for name in seen] == [bodies.NAME_SHOWN]

    tell(folder, story)


def test_an_error_does_not_repeat_the_whole_body(folder: ModelFolder) -> None:
    async def story(found: FrontWorld) -> None:
        status, answer = await found.post("/v1/chat/completions", {"messages": [{"role": "x" * 100_000}]})
        assert status == 400 and len(str(answer)) < 1000

    tell(folder, story)


@pytest.mark.parametrize(
    "settings, priority", [(FrontSettings(), 0), (FrontSettings(obey_priority=True), -5), (RolloutFrontSettings(), -5)]
)
def test_users_choose_a_priority_only_if_a_setting_lets_them(
    folder: ModelFolder, settings: FrontSettings, priority: int
) -> None:
    async def story(found: FrontWorld) -> None:
        assert (await found.post(COMPLETIONS, {"prompt": [1], "priority": -5}))[0] == 200
        assert (await found.post(GENERATE, {"token_ids": [1], "priority": -5}))[0] == 200
        assert [request.priority for request in found.engine.requests] == [priority] * 2

    tell(folder, story, settings)


# Connections


async def keep_alive(found: FrontWorld, *, key: str | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has asked once and stays."""
    reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
    header = f"Authorization: Bearer {key}\r\n" if key else ""
    path = "/v1/models" if key else "/health"
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head
    await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
    return reader, writer


def test_idle_connections_of_strangers_make_room_and_known_ones_stay(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "GRACE_S", 0.0)

    async def story(found: FrontWorld) -> None:
        known = [await keep_alive(found, key=KEY) for _ in range(2)]
        strangers = [await keep_alive(found) for _ in range(2)]
        newcomers = [await keep_alive(found, key=KEY) for _ in range(2)]
        for reader, _ in strangers:
            assert await reader.read() == b"", "closed"
        assert not any(reader.at_eof() for reader, _ in known)
        reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
        assert b"too_many_connections" in await reader.read(), "all places belong to known clients"
        for _, writer in known + strangers + newcomers:
            writer.close()

    tell(folder, story, api_key=KEY, most=4)


def test_a_refused_connection_makes_room_while_it_waits(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "GRACE_S", 0.0)
    monkeypatch.setattr(tokens, "BRAKE_S", 60.0)

    async def story(found: FrontWorld) -> None:
        guesses = [await asyncio.open_connection("127.0.0.1", found.port) for _ in range(2)]
        for _, writer in guesses:
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer guess\r\n\r\n")
        for _ in range(20):
            await asyncio.sleep(0.01)
        honest = [await keep_alive(found, key=KEY) for _ in range(2)]
        for _, writer in guesses + honest:
            writer.close()

    tell(folder, story, api_key=KEY, most=2)


def sleeper(port: int, body: bytes, path: str = COMPLETIONS) -> socket.socket:
    """A client that asks for much and reads nothing."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.connect(("127.0.0.1", port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    found.sendall(head.encode() + body)
    return found


async def until_cut(found: socket.socket) -> None:
    found.setblocking(False)
    async with asyncio.timeout(30):
        while not found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            await asyncio.sleep(0.02)
    found.close()


MUCH = b'{"prompt":[1],"n":16,"max_tokens":1000,"logprobs":20%s}'


@pytest.mark.parametrize("more", [b"", b',"stream":true'])
def test_a_client_that_does_not_read_is_cut_off(folder: ModelFolder, more: bytes) -> None:
    async def story(found: FrontWorld) -> None:
        await until_cut(sleeper(found.port, MUCH % more))
        assert (await found.ask("GET", "/health"))[0] == 200

    tell(folder, story, FrontSettings(slow_reader_s=0.2))


def test_a_client_that_reads_slowly_gets_everything(folder: ModelFolder) -> None:
    async def story(found: FrontWorld) -> None:
        loop, text = asyncio.get_running_loop(), "x" * 400_000
        body = b'{"prompt":"%s","return_token_strs":true}' % text.encode()  # the answer is one write of megabytes
        slow = await asyncio.to_thread(sleeper, found.port, body, "/tokenize")
        slow.setblocking(False)
        said = b""
        while b"\r\n\r\n" not in said:
            said += await loop.sock_recv(slow, 100)
        head, _, begin = said.partition(b"\r\n\r\n")
        left = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]) - len(begin)
        while left:
            wanted = min(left, 1 << 18)
            left -= wanted
            while wanted:
                count = len(await loop.sock_recv(slow, wanted))
                assert count, "cut off"
                wanted -= count
            await asyncio.sleep(0.1)
        slow.close()

    tell(folder, story, FrontSettings(slow_reader_s=0.3))


def test_what_waits_for_clients_is_bounded_over_all_of_them(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "UNSENT_BYTES_MAX", 1 << 18)

    async def story(found: FrontWorld) -> None:
        sleepers = [sleeper(found.port, MUCH % b"") for _ in range(4)]
        waiting = [asyncio.create_task(until_cut(each)) for each in sleepers]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert all(task.exception() is None for task in done), "whichever fell behind first is cut"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for each in sleepers:
            each.close()

    tell(folder, story, FrontSettings(slow_reader_s=600))


def test_a_connection_leaves_no_timer_behind(folder: ModelFolder) -> None:
    async def story(found: FrontWorld) -> None:
        made: list[Connection] = []
        keep = Connection.connection_made

        def note(connection: Connection, transport: asyncio.BaseTransport) -> None:
            made.append(connection)
            keep(connection, transport)

        Connection.connection_made = note  # type: ignore[method-assign]
        try:
            await found.ask("GET", "/health")
            async with asyncio.timeout(10):
                while made[0].transport is not None:
                    await asyncio.sleep(0.01)
        finally:
            Connection.connection_made = keep  # type: ignore[method-assign]
        assert made[0]._silence_timer is not None and made[0]._silence_timer.cancelled()

    tell(folder, story)


def test_fewer_connections_than_files(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    limits = {"now": (64, 300)}
    monkeypatch.setattr(ports.resource, "getrlimit", lambda kind: limits["now"])
    monkeypatch.setattr(ports.resource, "setrlimit", lambda kind, found: limits.update(now=found))
    assert ports.connections_limit(100, said.append) == 100 and not said
    assert limits["now"] == (300, 300), "the soft limit is raised"
    assert ports.connections_limit(1024, said.append) == 300 - ports.OTHER_DESCRIPTORS
    assert "1024" in said[0] and "ulimit -n" in said[0]


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return str(certificate), str(key)


def test_a_server_with_a_certificate_speaks_tls(folder: ModelFolder, certificate: tuple[str, str]) -> None:
    async def story(found: FrontWorld) -> None:
        context = ssl.create_default_context(cafile=certificate[0])
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", found.port, ssl=context, server_hostname="localhost"
        )
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b" 200 " in await reader.readline()
        writer.close()

    tell(folder, story, FrontSettings(ssl_certfile=certificate[0], ssl_keyfile=certificate[1]))


@pytest.mark.parametrize("settings", [{"ssl_keyfile": "key"}, {"ssl_certfile": "nowhere.pem"}])
def test_a_certificate_that_cannot_be_used_is_said(settings: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        ports.tls_context(FrontSettings(**settings))
