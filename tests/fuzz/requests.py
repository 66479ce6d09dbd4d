"""Draws HTTP requests for the routes of a server, from its own request structs, and spoils some of them."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.fuzz.steps import Delivery, Step, request
from tests.fuzz.values import Maker
from tests.fuzz.worst import draw_worst

WORST_SHARE = 0.015  # of bodies that are as large as they may be
BODY_BYTES_MAX = 4 << 20
DELIVERIES: tuple[Delivery, ...] = ("partial", "leave", "deaf", "pipeline", "pieces")
ODD_HEADERS = (
    ("Content-Type", "text/plain"), ("Content-Type", "application/x-www-form-urlencoded"), ("Content-Type", "\xff"),
    ("Content-Type", "multipart/form-data; boundary="), ("Content-Type", "application/json; charset=utf-16"),
    ("Authorization", "Bearer \xff\xfe"), ("Authorization", "Bearer"), ("Authorization", "Basic eDp5"),
    ("Authorization", "Basic"), ("Authorization", "Basic Og=="), ("Authorization", "Basic =\xff"),
    ("Authorization", "Basic " + "eDp5" * 2000), ("Authorization", "Bearer /x"),
    ("Authorization", "Bearer " + "x" * 7000), ("X-Session-ID", "\xff"), ("X-Session-ID", "x" * 257),
    ("X-Session-ID", ""), ("X-Session-ID", "a/../b"), ("Accept", "application/msgpack"), ("Accept", "\x80"),
    ("Host", "evil.example"), ("Host", ""), ("Origin", "http://evil.example"), ("Expect", "100-continue"),
    ("Expect", "x"), ("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Cookie", "a=" + "b" * 3000),
    ("Content-Encoding", "br"), ("Content-Encoding", "identity, gzip"), ("X-Request-Id", "\xc3\xa9"),
    ("Range", "bytes=0-1"), ("Transfer-Encoding", "chunked"), ("Content-Length", "3"), ("Content-Length", "-1"),
    ("Content-Length", "99999999999999999999"), ("If-None-Match", "*"), ("Sec-WebSocket-Key", "x"),
)  # fmt: skip
ODD_TARGETS = (
    "/",
    "//",
    "/%00",
    "/%ff%fe",
    "/..%2f..%2fetc/passwd",
    "/v1/" + "x" * 3000,
    "*",
    "http://x/",
    "/\xff",
    "/?a[]=1",
)
ODD_METHODS = ("PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "PATCH", "x", "GET" * 20)
ODD_NUMBERS = ("nan", "inf", "-1", "1e999", "0x10", "1_0", "\xb2", "", " ", "9" * 400, "1.5", "18446744073709551616")
ODD_BYTES = (
    b"\0" * 200,
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx\r\n",
    b"GET / HTTP/1.1\r\nA" + b"a" * 9000 + b": b\r\n\r\n",
    b"GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n",
    b"GET / HTTP/1.1\r\n: b\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 3000 + b"\r\n",
)


@dataclass(frozen=True)
class Route:
    """A route as a client sees it: the type of its body, the token it needs, and the names of its query."""

    method: str
    path: str
    kind: Any = None
    token: str | None = None
    query: tuple[str, ...] = ()
    weight: int = 4


@dataclass(frozen=True)
class Target:
    """The routes of one listener, with values that lead past the first checks."""

    routes: tuple[Route, ...]
    known: dict[str, Sequence[Any]]
    names: dict[str, Sequence[str]]
    tokens: tuple[str, ...] = ()  # of all roles


def draw(chance: random.Random, target: Target, route: Route | None = None, session: str | None = None) -> Step:
    """Return one request: mostly one that a client might send, spoiled in one or several ways."""
    if chance.random() < 0.03:
        return Step(chance.choice(ODD_BYTES))
    if route is None:
        route = chance.choices(target.routes, [route.weight for route in target.routes])[0]
    maker = Maker(chance, known=target.known, bytes_max=chance.choice((1 << 12, 1 << 12, 1 << 16, 1 << 20, 5 << 20)))
    body = maker.body(route.kind) if route.kind is not None else b""
    if route.kind is not None and chance.random() < WORST_SHARE:
        body = draw_worst(route.kind, chance.randrange(1 << 14, BODY_BYTES_MAX), chance).body
    if route.kind is None and chance.random() < 0.1:
        body = maker.encode(maker.odd())
    headers = _headers(chance, route, target, session)
    body, headers = _encoded(chance, body, headers)
    method, path = route.method, _path(chance, route, target)
    if chance.random() < 0.02:
        method = chance.choice(ODD_METHODS)
    if chance.random() < 0.02:
        path = chance.choice(ODD_TARGETS)
    delivery: Delivery = "whole" if chance.random() < 0.85 else chance.choice(DELIVERIES)
    if delivery == "pipeline" and len(body) > 1 << 16:
        delivery = "whole"
    step = request(method, path, headers, body, delivery)
    return _spoiled(chance, step) if chance.random() < 0.02 else step


def _headers(chance: random.Random, route: Route, target: Target, session: str | None) -> list[tuple[str, str]]:
    headers = [("Content-Type", "application/json")]
    token = route.token
    if chance.random() < 0.05:
        token = chance.choice((*target.tokens, "wrong-token", ""))
    if token:
        headers.append(("Authorization", f"Bearer {token}"))
    if session is not None:
        headers.append(("X-Session-ID", session))
    while chance.random() < 0.12:
        odd = chance.choice(ODD_HEADERS)
        headers = [known for known in headers if known[0] != odd[0] or chance.random() < 0.2] + [odd]
    if chance.random() < 0.5:
        headers.append(("Connection", "close"))
    return headers


def _encoded(chance: random.Random, body: bytes, headers: list[tuple[str, str]]) -> tuple[bytes, list[tuple[str, str]]]:
    draw = chance.random()
    if draw < 0.02:
        return gzip.compress(body), [*headers, ("Content-Encoding", "gzip")]
    if draw < 0.03:
        return zlib.compress(body), [*headers, ("Content-Encoding", "deflate")]
    if draw < 0.035:
        return gzip.compress(bytes(32 << 20), 1), [*headers, ("Content-Encoding", "gzip")]
    if draw < 0.045:
        return body, [*headers, ("Content-Encoding", "gzip")]
    return body, headers


def _path(chance: random.Random, route: Route, target: Target) -> str:
    path = route.path
    for name, values in target.names.items():
        if f"{{{name}}}" in path:
            path = path.replace(f"{{{name}}}", chance.choice(list(values)))
    if route.query:
        parts = [f"{name}={_number(chance, name)}" for name in route.query if chance.random() < 0.8]
        path += "?" + "&".join(parts)
    return path


def _number(chance: random.Random, name: str) -> str:
    if chance.random() < 0.2:
        return chance.choice(ODD_NUMBERS)
    if name == "wait_s":
        return chance.choice(("0", "0.01", "0.1"))
    return str(chance.choice((0, 1, 2, 3, 50, 2**31, 2**62)))


def _spoiled(chance: random.Random, step: Step) -> Step:
    """Return the step with a few bytes of its head changed."""
    head = bytearray(step.head)
    for _ in range(chance.randrange(1, 4)):
        head[chance.randrange(len(head))] = chance.randrange(256)
    return replace(step, head=bytes(head), delivery="leave")  # its end may not be found: no answer is owed
