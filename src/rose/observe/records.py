"""Facts and decisions as JSON and back, by the name of their class.

A `Vocabulary` knows a set of frozen dataclasses. Records carry their name as `kind`, fields are checked on the way
back, and infinities, which JSON cannot say, travel as {"$float": "inf"}: a grant may well run "until infinity".
Names are what old journals are read by: rename a record and they are strangers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any

import msgspec

from rose.bounds import INT64_MAX
from rose.core import breaches, decisions, facts, groups, memory

KIND = "kind"
_FLOAT = "$float"
UINT64_MAX = 2 * INT64_MAX + 1  # the largest that msgspec encodes again


class UnknownRecord(ValueError):
    """Not a record of this vocabulary: its kind, a field or a type is wrong."""


class Vocabulary:
    """The dataclasses that a journal may hold."""

    def __init__(self, types: Iterable[type]) -> None:
        self._types: dict[str, type] = {}
        for record in types:
            assert is_dataclass(record), f"{record} is not a dataclass"
            assert KIND not in record.__dataclass_fields__, f"{record} has a field `{KIND}`, which is the name's place"
            assert self._types.setdefault(record.__name__, record) is record, f"two records named {record.__name__}"

    @classmethod
    def of(cls, *modules: ModuleType) -> Vocabulary:
        """Every public dataclass that these modules define themselves."""
        found = [
            value
            for module in modules
            for value in vars(module).values()
            if isinstance(value, type)
            and is_dataclass(value)
            and value.__module__ == module.__name__
            and not value.__name__.startswith("_")
        ]
        return cls(found)

    def __contains__(self, kind: str) -> bool:
        return kind in self._types

    def to_tree(self, record: Any) -> dict[str, Any]:
        """A record as plain values that JSON can say."""
        kind = type(record).__name__
        assert self._types.get(kind) is type(record), f"{kind} is not in this vocabulary"
        return {KIND: kind, **_with_named_floats(msgspec.to_builtins(record))}

    def from_tree(self, tree: Any) -> Any:
        """The record in a tree of plain values; raises UnknownRecord."""
        if not isinstance(tree, dict) or not isinstance(tree.get(KIND), str):
            raise UnknownRecord("a record without a kind")
        kind = tree[KIND]
        if kind not in self._types:
            raise UnknownRecord(f"no record is called {kind}")
        values = _with_real_floats({name: value for name, value in tree.items() if name != KIND})
        try:
            record: Any = msgspec.convert(values, self._types[kind])
        except msgspec.ValidationError as error:
            raise UnknownRecord(f"{kind}: {error}") from error
        if strangers := values.keys() - self._types[kind].__dataclass_fields__.keys():  # type: ignore[attr-defined]
            raise UnknownRecord(f"{kind} has no field {min(strangers)}")
        return record


def core_vocabulary() -> Vocabulary:
    """Every fact and decision of the core."""
    return Vocabulary.of(facts, decisions, breaches, groups, memory)


def _with_named_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_named_floats(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_named_floats(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    return value


def _with_real_floats(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_FLOAT} and value[_FLOAT] in ("inf", "-inf", "nan"):
            return float(value[_FLOAT])
        return {name: _with_real_floats(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_real_floats(inner) for inner in value]
    if isinstance(value, int) and not -INT64_MAX - 1 <= value <= UINT64_MAX:
        raise UnknownRecord("an integer has more than 64 bits")
    return value
