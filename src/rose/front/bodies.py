"""Reads the JSON body of a request into its typed form, or says exactly what is wrong with it.

A body may hold three kinds of keys: fields of the route's struct; *neutral* parameters, which OpenAI or vLLM know and
this device does not implement, accepted only at the value that changes nothing; and anything else, which is refused
with the name of the nearest key that exists. msgspec checks types and bounds; NaN and Infinity are not JSON to it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec

from rose.bounds import UNREADABLE
from rose.front.failures import Failure, bad_request

Body = TypeVar("Body", bound=msgspec.Struct)
Neutral = Mapping[str, tuple[Any, ...]]

_PATH = re.compile(r" - at `(?P<path>[^`]*)`\Z")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
NAME_SHOWN = 80  # characters of a name that clients chose; suggestions look no further either
MESSAGE_SHOWN = 400  # characters: a message may quote the value, which may be the whole body
NEUTRAL_BYTES_MAX = 256  # no neutral value is longer
ONCE_BYTES_MAX = 1 << 16  # a larger body is not decoded again after a failure: that takes a while
_raw_fields: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BodyReader(Generic[Body]):
    """One per route (or per object inside a body: then `prefix` is where it is, such as `sampling_params.`)."""

    def __init__(self, kind: type[Body], neutral: Neutral | None = None, *, prefix: str = "") -> None:
        self.kind = kind
        self.neutral = neutral or {}
        self._prefix = prefix
        self._decoder = msgspec.json.Decoder(_strict(kind))
        self._fields = frozenset(kind.__struct_encode_fields__)

    def read(self, data: bytes | msgspec.Raw) -> Body:
        """Raises Failure (400)."""
        if len(memoryview(data)) > ONCE_BYTES_MAX:
            return self._read_any(data)
        try:
            return self._decoder.decode(data)  # most bodies have no other keys and need nothing more
        except UNREADABLE:
            return self._read_any(data)

    def _read_any(self, data: bytes | msgspec.Raw) -> Body:
        """Read a body that may have neutral parameters or be wrong."""
        try:
            fields = _raw_fields.decode(data)
            others = [name for name in fields if name not in self._fields]
            for name in others:
                self._check_neutral(name, fields.pop(name))
            return self._decoder.decode(msgspec.json.encode(fields) if others else data)
        except msgspec.ValidationError as error:
            raise self._invalid(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from error
        except RecursionError as error:
            raise bad_request("the body is nested too deeply", code="invalid_json") from error

    def _check_neutral(self, name: str, raw: msgspec.Raw) -> None:
        accepted = self.neutral.get(name)
        param = self._prefix + name
        if accepted is None:
            near = difflib.get_close_matches(name[:NAME_SHOWN], [*self._fields, *self.neutral], n=1)
            hint = f"; did you mean `{self._prefix}{near[0]}`?" if near else ""
            param = param[:NAME_SHOWN]
            raise bad_request(f"unknown parameter `{param}`{hint}", param=param, code="unknown_parameter")
        value = msgspec.json.decode(raw) if len(memoryview(raw)) <= NEUTRAL_BYTES_MAX else raw
        if value is not None and not any(_same(value, neutral) for neutral in accepted):
            shown = " or ".join(msgspec.json.encode(neutral).decode() for neutral in (*accepted, None))
            message = f"`{param}` is not implemented; leave it out or send {shown}"
            raise bad_request(message, param=param, code="unsupported_parameter")

    def _invalid(self, message: str) -> Failure:
        """`Expected `int`, got `str` - at `$.a.b[0]`` names the parameter; a misspelt inner key gets a suggestion."""
        found = _PATH.search(message)
        path = found["path"].removeprefix("$").removeprefix(".") if found else ""
        what = (message[: found.start()] if found else message)[:MESSAGE_SHOWN]
        param = self._prefix + path[:MESSAGE_SHOWN]
        unknown = _UNKNOWN.match(what)
        if unknown:
            param = f"{param}.{unknown['name']}".lstrip(".")
            param = param[:NAME_SHOWN]
            return bad_request(f"unknown parameter `{param}`", param=param, code="unknown_parameter")
        where = f"`{param.rstrip('.')}`: " if param else "the body: "
        return bad_request(where + what[:1].lower() + what[1:], param=param.rstrip(".") or None, code="invalid_value")


def _strict(kind: type[Body]) -> type[Body]:
    """Return the struct that has the same fields and takes no others."""
    return msgspec.defstruct(kind.__name__, [], bases=(kind,), forbid_unknown_fields=True)  # type: ignore[return-value]


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and not by Python's habit of calling 0 and False the same."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
