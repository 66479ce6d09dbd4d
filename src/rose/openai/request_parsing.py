"""Request bodies: received within limits, decompressed, and decoded into their typed form.

A body is bounded in size, time and structure before it is decoded: decoding holds Python's lock, so a thread would not
keep the event loop free. A list costs a hundred times more than a byte of text, and 4 MB hold two million lists.

A body may hold three kinds of keys: fields of the route's struct; *ignored* parameters, which OpenAI or vLLM know and
this server does not implement, accepted only at the value that changes nothing; and anything else, which is refused
with the name of the nearest key that exists.
"""

from __future__ import annotations

import asyncio
import difflib
import re
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import msgspec
from aiohttp import hdrs, web
from msgspec import Meta

from rose.bounds import NAME_CHARACTERS_MAX, UNREADABLE
from rose.config.server_settings import FrontSettings
from rose.openai.http_errors import Failure, bad_request
from rose.openai.loops import offload, release_memory_soon

Body = TypeVar("Body", bound=msgspec.Struct)
IgnoredParameters = Mapping[str, tuple[Any, ...]]

CONTAINERS_MAX = 1 << 16  # lists and objects of one body: about 15 ms of decoding
TEXTS_MAX = 1 << 17  # texts and keys of one body: about 10 ms of decoding
COMMAS_MAX = 1 << 20  # items of one body: about 20 ms of decoding; a context of a million tokens
ESCAPES_MAX = 1 << 20  # backslashes of one body: about 10 ms of decoding; a million characters in the form \u4e2d
FREE_INTEGER_BITS_MAX = 1024  # schemas state limits of unsigned 64-bit and 128-bit numbers
FREE_DEPTH_MAX = 64  # schemas of real tools have fewer than 20 levels; the interpreter's own limit is 1,000
FREE_VALUES_MAX = 1 << 13  # of one tool or one set of variables
CHECKED_BY = "checked_by"  # key of `Meta.extra`: the check that bounds a value that its type does not bound

INLINE_BYTES = 1 << 16  # of a body: decoded in a millisecond or two
GZIP_OR_ZLIB = 47  # window bits by which zlib finds out which of the two it is
RAW_DEFLATE = -15  # what some clients send as `deflate`
IDENTITY, ENCODINGS = "identity", ("gzip", "deflate")

_PATH = re.compile(r" - at `(?P<path>[^`]*)`\Z")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
NAME_SHOWN = 80  # characters of a name that clients chose; suggestions look no further either
MESSAGE_SHOWN = 400  # characters: a message may quote the value, which may be the whole body
IGNORED_BYTES_MAX = 256  # no value that is accepted is longer
ONCE_BYTES_MAX = 1 << 16  # a larger body is not decoded again after a failure: that takes a while
_raw_fields: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])

FreeValue = Annotated[Any, Meta(extra={CHECKED_BY: "rose.openai.request_parsing.check_free"})]
FreeObject = Annotated[
    dict[Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)], FreeValue], Meta(max_length=FREE_VALUES_MAX)
]


async def read_body(request: web.Request, settings: FrontSettings, large_bodies: asyncio.Lock) -> bytes:
    """Return the body, within the limits of size, time and structure. Raise Failure, QueueFull."""
    try:
        if request.content.is_eof():  # it came with the headers, as most do
            data = await request.read()
        else:
            async with asyncio.timeout(settings.read_timeout_s):
                data = await request.read()
    except TimeoutError as error:
        message = f"the body did not arrive within {settings.read_timeout_s:g} s"
        raise Failure(408, message, code="request_timeout", headers={"Connection": "close"}) from error
    except web.RequestPayloadError as error:
        raise bad_request("the body is not what its headers say", code="invalid_body") from error
    if hdrs.CONTENT_ENCODING in request.headers:
        data = await _decompressed(request, data, settings.max_body_bytes)
    if not is_surely_small(data) and (excess := await offload(too_large, data)):
        raise bad_request(f"the body has {excess}", code="body_too_complex")
    if len(data) > INLINE_BYTES:
        release_memory_soon()
        async with large_bodies:  # each takes a while to decode: between two of them, other requests run
            await asyncio.sleep(0)
    return data


