"""Makes values of the types that the servers decode: valid ones, ones at a boundary, and ones that must be refused.

The types are the servers' own request structs, walked by `msgspec.inspect`, so a new field is fuzzed without a change
here. What no encoder would write (NaN, integers of any size, invalid UTF-8) is put in as raw bytes of the format.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import msgspec.inspect as inspect

Format = Literal["json", "msgpack"]
TEXTS = (
    "", "a", " ", "\0", "x" * 255, "x" * 256, "x" * 257, "é" * 300, "\U0001f339" * 64, "<tool_call>{", "../../etc",
    "\r\n\r\n", "null", "%s%n", "{{ 7*7 }}", "a/b/c", "\u202e", "e9999999999", "-1", "NaN",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 255, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
HUGE = (2**63, 2**64, -(2**63) - 1, 2**70, 10**30, 10**400)
FRACTIONS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-320, 1e30, 1e300, 1.7976931348623157e308, -1e308)
DEPTH = 2_000  # of nested lists: more than any recursion limit allows
DEPTH_MAX = 6  # of nested structs that are made


@dataclass
class Maker:
    """Draws values; one per case, so that a seed and a number say which value it was."""

    chance: random.Random
    format: Format = "json"
    bytes_max: int = 1 << 20  # of a long text or list
    known: dict[str, Sequence[Any]] = field(default_factory=dict)  # by field name: values that lead further

    def encode(self, value: Any) -> bytes:
        return msgspec.json.encode(value) if self.format == "json" else msgspec.msgpack.encode(value)

    def body(self, kind: Any, changes_max: int = 3) -> bytes:
        """Return an encoded value of this type, with up to so many places changed."""
        value = self.valid(inspect.type_info(kind))
        for _ in range(self.chance.choice((0, 1, 1, 2, changes_max))):
            value = self._change(value, inspect.type_info(kind))
        data = self.encode(value)
        return self._damage(data) if self.chance.random() < 0.06 else data

    # Valid

    def valid(self, info: Any, name: str = "", depth: int = 0) -> Any:
        if name in self.known and self.chance.random() < 0.9:
            return self.chance.choice(list(self.known[name]))
        match info:
            case inspect.Metadata():
                return self.valid(info.type, name, depth)
            case inspect.StructType():
                return self._struct(info, depth)
            case inspect.UnionType():
                return self.valid(self.chance.choice(list(info.types)), name, depth)
            case inspect.LiteralType():
                return self.chance.choice(list(info.values))
            case inspect.ListType() | inspect.VarTupleType():
                return self._list(info, depth)
            case inspect.TupleType():
                return [self.valid(item, "", depth + 1) for item in info.item_types]
            case inspect.DictType():
                keys = [self.valid(info.key_type, "", depth + 1) for _ in range(self.chance.randrange(4))]
                return {str(key): self.valid(info.value_type, "", depth + 1) for key in keys}
        return self._scalar(info)

    def _scalar(self, info: Any) -> Any:
        match info:
            case inspect.BoolType():
                return self.chance.random() < 0.5
            case inspect.IntType():
                least = info.ge if info.ge is not None else 0
                most = info.le if info.le is not None else 300
                return self.chance.randint(least, min(most, least + 300))
            case inspect.FloatType():
                least = info.ge if info.ge is not None else (info.gt if info.gt is not None else 0.0)
                most = info.le if info.le is not None else 1.0
                return self.chance.uniform(max(least, -2.0), min(most, 2.0))
            case inspect.StrType():
                length = max(info.min_length or 0, self.chance.randrange(1, 12))
                return "".join(self.chance.choice("abcxyz ") for _ in range(length))
            case inspect.BytesType():
                return self.chance.randbytes(max(info.min_length or 0, self.chance.randrange(40)))
            case inspect.RawType() | inspect.AnyType():
                return self.anything()
        return None

    def _struct(self, info: Any, depth: int) -> Any:
        fields = [
            (part, self.valid(part.type, part.encode_name, depth + 1))
            for part in info.fields
            if part.required or info.array_like or (depth < DEPTH_MAX and self.chance.random() < 0.3)
        ]
        if info.array_like:
            return [*([info.tag] if info.tag is not None else []), *(value for _, value in fields)]
        found = {part.encode_name: value for part, value in fields}
        return {info.tag_field: info.tag, **found} if info.tag_field is not None else found

    def _list(self, info: Any, depth: int) -> list[Any]:
        least = info.min_length or 0
        most = min(info.max_length if info.max_length is not None else 5, least + 4)
        return [self.valid(info.item_type, "", depth + 1) for _ in range(self.chance.randint(least, most))]

    # Odd

    def odd(self) -> Any:
        """Return a value that is legal in the format or nearly so, and that no type expects."""
        makers: tuple[Callable[[], Any], ...] = (
            lambda: self.chance.choice(TEXTS),
            lambda: self.chance.choice(NUMBERS),
            lambda: self.chance.choice(FRACTIONS),
            lambda: self.raw(self.chance.choice(("nan", "infinity", "deep", "invalid text", "huge", "surrogate"))),
            lambda: None,
            lambda: self.chance.random() < 0.5,
            list,
            dict,
            self.anything,
            self.long,
        )
        return self.chance.choice(makers)()

    def anything(self) -> Any:
        return self.chance.choice(
            (
                [1, "a", None],
                {"a": {"b": [1.5]}},
                {"type": "object", "properties": {"x": {"type": "integer"}}},
                [[]],
                {},
            )
        )

    def raw(self, what: str) -> msgspec.Raw:
        json = self.format == "json"
        match what:
            case "nan":
                return msgspec.Raw(b"NaN" if json else b"\xcb\x7f\xf8" + bytes(6))
            case "infinity":
                return msgspec.Raw(b"-Infinity" if json else b"\xcb\xff\xf0" + bytes(6))
            case "deep":
                return msgspec.Raw(b"[" * DEPTH + b"]" * DEPTH if json else b"\x91" * DEPTH + b"\xc0")
            case "invalid text":
                return msgspec.Raw(b'"\xff\xfe"' if json else b"\xa2\xff\xfe")
            case "surrogate":
                return msgspec.Raw(b'"\\ud800"' if json else b"\xa3\xed\xa0\x80")
        number = self.chance.choice(HUGE)
        return msgspec.Raw(str(number).encode() if json else b"\xcf" + b"\xff" * 8)

    def long(self) -> Any:
        size = int(self.bytes_max ** self.chance.uniform(0.5, 1.0))
        match self.chance.randrange(6):
            case 0:
                return "x" * size
            case 1:
                return "é☃" * (size // 5)
            case 2:
                return [1] * (size // 2)
            case 3:
                return ["a"] * (size // 4)
            case 4:
                return [[]] * (size // 3)
        return {f"k{number}": 0 for number in range(size // 12)}

    # Changes

    def _change(self, value: Any, info: Any) -> Any:
        """Return the value with one place of it changed."""
        if isinstance(value, dict) and value and self.chance.random() < 0.8:
            return self._change_dict(dict(value), info)
        if isinstance(value, list) and value and self.chance.random() < 0.8:
            place = self.chance.randrange(len(value))
            match self.chance.randrange(4):
                case 0:
                    return [*value[:place], *value[place + 1 :]]
                case 1:
                    return value * self.chance.choice((2, 10, 1000)) if len(value) < 100 else value
            return [*value[:place], self._change(value[place], None), *value[place + 1 :]]
        return self.odd()

    def _change_dict(self, value: dict[str, Any], info: Any) -> dict[str, Any]:
        names = [part.encode_name for part in getattr(info, "fields", ())] or list(value)
        match self.chance.randrange(8):
            case 0:
                value.pop(self.chance.choice(list(value)))
            case 1:
                key = self.chance.choice((*TEXTS, self.chance.choice(names)[:-1], "x" * 5000))
                value[key or "empty"] = self.odd()
            case 2 | 3:
                name = self.chance.choice(list(value))
                value[name] = self._change(value[name], None)
            case _:
                value[self.chance.choice(names)] = self.odd()
        return value

    def _damage(self, data: bytes) -> bytes:
        """Return bytes that are hardly a value any more."""
        place = self.chance.randrange(len(data) + 1)
        match self.chance.randrange(5):
            case 0:
                return data[:place]
            case 1:
                return data[:place] + self.chance.randbytes(self.chance.randrange(1, 9)) + data[place:]
            case 2:
                return data + data
            case 3:
                return b""
        return data[:place] + bytes([self.chance.randrange(256)]) + data[place + 1 :]
