"""The client of a relay server: reads that are cut off, connections that were closed, servers that lie."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from tests.contract.relays import SECRET
from tests.unit.weights.test_relay_server import BLOB
from tests.unit.weights.test_relay_strangers import is_cut

from rose.errors import Unavailable
from rose.weights.relay import relay_api, relay_client
from rose.weights.relay.memory_relay import MemoryRelay
from rose.weights.relay.relay_api import split_address
from rose.weights.relay.relay_base import KeyMissing
from rose.weights.relay.relay_client import HttpRelay
from rose.weights.relay.relay_server import RelayServer


class Cable:
    """A man in the middle: passes bytes on, and cuts or changes them on order."""

    def __init__(self, address: str) -> None:
        self._target = split_address(address)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut_after_bytes: list[int] = []  # of what the server sends, connection by connection
        self.change_at: int | None = None  # a byte of what the client sends
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            far = socket.create_connection(self._target)
            limit = self.cut_after_bytes.pop(0) if self.cut_after_bytes else None
            threading.Thread(target=self._pass, args=(near, far, None, self.change_at), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, limit, None), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, limit: int | None, change_at: int | None) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                if change_at is not None and passed <= change_at < passed + len(data):
                    data[change_at - passed] ^= 1
                if limit is not None and passed + len(data) >= limit:
                    sink.sendall(data[: limit - passed])
                    break
                sink.sendall(data)
                passed += len(data)
        for side in (source, sink):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def cable(served):
    made = Cable(served.address)
    yield made
    made.close()


def test_a_read_that_is_cut_goes_on_where_it_stopped(relay, cable):
    relay.put_new("a", [BLOB])
    through = HttpRelay(cable.address, SECRET)
    cable.cut_after_bytes = [1_000_000, 1_500_000, 700_000]
    assert bytes(through.get("a")) == BLOB
    assert cable.connections == 4
    cable.cut_after_bytes = [500_000]
    through.close()
    assert bytes(through.get("a", 1000, 2_000_000)) == BLOB[1000:2_000_000]


def test_a_read_that_gets_nowhere_ends(relay, cable):
    relay.put_new("a", [BLOB])
    through = HttpRelay(cable.address, SECRET)
    cable.cut_after_bytes = [1_000_000] + [32] * 100
    with pytest.raises(Unavailable, match="failed"):
        through.get("a")


def test_a_write_that_is_cut_leaves_nothing(relay, cable):
    def buffers():
        for number in range(100):
            if number == 50:
                cable.close()
                for connection in list(through._idle):
                    connection.close()
                raise OSError("the cable was cut")
            yield BLOB[:10000]

    through = HttpRelay(cable.address, SECRET)
    with pytest.raises(OSError, match="cable"):
        through.put_new("a", buffers())
    with pytest.raises(KeyMissing):
        relay.get("a")


def test_a_connection_that_the_server_closed_is_not_used_again(inner):
    with RelayServer(inner, SECRET) as first:
        relay = HttpRelay(first.address, SECRET)
        relay.put_new("a", [b"1"])
        port = split_address(first.address)[1]
    with RelayServer(inner, SECRET, port=port):
        assert bytes(relay.get("a")) == b"1"
        relay.put_new("b", [b"2"])
    with pytest.raises(Unavailable, match="no connection"):
        relay.get("a")


@contextlib.contextmanager
def lying_server(answer: bytes) -> Iterator[str]:
    """A server that answers each request with these bytes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = listener.accept()
                with plain:
                    plain.recv(65536)
                    plain.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def response(status: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode() + body


SIZES = [(None, 1 << 62), (None, relay_api.VALUE_BYTES_MAX + 1), (10, 11), (10, 9)]
PAGES = [
    b'{"values":[],"is_last":false}',
    b'{"values":[{"key":"b","size_bytes":1},{"key":"a","size_bytes":1}],"is_last":true}',
    b'{"values":[{"key":"a","size_bytes":1},{"key":"a","size_bytes":1}],"is_last":true}',
]


BODIES = [
    response("200 OK", "Content-Length: 5", body=b"{\xff\xfe}"),
    response("200 OK", "Content-Length: 5000", body=b"[" * 5000),
    response("200 OK", "Content-Length: 27", body=b'{"values":[{"key":1,"size"}'),
    response("503 Busy", "Content-Length: 0"),
    response("502 Bad Gateway", "Content-Length: 6", body=b"<html>"),
    response("507 Full", "Transfer-Encoding: chunked", body=b"zz\r\n"),
    b"HTTP/1.1 200 OK\r\n" + b"x" * 100_000,
    b"\x00" * 1000,
    b"",
]


def test_an_idle_connection_is_closed_and_its_client_opens_another(inner: MemoryRelay) -> None:
    inner.put_new("a", [b"value"])
    with RelayServer(inner, SECRET, idle_s=0.1) as served:
        relay = HttpRelay(served.address, SECRET)
        assert relay.list()
        (idle,) = relay._idle
        assert is_cut(idle.sock)
        assert relay.list() and relay._idle != [idle]
        relay.close()


@pytest.mark.parametrize(("stop", "announced"), SIZES)
def test_a_size_beyond_the_limit_or_the_range_is_refused_before_memory_is_taken(
    stop: int | None, announced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []
    monkeypatch.setattr(relay_client.np, "empty", lambda *shape: taken.append(shape))
    with lying_server(response("200 OK", f"Content-Length: {announced}")) as address:
        with pytest.raises(Unavailable, match="announced"):
            HttpRelay(address, SECRET).get("a", 0, stop)
    assert not taken


@pytest.mark.parametrize("page", PAGES, ids=["empty", "out of order", "repeated"])
def test_a_listing_without_an_end_or_order_is_refused(page: bytes) -> None:
    with lying_server(response("200 OK", f"Content-Length: {len(page)}", body=page)) as address:
        with pytest.raises(Unavailable, match="listing"):
            HttpRelay(address, SECRET).list()


@pytest.mark.parametrize("answer", BODIES, ids=range(len(BODIES)))
def test_a_response_that_makes_no_sense_is_unavailable(answer: bytes) -> None:
    with lying_server(answer) as address:
        for call in (HttpRelay.list, lambda relay: relay.put_new("a", [b"x"]), lambda relay: relay.get("a", 3, 3)):
            with pytest.raises(Unavailable):
                call(HttpRelay(address, SECRET))


def test_a_body_without_an_end_is_read_up_to_the_limit() -> None:
    endless = response("200 OK", f"Content-Length: {1 << 40}", body=bytes(relay_api.MESSAGE_BYTES_MAX + 10))
    with lying_server(endless) as address, pytest.raises(Unavailable, match="too long"):
        HttpRelay(address, SECRET).list()
