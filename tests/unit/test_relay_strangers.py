"""What a client without a key, with a reader's key only, or on the path between two others can do to a relay server."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.contract.relays import SECRET

from rose.errors import RequestRefused, Unavailable
from rose.weights.keys import for_reading, read_key, write_key
from rose.weights.relay import tcp, wire
from rose.weights.relay.filesystem import FilesystemRelay
from rose.weights.relay.memory import MemoryRelay
from rose.weights.relay.server import RelayServer
from rose.weights.relay.tcp import TcpRelay, split_address

NEVER_S = 600.0  # a limit that no test waits for


@pytest.fixture
def inner() -> MemoryRelay:
    relay = MemoryRelay()
    relay.put_new("a", [b"value"])
    return relay


def connect(served: RelayServer) -> socket.socket:
    return socket.create_connection(split_address(served.address), timeout=30)


def greet(served: RelayServer, role: wire.Role = "writer") -> wire.Connection:
    key = write_key(SECRET).relay if role == "writer" else read_key(SECRET).relay
    plain = connect(served)
    connection = wire.greet(plain, role, key)
    plain.settimeout(30)
    return connection


def is_cut(plain: socket.socket) -> bool:
    """Wait until the server ends the connection; False if it sends something instead."""
    try:
        return plain.recv(1) == b""
    except ConnectionResetError:
        return True


# Roles


def test_a_reader_may_read_and_change_nothing(inner: MemoryRelay) -> None:
    with RelayServer(inner, SECRET) as served:
        reader = TcpRelay(served.address, for_reading(SECRET))
        assert bytes(reader.get("a")) == b"value" and [entry.key for entry in reader.list()] == ["a"]
        for change in (lambda: reader.put_new("b", [b"x"]), lambda: reader.delete("a")):
            with pytest.raises(RequestRefused, match="read key"):
                change()
        assert [entry.key for entry in inner.list()] == ["a"]
        reader.close()


def test_the_readers_key_does_not_prove_the_writers_role(inner: MemoryRelay) -> None:
    with RelayServer(inner, SECRET) as served, connect(served) as plain, pytest.raises(wire.Stranger):
        wire.greet(plain, "writer", read_key(SECRET).relay)


def test_readers_never_take_the_places_of_writers(inner: MemoryRelay) -> None:
    with RelayServer(inner, SECRET, connections_max=1) as served:
        reader = greet(served, "reader")
        with pytest.raises(Unavailable, match="too many connections"):
            TcpRelay(served.address, for_reading(SECRET)).list()
        writer = TcpRelay(served.address, SECRET)
        assert writer.put_new("b", [b"x"]) == 1
        writer.close()
        reader.close()


# Messages


def test_a_message_without_the_right_hmac_is_not_obeyed(inner: MemoryRelay) -> None:
    with RelayServer(inner, SECRET) as served:
        connection = greet(served)
        body = msgspec.msgpack.encode(wire.Delete("a"))
        forged = len(body).to_bytes(wire.LENGTH_BYTES, "little") + bytes(wire.DIGEST_BYTES) + body
        connection.send_bytes(forged)
        with pytest.raises(wire.Disconnected):
            connection.receive_answer()
    assert [entry.key for entry in inner.list()] == ["a"]


def test_a_message_that_is_repeated_is_not_obeyed(inner: MemoryRelay) -> None:
    """A stranger on the path sends the bytes of an earlier message again."""
    sent: list[bytes] = []
    with RelayServer(inner, SECRET) as served:
        connection = greet(served)
        send = connection.send_bytes
        connection.send_bytes = lambda data: (sent.append(bytes(data)), send(data))[1]  # type: ignore[method-assign]
        connection.send(wire.Delete("a"))
        assert connection.receive_answer() == wire.Done(1)
        inner.put_new("a", [b"again"])
        send(sent[0])
        with pytest.raises(wire.Disconnected):
            connection.receive_answer()
    assert [entry.key for entry in inner.list()] == ["a"]


BODIES = [
    b"\x92\xa6Delete\xa1\xff",  # not UTF-8
    b"\x92\xa6Delete\xc0",
    b"\x94\xa3Get\xa1a\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xc0",  # 2**64 - 1
    b"\x93\xa6Delete\xa1a" + b"\x91" * 5000 + b"\xc0",  # nested deeply
    b"\x92\xa6Delete\xda\x03\xe8" + b"a" * 1000,  # a key of 1,000 characters
    b"",
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_message_that_makes_no_sense_ends_its_connection_only(
    inner: MemoryRelay, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), RelayServer(inner, SECRET) as served:
        connection = greet(served)
        tag = connection._tag(b"client", 0, body)
        connection.send_bytes(len(body).to_bytes(wire.LENGTH_BYTES, "little") + tag + body)
        with pytest.raises(wire.Disconnected):
            connection.receive_answer()
        honest = TcpRelay(served.address, SECRET)
        assert bytes(honest.get("a")) == b"value"
        honest.close()
    assert not caplog.records, "nothing failed that was not foreseen"


# Places


def test_a_stranger_that_sends_byte_by_byte_is_cut_off_before_it_has_said_all(inner: MemoryRelay) -> None:
    hello = wire.MAGIC + b"r" + bytes(wire.NONCE_BYTES)
    with RelayServer(inner, SECRET, welcome_s=0.2) as served, connect(served) as plain:
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
    with RelayServer(inner, SECRET, tls=tls, welcome_s=0.2) as served, connect(served) as plain:
        assert is_cut(plain)


def test_strangers_take_no_place_of_those_that_hold_a_key(inner: MemoryRelay) -> None:
    with RelayServer(inner, SECRET, welcome_s=NEVER_S, strangers_max=3, connections_max=2) as served:
        before = TcpRelay(served.address, SECRET)
        assert before.list()
        strangers = [connect(served) for _ in range(10)]
        late = TcpRelay(served.address, SECRET)
        assert late.list() and before.list()
        assert all(is_cut(stranger) for stranger in strangers[:7]), "the oldest made room"
        for part in (*strangers, before, late):
            part.close()


def test_an_idle_connection_is_closed_and_its_client_opens_another(inner: MemoryRelay) -> None:
    with RelayServer(inner, SECRET, idle_s=0.1) as served:
        relay = TcpRelay(served.address, SECRET)
        assert relay.list()
        (idle,) = relay._idle
        assert is_cut(idle._socket)
        assert relay.list() and relay._idle != [idle]
        relay.close()


def test_the_server_goes_on_after_accept_failed(inner: MemoryRelay) -> None:
    with RelayServer(inner, SECRET) as served:
        listener = served._listener
        failures = [OSError(24, "Too many open files")]

        class Failing:
            def accept(self) -> tuple[socket.socket, object]:
                if failures:
                    raise failures.pop()
                return listener.accept()

            def __getattr__(self, name: str) -> object:
                return getattr(listener, name)

        served._listener = Failing()  # type: ignore[assignment]
        for _ in range(2):
            relay = TcpRelay(served.address, SECRET)
            assert relay.list()
            relay.close()
        assert not failures


def test_files_with_names_that_are_no_keys_do_not_stop_a_listing(tmp_path: Path) -> None:
    relay = FilesystemRelay(tmp_path)
    relay.put_new("run/a", [b"x"])
    (tmp_path / "run" / os.fsdecode(b"not utf-8 \xff")).write_bytes(b"")
    (tmp_path / "run" / ("long" * 50) / ("long" * 50) / ("long" * 50)).mkdir(parents=True)
    (tmp_path / "run" / ("long" * 50) / ("long" * 50) / ("long" * 50) / "file").write_bytes(b"")
    with RelayServer(relay, SECRET) as served:
        client = TcpRelay(served.address, SECRET)
        assert [entry.key for entry in client.list()] == ["run/a"]
        client.close()


# Servers that lie


@contextlib.contextmanager
def lying_server(answer: Callable[[wire.Request], wire.Answer]) -> Iterator[str]:
    """A server that holds the keys and answers each request with what it is told to."""
    listener = socket.create_server(("127.0.0.1", 0))
    made = write_key(SECRET)

    def serve() -> None:
        with contextlib.suppress(OSError, wire.Disconnected):
            while True:
                plain, _ = listener.accept()
                keys: dict[wire.Role, bytes] = {"reader": made.read.relay, "writer": made.relay}
                connection, _ = wire.welcome(plain, keys, time.monotonic() + 30, lambda role: True)
                with contextlib.suppress(wire.Disconnected):
                    while True:
                        connection.send(answer(connection.receive_request()))

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


@pytest.mark.parametrize(("stop", "announced"), [(None, 1 << 62), (None, tcp.VALUE_BYTES_MAX + 1), (10, 11), (10, 9)])
def test_a_size_beyond_the_limit_or_the_range_is_refused_before_memory_is_taken(
    stop: int | None, announced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []
    monkeypatch.setattr(tcp.np, "empty", lambda *shape: taken.append(shape))
    with lying_server(lambda request: wire.Done(announced)) as address:
        with pytest.raises(Unavailable, match="announced"):
            TcpRelay(address, SECRET).get("a", 0, stop)
    assert not taken


PAGES = [wire.Page([], False), wire.Page([("a", 1)], False), wire.Page([("b", 1), ("a", 1)], True)]


@pytest.mark.parametrize("page", PAGES, ids=["empty", "repeated", "out of order"])
def test_a_listing_without_an_end_or_order_is_refused(page: wire.Page) -> None:
    with lying_server(lambda request: page) as address, pytest.raises(Unavailable, match="listing"):
        TcpRelay(address, SECRET).list()
