"""What a client without a token, with a reader's token only, or with hostile requests can do to a relay server."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from pathlib import Path

import pytest
from tests.contract.relays import SECRET

from rose.errors import RequestRefused, Unavailable
from rose.weights.keys import for_reading
from rose.weights.relay.filesystem import FilesystemRelay
from rose.weights.relay.memory_relay import MemoryRelay
from rose.weights.relay.relay_api import Role, role_token, split_address
from rose.weights.relay.relay_client import HttpRelay
from rose.weights.relay.relay_server import RelayServer

NEVER_S = 600.0  # a limit that no test waits for


@pytest.fixture
def inner() -> MemoryRelay:
    relay = MemoryRelay()
    relay.put_new("a", [b"value"])
    return relay


def connect(served: RelayServer) -> socket.socket:
    return socket.create_connection(split_address(served.address), timeout=30)


def head(method: str, target: str, role: Role = "writer", *more: str) -> bytes:
    token = role_token(SECRET if role == "writer" else for_reading(SECRET))[1]
    lines = [f"{method} {target} HTTP/1.1", "Host: relay", f"Authorization: Bearer {token}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def authenticated(served: RelayServer, role: Role = "writer") -> socket.socket:
    """Return a connection that has shown the token of this role."""
    plain = connect(served)
    plain.sendall(head("GET", "/v1/values?prefix=none", role))
    assert plain.recv(4096).startswith(b"HTTP/1.1 200")
    return plain


def is_cut(plain: socket.socket) -> bool:
    """Wait until the server ends the connection; False if it sends something instead."""
    try:
        return plain.recv(1) == b""
    except ConnectionResetError:
        return True


REQUESTS = [
    (b"GET /v1/values/%61 HTTP/1.1", 400),
    (b"GET /v1/values/../../etc/passwd HTTP/1.1", 400),
    (b"GET /v1/values/x/../a HTTP/1.1", 400),
    (b"DELETE /v1/values/ HTTP/1.1", 400),
    (b"DELETE /v1/values/%2e%2e/a HTTP/1.1", 400),
    (b"DELETE /v1/values//a HTTP/1.1", 400),
    (b"DELETE /v1/values/" + b"a" * 1000 + b" HTTP/1.1", 400),
    (b"DELETE /v1/values/\xff\xfe HTTP/1.1", 400),
    (b"GET /v1/values?prefix=../ HTTP/1.1", 400),
    (b"GET /v1/values?" + b"&".join(b"prefix=a" for _ in range(100)) + b" HTTP/1.1", 400),
    (b"GET /v1/values?prefix=%00 HTTP/1.1", 400),
    (b"GET /v2/values/a HTTP/1.1", 400),
    (b"POST /v1/values/a HTTP/1.1", 400),
    (b"BREW /v1/values/a HTTP/1.1", 400),
]


def test_a_reader_may_read_and_change_nothing(inner: MemoryRelay) -> None:
    with RelayServer(inner, SECRET) as served:
        reader = HttpRelay(served.address, for_reading(SECRET))
        assert bytes(reader.get("a")) == b"value" and [entry.key for entry in reader.list()] == ["a"]
        for change in (lambda: reader.put_new("b", [b"x"]), lambda: reader.delete("a")):
            with pytest.raises(RequestRefused, match="read key"):
                change()
        assert [entry.key for entry in inner.list()] == ["a"]
        reader.close()


@pytest.mark.parametrize("size", [1, 3 << 20])
def test_the_readers_token_does_not_write(inner: MemoryRelay, size: int) -> None:
    with RelayServer(inner, SECRET) as served, connect(served) as plain:
        more = ("If-None-Match: *", f"Content-Length: {size}")
        plain.sendall(head("PUT", "/v1/values/b", "reader", *more) + bytes(size))
        assert plain.recv(100).startswith(b"HTTP/1.1 400")
    assert [entry.key for entry in inner.list()] == ["a"]


def test_readers_never_take_the_places_of_writers(inner: MemoryRelay) -> None:
    with RelayServer(inner, SECRET, connections_max=1) as served:
        reader = authenticated(served, "reader")
        with pytest.raises(Unavailable, match="too many connections"):
            HttpRelay(served.address, for_reading(SECRET)).list()
        writer = HttpRelay(served.address, SECRET)
        assert writer.put_new("b", [b"x"]) == 1
        writer.close()
        reader.close()


@pytest.mark.parametrize(("line", "status"), REQUESTS, ids=range(len(REQUESTS)))
def test_a_request_that_makes_no_sense_is_refused_in_words(
    inner: MemoryRelay, line: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), RelayServer(inner, SECRET) as served:
        with connect(served) as plain:
            plain.sendall(line + head("GET", "/").partition(b"HTTP/1.1")[2])
            assert plain.recv(1000).split(b" ")[1] == b"%d" % status
        honest = HttpRelay(served.address, SECRET)
        assert bytes(honest.get("a")) == b"value"
        honest.close()
    assert not caplog.records, "nothing failed that was not foreseen"


@pytest.mark.parametrize("text", [b"Bearer \xff\xfe", b"Bearer " + b"x" * 5000, b"Bearer", b"", b"\x80"])
def test_a_header_that_is_no_token_is_refused(inner: MemoryRelay, text: bytes) -> None:
    with RelayServer(inner, SECRET) as served, connect(served) as plain:
        plain.sendall(b"GET /v1/values HTTP/1.1\r\nHost: relay\r\nAuthorization: " + text + b"\r\n\r\n")
        assert plain.recv(1000)[:12] in (b"HTTP/1.1 401", b"HTTP/1.1 400")


def test_a_stranger_that_sends_byte_by_byte_is_cut_off_before_it_has_said_all(inner: MemoryRelay) -> None:
    hello = b"GET /v1/values HTTP/1.1\r\nHost: relay\r\n\r\n"
    with RelayServer(inner, SECRET, first_token_s=0.2) as served, connect(served) as plain:
        said = 0
        with contextlib.suppress(OSError):
            for byte in hello:
                plain.sendall(bytes([byte]))
                said += 1
                time.sleep(0.05)  # in time for each byte, but not for all of them
        assert said < len(hello)


def test_a_stranger_that_never_begins_tls_is_cut_off(inner: MemoryRelay) -> None:
    import ssl

    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with RelayServer(inner, SECRET, tls=tls, first_token_s=0.2) as served, connect(served) as plain:
        assert is_cut(plain)


def test_strangers_take_no_place_of_those_that_hold_a_key(inner: MemoryRelay) -> None:
    with RelayServer(inner, SECRET, first_token_s=NEVER_S, unauthenticated_max=3, connections_max=2) as served:
        before = HttpRelay(served.address, SECRET)
        assert before.list()
        strangers = [connect(served) for _ in range(10)]
        late = HttpRelay(served.address, SECRET)
        assert late.list() and before.list()
        assert all(is_cut(stranger) for stranger in strangers[:7]), "the oldest made room"
        for part in (*strangers, before, late):
            part.close()


def test_the_server_goes_on_after_accept_failed(inner: MemoryRelay) -> None:
    with RelayServer(inner, SECRET) as served:
        accept = served._loop.sock_accept
        failures = [OSError(24, "Too many open files")]

        async def failing(listener: socket.socket) -> tuple[socket.socket, object]:
            if failures:
                raise failures.pop()
            return await accept(listener)

        served._loop.sock_accept = failing  # type: ignore[method-assign]
        for _ in range(2):
            relay = HttpRelay(served.address, SECRET)
            assert relay.list()
            relay.close()
        assert not failures


def test_a_stranger_that_was_refused_keeps_no_place(inner: MemoryRelay) -> None:
    with RelayServer(inner, SECRET, first_token_s=NEVER_S) as served, connect(served) as plain:
        plain.sendall(b"GET /v1/values HTTP/1.1\r\nHost: relay\r\n\r\n")
        while plain.recv(1000):
            pass  # until the server closes it


def test_files_with_names_that_are_no_keys_do_not_stop_a_listing(tmp_path: Path) -> None:
    relay = FilesystemRelay(tmp_path)
    relay.put_new("run/a", [b"x"])
    (tmp_path / "run" / os.fsdecode(b"not utf-8 \xff")).write_bytes(b"")
    (tmp_path / "run" / ("long" * 50) / ("long" * 50) / ("long" * 50)).mkdir(parents=True)
    (tmp_path / "run" / ("long" * 50) / ("long" * 50) / ("long" * 50) / "file").write_bytes(b"")
    with RelayServer(relay, SECRET) as served:
        client = HttpRelay(served.address, SECRET)
        assert [entry.key for entry in client.list()] == ["run/a"]
        client.close()
