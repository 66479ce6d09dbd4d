"""Our own relay over TCP: strangers, cut connections, TLS, limits. The rest is in the contract suite."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading

import pytest
from tests.contract.relays import SECRET

from rose.errors import ConfigError, Unavailable
from rose.weights.keys import read_key, write_key
from rose.weights.relay import server, wire
from rose.weights.relay.base import KeyMissing
from rose.weights.relay.filesystem import FilesystemRelay
from rose.weights.relay.memory import MemoryRelay
from rose.weights.relay.server import RelayServer
from rose.weights.relay.tcp import TcpRelay, split_address

BLOB = bytes(range(256)) * 16384  # 4 MiB


@pytest.fixture
def inner():
    return MemoryRelay()


@pytest.fixture
def served(inner):
    with RelayServer(inner, SECRET, silence_s=5) as running:
        yield running


@pytest.fixture
def relay(served):
    client = TcpRelay(served.address, SECRET)
    yield client
    client.close()


def greet(served: RelayServer, role: wire.Role = "writer") -> wire.Connection:
    """A connection that has proved its role, without the client around it."""
    key = write_key(SECRET).relay if role == "writer" else read_key(SECRET).relay
    return wire.greet(socket.create_connection(split_address(served.address), timeout=10), role, key)


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
    through = TcpRelay(cable.address, SECRET)
    cable.cut_after_bytes = [1_000_000, 1_500_000, 700_000]
    assert bytes(through.get("a")) == BLOB
    assert cable.connections == 4
    cable.cut_after_bytes = [500_000]
    through.close()
    assert bytes(through.get("a", 1000, 2_000_000)) == BLOB[1000:2_000_000]


def test_a_read_that_gets_nowhere_ends(relay, cable):
    relay.put_new("a", [BLOB])
    through = TcpRelay(cable.address, SECRET)
    cable.cut_after_bytes = [1_000_000] + [wire.NONCE_BYTES] * 100
    with pytest.raises(Unavailable, match="failed"):
        through.get("a")


def test_a_write_that_is_cut_leaves_nothing(relay, cable):
    def chunks():
        for number in range(100):
            if number == 50:
                cable.close()
                for connection in list(through._idle):
                    connection.close()
                raise OSError("the cable was cut")
            yield BLOB[:10000]

    through = TcpRelay(cable.address, SECRET)
    with pytest.raises(OSError, match="cable"):
        through.put_new("a", chunks())
    with pytest.raises(KeyMissing):
        relay.get("a")


def test_a_connection_that_the_server_closed_is_not_used_again(inner):
    with RelayServer(inner, SECRET) as first:
        relay = TcpRelay(first.address, SECRET)
        relay.put_new("a", [b"1"])
        port = split_address(first.address)[1]
    with RelayServer(inner, SECRET, port=port):
        assert bytes(relay.get("a")) == b"1"
        relay.put_new("b", [b"2"])
    with pytest.raises(Unavailable, match="no connection"):
        relay.get("a")


# Strangers


def test_a_client_without_the_secret_is_shown_the_door(served, relay):
    relay.put_new("a", [b"private"])
    stranger = TcpRelay(served.address, b"not the secret of the tests")
    with pytest.raises(ConfigError, match="refused the key of this writer"):
        stranger.get("a")


def test_a_server_without_the_secret_learns_nothing(inner):
    with RelayServer(inner, b"the secret of somebody else") as impostor:
        relay = TcpRelay(impostor.address, SECRET)
        with pytest.raises(ConfigError, match="refused the key"):
            relay.put_new("a", [b"private"])
    assert list(inner.list()) == []


@pytest.mark.parametrize("role", [b"r", b"w", b"x"])
def test_a_stranger_receives_nothing_that_depends_on_a_key(served, role):
    """Whatever it sends, it gets random bytes and a refusal: nothing to guess the secret against offline."""
    with socket.create_connection(split_address(served.address), timeout=10) as plain:
        plain.sendall(wire.MAGIC + role + bytes(wire.NONCE_BYTES + wire.DIGEST_BYTES))
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := plain.recv(1000):
                received += data
    assert len(received) in (0, wire.NONCE_BYTES + wire.VERDICT_BYTES)
    assert received[wire.NONCE_BYTES :] in (b"", wire.REFUSED)


def test_a_server_that_does_not_know_the_key_is_not_believed():
    """It admits every client, and reflects the client's own proof, the oldest trick there is."""
    listener = socket.create_server(("127.0.0.1", 0))

    def admit() -> None:
        plain, _ = listener.accept()
        plain.recv(len(wire.MAGIC) + 1 + wire.NONCE_BYTES, socket.MSG_WAITALL)
        plain.sendall(bytes(wire.NONCE_BYTES))
        plain.sendall(wire.ADMITTED + plain.recv(wire.DIGEST_BYTES, socket.MSG_WAITALL))

    threading.Thread(target=admit, daemon=True).start()
    with pytest.raises(ConfigError, match="does not know the relay's secret"):
        TcpRelay(f"127.0.0.1:{listener.getsockname()[1]}", SECRET).get("a")
    listener.close()


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\nHost: relay\r\n\r\n" + bytes(64), bytes(100)])
def test_somebody_who_speaks_something_else_is_cut_off(served, relay, hello):
    with socket.create_connection(split_address(served.address), timeout=10) as plain:
        plain.sendall(hello)
        with contextlib.suppress(ConnectionResetError):
            assert plain.recv(100) == b""
    relay.put_new("a", [b"still here"])
    assert bytes(relay.get("a")) == b"still here"


