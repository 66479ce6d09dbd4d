"""How a relay client and a relay server talk over TCP: who they are, framed messages, and streams of bytes.

There are two roles, each with a key of its own (`weights.keys`): a reader may list and get, a writer may also put and
delete. Both sides prove that they know the role's key, without sending it, before either says anything else. The
client proves first, so a stranger who connects to a server receives nothing that depends on a key:

    client -> server   MAGIC, role, 32 random bytes
    server -> client   32 random bytes
    client -> server   HMAC("client", role, both)
    server -> client   verdict; HMAC("server", role, both) if it is ADMITTED

From the two random parts both derive a session key. Every message (a request, an answer) carries an HMAC under it,
with its direction and its number, so that a stranger on the path can neither forge, repeat nor reorder them. The bytes
of values are not covered: the chain checks their hashes, which a signed manifest holds. They can be *read* on the
path, so between clusters use TLS, which wraps all of this unchanged.

Messages are msgpack of known shape and bounded length. A value is sent as blocks with their lengths in front; a
block of length zero ends it, and a connection that ends without one ends nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from rose.bounds import TEXT_CHARACTERS_MAX, Integer, Label, Seconds, Serial, Text
from rose.errors import ConfigError, RequestRefused, RoseError, Unavailable
from rose.weights.decoding import Undecodable, decode_msgpack
from rose.weights.relay.base import KEY_CHARACTERS_MAX, Buffer, Chunks, KeyExists, KeyMissing, RelayFull

MAGIC = b"ROSE-RELAY-2\n"
NONCE_BYTES = 32
DIGEST_BYTES = 32
LENGTH_BYTES = 4
VERDICT_BYTES = 1
ADMITTED, REFUSED, CROWDED = b"A", b"R", b"C"
MESSAGE_BYTES_MAX = 1 << 20  # a page of a listing is the longest
BLOCK_BYTES = 1 << 20  # one block is all of a value that a side holds in memory
PAGE_ENTRIES_MAX = 1000  # at most about 600 bytes each, so that a page fits a message
WELCOME_S = 5.0  # for the whole beginning of a connection, TLS included

Role = Literal["reader", "writer"]
ROLES: dict[bytes, Role] = {b"r": "reader", b"w": "writer"}
Key = Annotated[str, Meta(max_length=KEY_CHARACTERS_MAX)]


class Put(msgspec.Struct, tag=True, array_like=True):
    key: Key


class Get(msgspec.Struct, tag=True, array_like=True):
    key: Key
    start: Integer  # also one that no value has: the refusal says how long the value is
    stop: Integer | None


class List(msgspec.Struct, tag=True, array_like=True):
    prefix: Key
    after: Key


class Delete(msgspec.Struct, tag=True, array_like=True):
    key: Key


class Done(msgspec.Struct, tag=True, array_like=True):
    """The call succeeded, or may begin: `number` is a size or a truth."""

    number: Serial = 0


class Page(msgspec.Struct, tag=True, array_like=True):
    entries: Annotated[list[tuple[Key, Serial]], Meta(max_length=PAGE_ENTRIES_MAX)]
    is_last: bool


class Refusal(msgspec.Struct, tag=True, array_like=True):
    kind: Label
    what: Text
    hint: Text | None = None
    retry_after_s: Seconds = 1.0


Request = Put | Get | List | Delete
Answer = Done | Page | Refusal
Message = TypeVar("Message")

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_encode = msgspec.msgpack.Encoder().encode


class Disconnected(Exception):
    """The connection ended or cannot be trusted any more; only the two ends of it see this."""


class Stranger(Disconnected):
    """The other side does not hold the key of the role."""


class Connection:
    """One authenticated connection. Not thread-safe: one caller at a time."""

    def __init__(self, plain: socket.socket, session_key: bytes, *, is_server: bool) -> None:
        self._socket = plain
        self._session_key = session_key
        self._labels = (b"server", b"client") if is_server else (b"client", b"server")
        self._sent = self._received = 0
        self._scratch = bytearray(BLOCK_BYTES)

    # Messages

    def send(self, message: Request | Answer) -> None:
        body = _encode(message)
        assert len(body) <= MESSAGE_BYTES_MAX, f"a message of {len(body)} bytes"
        tag = self._tag(self._labels[0], self._sent, body)
        self._sent += 1
        self.send_bytes(len(body).to_bytes(LENGTH_BYTES, "little") + tag + body)

    def receive_request(self) -> Request:
        return _decoded(_requests, self._receive())

    def receive_answer(self) -> Answer:
        return _decoded(_answers, self._receive())

    def _receive(self) -> bytes:
        head = self.read(LENGTH_BYTES + DIGEST_BYTES)
        length = int.from_bytes(head[:LENGTH_BYTES], "little")
        if length > MESSAGE_BYTES_MAX:
            raise Disconnected(f"a message of {length} bytes was announced")
        body = bytes(self.read(length))
        if not hmac.compare_digest(head[LENGTH_BYTES:], self._tag(self._labels[1], self._received, body)):
            raise Disconnected("a message with a wrong HMAC arrived")
        self._received += 1
        return body

    def _tag(self, label: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._session_key, label + number.to_bytes(8, "little") + body, "sha256")

    # Values

    def send_blocks(self, chunks: Chunks) -> None:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            for start in range(0, len(view), BLOCK_BYTES):
                block = view[start : start + BLOCK_BYTES]
                self.send_bytes(len(block).to_bytes(LENGTH_BYTES, "little"))
                self.send_bytes(block)
        self.send_bytes(bytes(LENGTH_BYTES))

    def receive_blocks(self) -> Iterator[Buffer]:
        """Blocks until the one that ends the value; each is valid until the next is asked for."""
        while length := int.from_bytes(self.read(LENGTH_BYTES), "little"):
            if length > BLOCK_BYTES:
                raise Disconnected(f"a block of {length} bytes was announced")
            block = memoryview(self._scratch)[:length]
            self.read_into(block)
            yield block

    # Bytes

    def send_bytes(self, data: Buffer) -> None:
        send_all(self._socket, data)

    def read(self, count: int) -> bytearray:
        data = bytearray(count)
        self.read_into(memoryview(data))
        return data

    def read_into(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += self.read_some(view[done:])

    def read_some(self, view: memoryview) -> int:
        return receive_some(self._socket, view)

    def is_stale(self) -> bool:
        """Between two calls nothing is due from the other side; what can be read is the end."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._socket.close()


