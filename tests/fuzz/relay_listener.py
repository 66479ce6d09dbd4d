"""Fuzzes the relay server: requests of strangers, readers and writers, well-formed and spoiled."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from urllib.parse import quote

from tests.fuzz import servers
from tests.fuzz.requests import DELIVERIES, ODD_BYTES, ODD_HEADERS, ODD_METHODS, ODD_TARGETS
from tests.fuzz.run import Listener
from tests.fuzz.servers import SECRET, Server
from tests.fuzz.steps import HOST, Delivery, Step

from rose.errors import RoseError
from rose.weights.keys import for_reading
from rose.weights.relay.opening import RelayAccess, open_relay
from rose.weights.relay.relay_api import BLOCK_BYTES, VALUE_BYTES_MAX, VALUES_PATH, role_token

KEYS = ("a/b", "fuzz/x", "fuzz/y", "../../escape", "/etc/passwd", "a//b", "a/../b", ".", "x" * 300, "a/\0", "", "é/ü")
SIZES = (0, 1, 1000, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES)
LENGTHS = (0, 1, 1 << 20, VALUE_BYTES_MAX, VALUE_BYTES_MAX + 1, 2**63, 10**30, -1)
RANGES = ("bytes=0-0", "bytes=0-", "bytes=5-2", "bytes=-5", "bytes=0-1,3-4", "bytes=99999999999999999999-", "x", "")
READER, WRITER = role_token(for_reading(SECRET))[1], role_token(SECRET)[1]
TOKENS = (READER, WRITER, WRITER, WRITER, "wrong-token", "", READER + "0")


def draw_case(chance: random.Random) -> list[Step]:
    return [_draw(chance) for _ in range(chance.randrange(1, 8))]


def _draw(chance: random.Random) -> Step:
    if chance.random() < 0.05:
        return Step(chance.choice(ODD_BYTES))
    key = chance.choice(KEYS)
    target = f"{VALUES_PATH}/{key if chance.random() < 0.5 else quote(key)}"
    headers = [f"Authorization: Bearer {chance.choice(TOKENS)}"]
    body = b""
    method = chance.choice(("PUT", "PUT", "GET", "GET", "LIST", "DELETE"))
    if method == "LIST":
        method, target = "GET", f"{VALUES_PATH}?prefix={quote(key)}&after={chance.choice(KEYS)}"
    elif method == "GET" and chance.random() < 0.6:
        headers.append(f"Range: {chance.choice(RANGES)}")
    elif method == "PUT":
        headers += ["If-None-Match: *"] * (chance.random() < 0.95)
        body = _framed(chance, headers, bytes(chance.choice(SIZES)))
    if chance.random() < 0.15:
        headers.append(": ".join(chance.choice(ODD_HEADERS)))
    if chance.random() < 0.03:
        method = chance.choice(ODD_METHODS)
    if chance.random() < 0.03:
        target = chance.choice(ODD_TARGETS)
    head = "\r\n".join([f"{method} {target} HTTP/1.1", f"Host: {HOST}", *headers, "Connection: close", "", ""])
    delivery: Delivery = "whole" if chance.random() < 0.8 else chance.choice(DELIVERIES)
    if len(body) > BLOCK_BYTES and delivery == "pipeline":
        delivery = "leave"
    return Step(head.encode("utf-8", "replace"), body, delivery)


def _framed(chance: random.Random, headers: list[str], body: bytes) -> bytes:
    """Announce the body as a whole or in chunks, and now and then another length than it has."""
    if chance.random() < 0.1:
        headers.append(f"Content-Length: {chance.choice(LENGTHS)}")
        return body[:10]
    if chance.random() < 0.5:
        headers.append(f"Content-Length: {len(body)}")
        return body
    headers.append("Transfer-Encoding: chunked")
    length = chance.choice((len(body), len(body), len(body), len(body) + 5, 2**62))
    return b"%x\r\n" % length + body + b"\r\n0\r\n\r\n" if body else b"0\r\n\r\n"


async def honest(server: Server) -> str | None:
    return await asyncio.to_thread(_round_trip, server)


def _round_trip(server: Server) -> str | None:
    """Store a value, read it, list it and delete it; a reader changes nothing."""
    key, value = f"honest/{random.randrange(10**9)}", random.randbytes(random.choice((5000, 2 << 20)))
    address = f"http://{HOST}:{server.ports['relay']}"
    try:
        relay = open_relay(address, RelayAccess(secret=SECRET))
        reader = open_relay(address, RelayAccess(secret=for_reading(SECRET)))
        try:
            relay.put_new(key, [value])
            try:
                reader.delete(key)
                return "a reader deleted a value"
            except RoseError as error:
                if "read key" not in error.what:
                    raise
            if bytes(reader.get(key)) != value:
                return "another value came back"
            if key not in [entry.key for entry in relay.list("honest/")]:
                return "a value is not in the list"
            if not relay.delete(key):
                return "a value was not there when it was deleted"
        finally:
            relay.close()
            reader.close()
    except RoseError as error:
        return f"refused: {error.what}"
    outside = list(_root(server).rglob("*escape*"))
    return f"a file outside: {outside}" if outside else None


def _root(server: Server) -> Path:
    return server.folder.parent


RELAY = Listener("relay", servers.relay, "relay", draw_case, honest)
