"""Fuzzes the tcp relay: bytes before the greeting, wrong proofs, and odd messages of a client that has the secret."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz import servers
from tests.fuzz.run import Listener
from tests.fuzz.servers import SECRET, Server
from tests.fuzz.steps import HOST, NONE, Reply, Step
from tests.fuzz.values import Maker

from rose.errors import RoseError
from rose.weights.keys import write_key
from rose.weights.relay import wire
from rose.weights.relay.opening import Access, open_relay

PATIENCE_S = 5.0
KEYS = ("a/b", "fuzz/x", "fuzz/y", "../../escape", "/etc/passwd", "a//b", "a/../b", ".", "x" * 300, "a/\0", "", "é/ü")
LENGTHS = (0, 1, 77, wire.MESSAGE_BYTES_MAX, wire.MESSAGE_BYTES_MAX + 1, 2**31, 2**32 - 1)
_PROOFS: list[bytes] = []  # seen on earlier connections


async def play_relay(chance: random.Random, server: Server) -> Sequence[tuple[Step, Reply]]:
    """Be one client for a moment; return what it sent."""
    port = server.ports["relay"]
    return await asyncio.to_thread(_stranger if chance.random() < 0.4 else _member, chance, port)


def _stranger(chance: random.Random, port: int) -> list[tuple[Step, Reply]]:
    """Say something without knowing the secret."""
    hello = wire.MAGIC + chance.choice(tuple(wire.ROLES)) + chance.randbytes(wire.NONCE_BYTES)
    first = chance.choice(
        (hello, hello[: chance.randrange(len(hello))], chance.randbytes(200), b"GET / HTTP/1.1\r\n\r\n")
    )
    second = chance.choice((*_PROOFS[-4:], chance.randbytes(wire.DIGEST_BYTES), chance.randbytes(5), b""))
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=PATIENCE_S) as plain:
        plain.sendall(first)
        if len(first) == len(hello) and first == hello:
            plain.recv(wire.NONCE_BYTES)
            plain.sendall(second)
            plain.settimeout(0.2)
            assert plain.recv(64) in (b"", wire.REFUSED), "a stranger was told more than that it is one"
    return [(Step(first, second), NONE)]


def _member(chance: random.Random, port: int) -> list[tuple[Step, Reply]]:
    """Know the secret, and send messages of which some are spoiled."""
    maker = Maker(chance, "msgpack", known={"key": KEYS, "prefix": KEYS, "after": KEYS, "start": (0, 5), "stop": (9,)})
    sent: list[tuple[Step, Reply]] = []
    with (
        contextlib.suppress(OSError, wire.Disconnected),
        socket.create_connection((HOST, port), timeout=PATIENCE_S) as plain,
    ):
        role: wire.Role = chance.choice(("reader", "writer"))
        keys = write_key(SECRET)
        connection = wire.greet(plain, role, keys.relay if role == "writer" else keys.read.relay)
        for _ in range(chance.randrange(1, 8)):
            body = maker.body(chance.choice((wire.Put, wire.Get, wire.List, wire.Delete)))
            sent.append((Step(b"RELAY", body), NONE))
            _send(chance, connection, plain, body)
            plain.settimeout(0.3)
            with contextlib.suppress(TimeoutError, socket.timeout):
                _after(chance, connection, plain, body, role)
    return sent


def _send(chance: random.Random, connection: wire.Connection, plain: socket.socket, body: bytes) -> None:
    """Send a message as the protocol says, or with one part of it wrong."""
    tag = connection._tag(connection._labels[0], connection._sent, body)
    length = len(body)
    match chance.randrange(12):
        case 0:
            tag = chance.randbytes(wire.DIGEST_BYTES)
        case 1:
            tag = connection._tag(connection._labels[0], connection._sent + 1, body)
        case 2:
            length = chance.choice(LENGTHS)
        case 3:
            body = body[: len(body) // 2]
    _PROOFS.append(tag)
    del _PROOFS[:-16]
    connection._sent += 1
    plain.sendall(length.to_bytes(wire.LENGTH_BYTES, "little") + tag + body)


def _after(
    chance: random.Random, connection: wire.Connection, plain: socket.socket, body: bytes, role: wire.Role
) -> None:
    answer = connection.receive_answer()
    if not isinstance(answer, wire.Done):
        return
    is_change = any(word in body[:8] for word in (b"Put", b"Delete"))
    assert role == "writer" or not is_change, "a reader changed what the relay holds"
    if b"Put" in body[:8]:
        match chance.randrange(4):
            case 0:
                plain.sendall((2**31).to_bytes(wire.LENGTH_BYTES, "little") + b"x")
            case 1:
                plain.sendall((1000).to_bytes(wire.LENGTH_BYTES, "little") + b"x" * 10)
                raise wire.Disconnected("it leaves in the middle of a value")
            case _:
                connection.send_blocks([chance.randbytes(chance.choice((0, 1, 5000)))])
        connection.receive_answer()
    elif b"Get" in body[:8]:
        plain.recv(1 << 16)


async def honest(server: Server) -> str | None:
    return await asyncio.to_thread(_round_trip, server)


def _round_trip(server: Server) -> str | None:
    """Store a value, read it, list it and delete it."""
    key, value = f"honest/{random.randrange(10**9)}", random.randbytes(5000)
    try:
        relay = open_relay(f"tcp://{HOST}:{server.ports['relay']}", Access(secret=SECRET))
        try:
            relay.put_new(key, [value])
            if bytes(relay.get(key)) != value:
                return "another value came back"
            if key not in [entry.key for entry in relay.list("honest/")]:
                return "a value is not in the list"
            if not relay.delete(key):
                return "a value was not there when it was deleted"
        finally:
            relay.close()
    except RoseError as error:
        return f"refused: {error.what}"
    outside = list(_root(server).rglob("*escape*"))
    return f"a file outside: {outside}" if outside else None


def _root(server: Server) -> Path:
    return server.folder.parent


RELAY = Listener("relay", servers.relay, "relay", None, honest, play_relay)