def send_all(plain: socket.socket, data: Buffer) -> None:
    """Like sendall, but the socket's timeout is for progress, not for the whole of `data`."""
    view = memoryview(data)
    done = 0
    try:
        while done < len(view):
            done += plain.send(view[done : done + BLOCK_BYTES])
    except OSError as error:
        raise Disconnected(f"sending failed: {error}") from error


def receive_some(plain: socket.socket, view: memoryview) -> int:
    try:
        count = plain.recv_into(view, min(len(view), BLOCK_BYTES))
    except OSError as error:
        raise Disconnected(f"receiving failed: {error}") from error
    if count == 0:
        raise Disconnected("the other side closed the connection")
    return count


def greet(plain: socket.socket, role: Role, key: bytes, limit_s: float = WELCOME_S) -> Connection:
    """Begin a connection as the client. Raises Stranger if one of the two sides does not hold the role's key."""
    until_s = time.monotonic() + limit_s
    ours = secrets.token_bytes(NONCE_BYTES)
    mark = next(mark for mark, known in ROLES.items() if known == role)
    _send_before(plain, MAGIC + mark + ours, until_s)
    both = mark + ours + _read_before(plain, NONCE_BYTES, until_s)
    _send_before(plain, _proof(key, b"client", both), until_s)
    verdict = _read_before(plain, VERDICT_BYTES, until_s)
    if verdict == CROWDED:
        raise Disconnected("the server has too many connections")
    if verdict != ADMITTED:
        raise Stranger(f"the server refused the key of this {role}")
    if not hmac.compare_digest(_read_before(plain, DIGEST_BYTES, until_s), _proof(key, b"server", both)):
        raise Stranger("the server at this address does not know the relay's secret")
    return Connection(plain, _proof(key, b"session", both), is_server=False)