async def _decompressed(request: web.Request, data: bytes, bytes_max: int) -> bytes:
    encoding = request.headers[hdrs.CONTENT_ENCODING].strip().lower()
    if encoding == IDENTITY or not data:
        return data
    if encoding not in ENCODINGS:
        message = f"the encoding `{encoding[:40]}` is not known; send {' or '.join(ENCODINGS)}, or the body as it is"
        headers = {"Accept-Encoding": ", ".join(ENCODINGS)}
        raise Failure(415, message, code="unsupported_media_type", headers=headers)
    try:
        whole = await offload(_decompress, data, encoding, bytes_max)
    except zlib.error as error:
        raise bad_request("the body is not what its headers say", code="invalid_body") from error
    if len(whole) > bytes_max:
        raise Failure(413, f"the body is too large: more than {bytes_max} bytes", code="request_entity_too_large")
    return whole


def _decompress(data: bytes, encoding: str, bytes_max: int) -> bytes:
    """Return at most one byte more than allowed. Raise zlib.error."""
    is_raw = encoding == "deflate" and data[0] & 0x0F != 8  # the method that every zlib header names
    stream = zlib.decompressobj(RAW_DEFLATE if is_raw else GZIP_OR_ZLIB)
    whole = stream.decompress(data, bytes_max + 1)
    if len(whole) <= bytes_max and not stream.eof:
        raise zlib.error("the compressed body is incomplete")
    return whole


def is_surely_small(data: bytes) -> bool:
    """Return whether a JSON text has few values even if all its brackets, commas and quotes were structure."""
    if len(data) <= CONTAINERS_MAX:
        return True
    return (
        data.count(b"[") + data.count(b"{") <= CONTAINERS_MAX
        and data.count(b",") <= COMMAS_MAX
        and data.count(b'"') <= 2 * TEXTS_MAX
        and data.count(b"\\") <= ESCAPES_MAX
    )


def too_large(data: bytes) -> str | None:
    """Return what a JSON text has too many of; None if it is within bounds. May take long: call it in a thread."""
    if data.count(b"\\") > ESCAPES_MAX:
        return f"more than {ESCAPES_MAX} escaped characters"
    containers = commas = texts = position = 0
    while True:
        quote = data.find(b'"', position)
        end = quote if quote >= 0 else len(data)
        containers += data.count(b"[", position, end) + data.count(b"{", position, end)
        commas += data.count(b",", position, end)
        if containers > CONTAINERS_MAX:
            return f"more than {CONTAINERS_MAX} lists and objects"
        if commas > COMMAS_MAX:
            return f"more than {COMMAS_MAX} items"
        if quote < 0:
            return None
        texts += 1
        if texts > TEXTS_MAX:
            return f"more than {TEXTS_MAX} texts and keys"
        position = _end_of_text(data, quote + 1)


def _end_of_text(data: bytes, start: int) -> int:
    """Return the position after the closing quote of the text that begins at `start`."""
    searched = start
    while (quote := data.find(b'"', searched)) >= 0:
        before = data[searched:quote]
        backslashes = len(before) - len(before.rstrip(b"\\"))
        if backslashes % 2 == 0:
            return quote + 1
        searched = quote + 1  # it was escaped
    return len(data)