def test_a_changed_request_is_not_obeyed(served, relay, cable):
    relay.put_new("a", [b"1"])
    greeting = len(wire.MAGIC) + 1 + wire.NONCE_BYTES + wire.DIGEST_BYTES
    for position in range(8):
        cable.change_at = greeting + wire.LENGTH_BYTES + wire.DIGEST_BYTES + position
        with pytest.raises(Unavailable):
            TcpRelay(cable.address, SECRET).delete("a")
    assert bytes(relay.get("a")) == b"1"


def test_a_message_of_absurd_length_ends_the_connection(served):
    connection = greet(served)
    connection.send_bytes(b"\xff" * (wire.LENGTH_BYTES + wire.DIGEST_BYTES))
    with pytest.raises(wire.Disconnected):
        connection.receive_answer()


def test_a_block_of_absurd_length_ends_the_put(served, inner):
    connection = greet(served)
    connection.send(wire.Put("a"))
    assert isinstance(connection.receive_answer(), wire.Done)
    connection.send_bytes((wire.BLOCK_BYTES + 1).to_bytes(wire.LENGTH_BYTES, "little"))
    with pytest.raises(wire.Disconnected):
        connection.receive_answer()
    assert list(inner.list()) == []


# Limits


def test_a_reader_that_takes_nothing_is_cut_off_and_others_go_on(inner):
    with RelayServer(inner, SECRET, silence_s=0.2) as served:
        inner.put_new("a", [bytes(64 << 20)])
        stuck = greet(served)
        stuck.send(wire.Get("a", 0, None))
        assert isinstance(stuck.receive_answer(), wire.Done)
        quick = TcpRelay(served.address, SECRET)
        assert len(quick.get("a", 0, 1000)) == 1000
        threads = [thread for thread in threading.enumerate() if thread.name == "relay-connection"]
        quick.close()
        for thread in threads:
            thread.join(timeout=30)
        assert not any(thread.is_alive() for thread in threads)


def test_more_connections_than_allowed_are_refused(inner):
    with RelayServer(inner, SECRET, connections_max=2) as served:
        kept = [greet(served) for _ in range(2)]
        with pytest.raises(Unavailable, match="no welcome"):
            TcpRelay(served.address, SECRET).list()
        for connection in kept:
            connection.close()


def test_a_listing_of_many_keys_comes_in_pages(relay, inner, monkeypatch):
    monkeypatch.setattr(wire, "PAGE_ENTRIES_MAX", 7)
    for number in range(50):
        inner.put_new(f"run/{number:03}", [b"x"])
    assert [entry.key for entry in relay.list("run")] == [f"run/{number:03}" for number in range(50)]
    assert [entry.key for entry in relay.list()] == [f"run/{number:03}" for number in range(50)]


def test_a_short_secret_is_refused(inner):
    with pytest.raises(ConfigError, match="at least"):
        TcpRelay("127.0.0.1:1", b"short")
    with pytest.raises(ConfigError, match="at least"):
        RelayServer(inner, b"")


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:99999", "host:port"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match="not an address"):
        TcpRelay(address, SECRET)


def test_a_taken_port_is_told(served):
    host, port = split_address(served.address)
    with pytest.raises(ConfigError, match="cannot listen"):
        RelayServer(MemoryRelay(), SECRET, host=host, port=port)


def test_the_program_says_what_is_wrong(tmp_path, capsys):
    assert server.main([str(tmp_path), "--secret-file", str(tmp_path / "none")]) == 2
    assert "openssl rand" in capsys.readouterr().err
    (tmp_path / "secret").write_bytes(SECRET)
    options = [str(tmp_path), "--secret-file", str(tmp_path / "secret"), "--certificate", "only.pem"]
    assert server.main(options) == 1
    assert "--key" in capsys.readouterr().err


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, "-out", made, "-keyout", key], check=True, capture_output=True, timeout=60)
    return str(made), str(key)


def test_tls_both_ways(certificate, tmp_path):
    folder = FilesystemRelay(tmp_path)
    with RelayServer(folder, SECRET, tls=wire.server_tls(*certificate)) as served:
        relay = TcpRelay(served.address, SECRET, tls=wire.client_tls(certificate[0]))
        relay.put_new("a", [BLOB])
        assert bytes(relay.get("a")) == BLOB
        assert [entry.key for entry in relay.list()] == ["a"]
        with pytest.raises(ConfigError, match="not trusted"):
            TcpRelay(served.address, SECRET, tls=wire.client_tls()).list()
        with pytest.raises(Unavailable, match="no welcome"):
            TcpRelay(served.address, SECRET).list()
        with pytest.raises(ConfigError, match="secret"):
            TcpRelay(served.address, b"another secret, long enough", tls=wire.client_tls(certificate[0])).list()
        relay.close()


def test_certificates_that_are_none_are_told(tmp_path):
    with pytest.raises(ConfigError, match="cannot use"):
        wire.server_tls(str(tmp_path / "none"), str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be used"):
        wire.client_tls(str(tmp_path / "none"))