def welcome(
    plain: socket.socket, keys: Mapping[Role, bytes], until_s: float, admit: Callable[[Role], bool]
) -> tuple[Connection, Role]:
    """Begin a connection as the server. `admit` is asked for a place once the client has proved its role.

    Raises Stranger if the client does not hold the role's key, Disconnected if there is no place.
    """
    hello = _read_before(plain, len(MAGIC) + 1 + NONCE_BYTES, until_s)
    role = ROLES.get(hello[len(MAGIC) : len(MAGIC) + 1])
    if hello[: len(MAGIC)] != MAGIC or role is None:
        raise Stranger("this is not a client of a relay, or one of another version")
    ours = secrets.token_bytes(NONCE_BYTES)
    _send_before(plain, ours, until_s)
    both = hello[len(MAGIC) :] + ours
    if not hmac.compare_digest(_read_before(plain, DIGEST_BYTES, until_s), _proof(keys[role], b"client", both)):
        _send_before(plain, REFUSED, until_s)
        raise Stranger(f"the client does not hold the key of a {role}")
    if not admit(role):
        _send_before(plain, CROWDED, until_s)
        raise Disconnected("too many connections")
    _send_before(plain, ADMITTED + _proof(keys[role], b"server", both), until_s)
    return Connection(plain, _proof(keys[role], b"session", both), is_server=True), role


def refusal_of(error: RoseError) -> Refusal:
    """How an error of ours travels."""
    kinds = (KeyExists, KeyMissing, RelayFull, Unavailable, RequestRefused)
    kind = next((known.__name__ for known in kinds if isinstance(error, known)), "Unavailable")
    hint = error.hint[:TEXT_CHARACTERS_MAX] if error.hint else None
    return Refusal(kind, error.what[:TEXT_CHARACTERS_MAX], hint, getattr(error, "retry_after_s", 1.0))


def error_of(refusal: Refusal, key: str) -> RoseError:
    match refusal.kind:
        case "KeyExists":
            return KeyExists(key)
        case "KeyMissing":
            return KeyMissing(key)
        case "RelayFull":
            return RelayFull(refusal.what, hint=refusal.hint, retry_after_s=refusal.retry_after_s)
        case "RequestRefused":
            return RequestRefused(refusal.what, hint=refusal.hint)
    return Unavailable(refusal.what, hint=refusal.hint, retry_after_s=refusal.retry_after_s)


def server_tls(certificate: str, private_key: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, private_key)
    except OSError as error:
        raise ConfigError(f"the relay cannot use {certificate} with {private_key}: {error}") from error
    return context


def client_tls(authority: str | None = None) -> ssl.SSLContext:
    """Trusts the system's authorities, or only the given file of certificates."""
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise ConfigError(f"the certificates in {authority} cannot be used: {error}") from error


def _read_before(plain: socket.socket, count: int, until_s: float) -> bytes:
    """Read exactly so many bytes before the deadline, however slowly they come. Raises Disconnected."""
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        plain.settimeout(_left_s(until_s))
        done += receive_some(plain, view[done:])
    return bytes(data)


def _send_before(plain: socket.socket, data: bytes, until_s: float) -> None:
    plain.settimeout(_left_s(until_s))
    send_all(plain, data)


def _left_s(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise Disconnected("the connection took too long to begin")
    return left_s


def _proof(key: bytes, label: bytes, both: bytes) -> bytes:
    return hmac.digest(key, hashlib.sha256(label).digest() + both, "sha256")


def _decoded(decoder: msgspec.msgpack.Decoder[Message], body: bytes) -> Message:
    try:
        return decode_msgpack(decoder, body)
    except Undecodable as error:
        raise Disconnected(f"a message that makes no sense arrived: {error}") from error
