"""Our own relay server: cut connections, tokens, TLS, limits. The rest is in the contract suite."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time

import pytest
from tests.contract.relays import SECRET

from rose.cli.main import main
from rose.errors import ConfigError, RequestRefused, Unavailable
from rose.weights.keys import for_reading
from rose.weights.relay import relay_api, relay_server
from rose.weights.relay.filesystem import FilesystemRelay
from rose.weights.relay.memory_relay import MemoryRelay
from rose.weights.relay.relay_api import Role, client_tls, role_token, server_tls, split_address
from rose.weights.relay.relay_base import KeyExists, KeyMissing
from rose.weights.relay.relay_client import HttpRelay
from rose.weights.relay.relay_server import RelayServer

BLOB = bytes(range(256)) * 16384  # 4 MiB


def connect(served: RelayServer) -> socket.socket:
    return socket.create_connection(split_address(served.address), timeout=10)


def head(method: str, target: str, role: Role = "writer", *more: str) -> bytes:
    """Return a request without its body, as a client with the key of this role begins it."""
    token = role_token(SECRET if role == "writer" else for_reading(SECRET))[1]
    lines = [f"{method} {target} HTTP/1.1", "Host: relay", f"Authorization: Bearer {token}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def exchange(plain: socket.socket, request: bytes) -> tuple[int, bytes]:
    """Send a request; return the status and all that follows the status line until it ends or pauses."""
    plain.sendall(request)
    received = b""
    with contextlib.suppress(TimeoutError, ConnectionResetError):
        while b"\r\n\r\n" not in received and (data := plain.recv(65536)):
            received += data
    line, _, rest = received.partition(b"\r\n")
    return int(line.split(b" ")[1]) if line else 0, rest


LENGTHS = [str(relay_api.VALUE_BYTES_MAX + 1), "9" * 30, "-1", "1e3", ""]


def served_is_left(served: RelayServer) -> bool:
    """Wait until the server has no open connection."""
    for _ in range(600):
        if all(plain.fileno() < 0 for admitted in served._admitted.values() for plain in admitted.values()):
            return True
        time.sleep(0.05)
    return False


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


def test_a_client_without_the_secret_is_refused(served, relay):
    relay.put_new("a", [b"private"])
    stranger = HttpRelay(served.address, b"not the secret of the tests")
    with pytest.raises(ConfigError, match="refused the token of this writer"):
        stranger.get("a")


def test_a_server_with_another_secret_stores_nothing(inner):
    with RelayServer(inner, b"the secret of somebody else") as impostor:
        relay = HttpRelay(impostor.address, SECRET)
        with pytest.raises(ConfigError, match="refused the token"):
            relay.put_new("a", [b"private"])
    assert list(inner.list()) == []


@pytest.mark.parametrize("target", ["/v1/values/a", "/v1/values/none", "/v1/values", "/health", "/"])
def test_a_stranger_receives_the_same_refusal_whatever_it_asks(served, relay, target):
    relay.put_new("a", [b"private"])
    bodies = set()
    for token in ("", "Authorization: Bearer x", "Authorization: Bearer " + "0" * 64, "Authorization: Basic eDp5"):
        with connect(served) as plain:
            lines = [f"GET {target} HTTP/1.1", "Host: relay", *([token] if token else []), "", ""]
            status, rest = exchange(plain, "\r\n".join(lines).encode())
        assert status == 401 and b"Connection: close" in rest
        bodies.add(rest.partition(b"\r\n\r\n")[2])
    assert len(bodies) == 1


def test_tokens_are_compared_in_constant_time(served, monkeypatch):
    compared = []
    compare = relay_server.hmac.compare_digest
    monkeypatch.setattr(relay_server.hmac, "compare_digest", lambda *two: (compared.append(two), compare(*two))[1])
    HttpRelay(served.address, SECRET).list()
    assert len(compared) == 2, "with the token of each role, whichever fits"


@pytest.mark.parametrize("hello", [b"ROSE-RELAY-2\n" + bytes(64), bytes(100), b"\x16\x03\x01\x02\x00\x01" + bytes(90)])
def test_a_client_that_speaks_something_else_is_cut_off(served, relay, hello):
    with connect(served) as plain:
        assert exchange(plain, hello + b"\r\n\r\n")[0] in (0, 400)
    relay.put_new("a", [b"still here"])
    assert bytes(relay.get("a")) == b"still here"


def test_a_web_page_may_not_use_the_relay(served, relay):
    relay.put_new("a", [b"private"])
    with connect(served) as plain:
        assert exchange(plain, head("DELETE", "/v1/values/a", "writer", "Origin: http://evil.example"))[0] == 403
    assert bytes(relay.get("a")) == b"private"


@pytest.mark.parametrize("length", LENGTHS)
def test_an_absurd_length_is_refused_before_the_body(served, inner, length):
    with connect(served) as plain:
        request = head("PUT", "/v1/values/a", "writer", "If-None-Match: *", f"Content-Length: {length}")
        assert exchange(plain, request)[0] == 400
    assert list(inner.list()) == []


def test_a_chunked_body_beyond_the_limit_is_refused(served, inner, monkeypatch):
    monkeypatch.setattr(relay_api, "VALUE_BYTES_MAX", 2_000_000)
    with pytest.raises(RequestRefused, match="more than 2000000 bytes"):
        HttpRelay(served.address, SECRET).put_new("a", iter([BLOB]))
    assert list(inner.list()) == []


@pytest.mark.parametrize("more", [(), ("If-None-Match: x",), ("If-Match: *",)])
def test_a_put_that_might_overwrite_is_refused(served, inner, more):
    with connect(served) as plain:
        assert exchange(plain, head("PUT", "/v1/values/a", "writer", "Content-Length: 1", *more) + b"x")[0] == 400
    assert list(inner.list()) == []


@pytest.mark.parametrize("size", [1000, 3 << 20])
def test_a_body_that_ends_early_leaves_nothing_and_may_be_sent_again(served, relay, size):
    with connect(served) as plain:
        request = head("PUT", "/v1/values/a", "writer", "If-None-Match: *", f"Content-Length: {size}")
        plain.sendall(request + bytes(size - 1))
        plain.shutdown(socket.SHUT_WR)
        plain.recv(1000)
    with pytest.raises(KeyMissing):
        relay.get("a")
    assert relay.put_new("a", [BLOB[:size]]) == size
    assert bytes(relay.get("a")) == BLOB[:size]


@pytest.mark.parametrize("form", [list, iter])
def test_a_large_value_that_exists_is_refused_and_unchanged(served, relay, form):
    relay.put_new("a", [b"first"])
    for _ in range(3):
        with pytest.raises(KeyExists):
            relay.put_new("a", form([BLOB] * 4))
    assert bytes(relay.get("a")) == b"first"


def test_blocks_of_a_large_value_are_not_mixed_up(relay):
    value = os.urandom(5 << 20)
    for key, buffers in (("a", [value]), ("b", iter([value])), ("c", [value[: 3 << 20], value[3 << 20 :]])):
        relay.put_new(key, buffers)
        assert bytes(relay.get(key)) == value


def test_a_reader_that_takes_nothing_is_cut_off_and_others_go_on(inner):
    with RelayServer(inner, SECRET, silence_s=0.2) as served:
        inner.put_new("a", [bytes(64 << 20)])
        stuck = connect(served)
        assert exchange(stuck, head("GET", "/v1/values/a", "reader"))[0] == 200
        quick = HttpRelay(served.address, SECRET)
        assert len(quick.get("a", 0, 1000)) == 1000
        quick.close()
        assert served_is_left(served)
        stuck.close()


def test_a_writer_that_sends_nothing_is_cut_off(inner):
    with RelayServer(inner, SECRET, silence_s=0.2) as served:
        for length in ("1000", str(2 << 20)):
            with connect(served) as plain:
                request = head("PUT", "/v1/values/a", "writer", "If-None-Match: *", f"Content-Length: {length}")
                plain.sendall(request + b"x")
                with contextlib.suppress(ConnectionResetError):
                    while plain.recv(1000):
                        pass
        assert served_is_left(served)
    assert list(inner.list()) == []


def test_more_connections_than_allowed_are_refused(inner):
    with RelayServer(inner, SECRET, connections_max=2) as served:
        kept = [connect(served) for _ in range(2)]
        assert [exchange(plain, head("GET", "/v1/values"))[0] for plain in kept] == [200, 200]
        with pytest.raises(Unavailable, match="too many connections"):
            HttpRelay(served.address, SECRET).list()
        for connection in kept:
            connection.close()


def test_a_listing_of_many_keys_comes_in_pages(relay, inner, monkeypatch):
    monkeypatch.setattr(relay_api, "PAGE_ENTRIES_MAX", 7)
    for number in range(50):
        inner.put_new(f"run/{number:03}", [b"x"])
    assert [entry.key for entry in relay.list("run")] == [f"run/{number:03}" for number in range(50)]
    assert [entry.key for entry in relay.list()] == [f"run/{number:03}" for number in range(50)]


def test_a_short_secret_is_refused(inner):
    with pytest.raises(ConfigError, match="at least"):
        HttpRelay("127.0.0.1:1", b"short")
    with pytest.raises(ConfigError, match="at least"):
        RelayServer(inner, b"")


def test_a_taken_port_is_told(served):
    host, port = split_address(served.address)
    with pytest.raises(ConfigError, match="cannot listen"):
        RelayServer(MemoryRelay(), SECRET, host=host, port=port)


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    options = ["relay", "up", "--folder", str(tmp_path), "--secret-file"]
    assert main([*options, str(tmp_path / "none")]) == 2
    assert "openssl rand" in capsys.readouterr().err
    (tmp_path / "secret").write_bytes(SECRET)
    assert main([*options, str(tmp_path / "secret"), "--certificate", "only.pem"]) == 2
    assert "--key" in capsys.readouterr().err


def test_tls_both_ways(certificate, tmp_path):
    folder = FilesystemRelay(tmp_path)
    with RelayServer(folder, SECRET, tls=server_tls(*certificate)) as served:
        relay = HttpRelay(served.address, SECRET, tls=client_tls(certificate[0]))
        relay.put_new("a", [BLOB])
        assert bytes(relay.get("a")) == BLOB
        assert [entry.key for entry in relay.list()] == ["a"]
        with pytest.raises(ConfigError, match="not trusted"):
            HttpRelay(served.address, SECRET, tls=client_tls()).list()
        with pytest.raises(Unavailable, match="failed"):
            HttpRelay(served.address, SECRET).list()
        with pytest.raises(ConfigError, match="secret"):
            HttpRelay(served.address, b"another secret, long enough", tls=client_tls(certificate[0])).list()
        relay.close()