class BodyReader(Generic[Body]):
    """The decoder of a route's body, or of an object inside a body at `prefix`, such as `sampling_params.`."""

    def __init__(self, kind: type[Body], ignored: IgnoredParameters | None = None, *, prefix: str = "") -> None:
        self.kind = kind
        self.ignored = ignored or {}
        self._prefix = prefix
        strict = msgspec.defstruct(kind.__name__, [], bases=(kind,), forbid_unknown_fields=True)
        self._decoder: msgspec.json.Decoder[Body] = msgspec.json.Decoder(strict)  # type: ignore[arg-type]
        self._fields = frozenset(kind.__struct_encode_fields__)

    def read(self, data: bytes | msgspec.Raw) -> Body:
        """Decode a body. Raise Failure (400)."""
        if len(memoryview(data)) > ONCE_BYTES_MAX:
            return self._read_any(data)
        try:
            return self._decoder.decode(data)  # most bodies have no other keys and need nothing more
        except UNREADABLE:
            return self._read_any(data)

    def _read_any(self, data: bytes | msgspec.Raw) -> Body:
        """Decode a body that may have ignored parameters or be wrong."""
        try:
            fields = _raw_fields.decode(data)
            others = [name for name in fields if name not in self._fields]
            for name in others:
                self._check_ignored(name, fields.pop(name))
            return self._decoder.decode(msgspec.json.encode(fields) if others else data)
        except msgspec.ValidationError as error:
            raise self._invalid(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from error
        except RecursionError as error:
            raise bad_request("the body is nested too deeply", code="invalid_json") from error

    def _check_ignored(self, name: str, raw: msgspec.Raw) -> None:
        accepted = self.ignored.get(name)
        param = self._prefix + name
        if accepted is None:
            near = difflib.get_close_matches(name[:NAME_SHOWN], [*self._fields, *self.ignored], n=1)
            hint = f"; did you mean `{self._prefix}{near[0]}`?" if near else ""
            param = param[:NAME_SHOWN]
            raise bad_request(f"unknown parameter `{param}`{hint}", param=param, code="unknown_parameter")
        value = msgspec.json.decode(raw) if len(memoryview(raw)) <= IGNORED_BYTES_MAX else raw
        # Python calls 0 and False equal; JSON does not.
        changes_nothing = any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted)
        if value is not None and not changes_nothing:
            values = " or ".join(msgspec.json.encode(one).decode() for one in (*accepted, None))
            message = f"`{param}` is not implemented; leave it out or send {values}"
            raise bad_request(message, param=param, code="unsupported_parameter")

    def _invalid(self, message: str) -> Failure:
        """Return the failure for an error of msgspec: ``Expected `int`, got `str` - at `$.a.b[0]`` ``."""
        match = _PATH.search(message)
        path = match["path"].removeprefix("$").removeprefix(".") if match else ""
        what = (message[: match.start()] if match else message)[:MESSAGE_SHOWN]
        param = self._prefix + path[:MESSAGE_SHOWN]
        if unknown := _UNKNOWN.match(what):
            param = f"{param}.{unknown['name']}".lstrip(".")[:NAME_SHOWN]
            return bad_request(f"unknown parameter `{param}`", param=param, code="unknown_parameter")
        where = f"`{param.rstrip('.')}`: " if param else "the body: "
        return bad_request(where + what[:1].lower() + what[1:], param=param.rstrip(".") or None, code="invalid_value")


class FreeJson(msgspec.Struct):
    """A decoded struct whose free-form fields are checked as soon as it is decoded."""

    FREE: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in self.FREE:
            value = getattr(self, name)
            if value is not None:
                check_free(value, name)


def check_free(value: Any, name: str) -> None:
    """Raise ValueError if a free-form value is too deep or too large; msgspec adds where it is."""
    level, values = [value], 0
    for _ in range(FREE_DEPTH_MAX):
        below: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, int) and item.bit_length() > FREE_INTEGER_BITS_MAX:
                raise ValueError(f"`{name}` has an integer of more than {FREE_INTEGER_BITS_MAX} bits")
        values += len(below)
        if values > FREE_VALUES_MAX:
            raise ValueError(f"`{name}` has more than {FREE_VALUES_MAX} values")
        if not below:
            return
        level = below
    raise ValueError(f"`{name}` is nested more than {FREE_DEPTH_MAX} levels deep")
