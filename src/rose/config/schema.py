"""What a setting is: a field of a frozen dataclass, with a sentence about it and the limits its value must keep.

    @dataclass(frozen=True, slots=True)
    class FrontSettings:
        port: int = setting(8000, "TCP port of the HTTP door", minimum=0, maximum=65535)

A settings class holds plain values (bool, int, float, str, `X | None`, `Literal`, `tuple[X, ...]`), other settings
classes, and `Mapping[str, X]` where somebody else knows the keys. Every field has a default: an empty file is a valid
file. `rose.config.load` checks values against this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

METADATA_KEY = "rose"


@dataclass(frozen=True, slots=True)
class Limits:
    """The sentence shown to people, and what a value must keep; None means no limit."""

    what: str
    minimum: float | None = None
    maximum: float | None = None
    pattern: str | None = None
    example: str | None = None  # shown when `pattern` does not match

    def __str__(self) -> str:
        if self.minimum is not None and self.maximum is not None:
            return f"between {self.minimum} and {self.maximum}"
        return f"at least {self.minimum}" if self.minimum is not None else f"at most {self.maximum}"


def setting(
    default: Any,
    what: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    pattern: str | None = None,
    example: str | None = None,
) -> Any:
    """A dataclass field with its sentence and limits. `pattern` must match the whole text."""
    metadata = {METADATA_KEY: Limits(what, minimum, maximum, pattern, example)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)
