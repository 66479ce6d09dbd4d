"""The HTTP interface between a relay server and its clients: routes, roles, limits and errors.

    PUT    /v1/values/KEY                     `If-None-Match: *`: stores the body under a new key
    GET    /v1/values/KEY                     the value, or one `Range: bytes=FIRST-LAST` of it
    GET    /v1/values?prefix=FOLDER&after=KEY one page of a listing
    DELETE /v1/values/KEY                     forgets the value

Every request bears the token of a role: a reader may list and get, a writer may also put and delete. Both tokens are
derived from the run's secret (`weights.keys`), and neither reveals it. The chain checks the hashes of all values by
signed manifests, so nothing here protects them. Without TLS a program on the path can read the token and the values.
A range outside the value is refused as a whole, where plain HTTP would cut it short.
"""

from __future__ import annotations

import ssl
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from rose.bounds import TEXT_CHARACTERS_MAX, Label, Seconds, Serial, Text
from rose.errors import ConfigError, RequestRefused, RoseError, Unavailable
from rose.weights.keys import is_read_key, read_key, write_key
from rose.weights.relay.relay_base import KEY_CHARACTERS_MAX, KeyExists, KeyMissing, RangeRefused, RelayFull

VALUES_PATH = "/v1/values"
BLOCK_BYTES = 1 << 20  # one block is all of a value that a side holds in memory
VALUE_BYTES_MAX = 4 << 30  # far beyond a bucket, the largest value
PAGE_ENTRIES_MAX = 1000  # at most about 600 bytes each, so that a page fits a message
MESSAGE_BYTES_MAX = 1 << 20  # a page of a listing is the longest
SILENCE_S = 30.0  # a side that neither sends nor takes a block for this long is gone

Role = Literal["reader", "writer"]
Body = TypeVar("Body")
Key = Annotated[str, Meta(max_length=KEY_CHARACTERS_MAX)]

STATUSES: dict[type[RoseError], int] = {
    KeyExists: 412,
    KeyMissing: 404,
    RangeRefused: 416,
    RelayFull: 507,
    RequestRefused: 400,
    Unavailable: 503,
}


class ListedValue(msgspec.Struct):
    key: Key
    size_bytes: Serial


class ListingPage(msgspec.Struct):
    values: Annotated[list[ListedValue], Meta(max_length=PAGE_ENTRIES_MAX)]
    is_last: bool


class Stored(msgspec.Struct):
    size_bytes: Serial


class RelayProblem(msgspec.Struct):
    message: Text
    type: Label = "Unavailable"
    hint: Text | None = None
    retry_after_s: Seconds = 1.0
    size_bytes: Serial = 0  # of the value, if a range of it was refused


class RelayProblemBody(msgspec.Struct):
    error: RelayProblem


_decoders: dict[type, msgspec.json.Decoder[Any]] = {
    Stored: msgspec.json.Decoder(Stored),
    ListingPage: msgspec.json.Decoder(ListingPage),
    RelayProblemBody: msgspec.json.Decoder(RelayProblemBody),
}


def role_token(secret: bytes) -> tuple[Role, str]:
    """Return the role that a secret or a read key gives, and its token."""
    if is_read_key(secret):
        return "reader", read_key(secret).relay.hex()
    return "writer", write_key(secret).relay.hex()


def encode_problem(error: RoseError) -> bytes:
    kind = next((known.__name__ for known in STATUSES if isinstance(error, known)), "Unavailable")
    hint = error.hint[:TEXT_CHARACTERS_MAX] if error.hint else None
    problem = RelayProblem(error.what[:TEXT_CHARACTERS_MAX], kind, hint)
    match error:
        case RangeRefused():
            problem.size_bytes = error.size_bytes
        case Unavailable():
            problem.retry_after_s = error.retry_after_s
    return msgspec.json.encode(RelayProblemBody(problem))


def status_of(error: RoseError) -> int:
    return next((status for known, status in STATUSES.items() if isinstance(error, known)), 503)


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """Return the value. Raises one of UNREADABLE."""
    if len(body) > MESSAGE_BYTES_MAX:
        raise ValueError("it is too long")
    value: Body = _decoders[kind].decode(body)
    return value


def error_of(problem: RelayProblem, key: str) -> RoseError:
    """Return the error that the server raised."""
    match problem.type:
        case "KeyExists":
            return KeyExists(key)
        case "KeyMissing":
            return KeyMissing(key)
        case "RelayFull":
            return RelayFull(problem.message, hint=problem.hint, retry_after_s=problem.retry_after_s)
        case "RangeRefused":
            return RangeRefused(key, 0, None, problem.size_bytes)
        case "RequestRefused":
            return RequestRefused(problem.message, hint=problem.hint)
    return Unavailable(problem.message, hint=problem.hint, retry_after_s=problem.retry_after_s)


def split_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ConfigError(f"`{address}` is not an address", hint="write it like 127.0.0.1:7070")
    return host.strip("[]"), int(port)


def server_tls(certificate: str, private_key: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, private_key)
    except OSError as error:
        raise ConfigError(f"the relay cannot use {certificate} with {private_key}: {error}") from error
    return context


def client_tls(authority: str | None = None) -> ssl.SSLContext:
    """Return a context that trusts the given file of certificates, or the system's authorities."""
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise ConfigError(f"the certificates in {authority} cannot be used: {error}") from error
