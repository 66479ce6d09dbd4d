"""The files of a model folder: JSON read strictly, with errors that name the file and the key.

A model folder comes from anywhere, so sizes are bounded, types are checked, and a value that makes no sense is refused
at start-up instead of failing later inside the engine.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from rose.errors import ModelError

JSON_BYTES_MAX = 64 * 2**20  # the largest published tokenizer.json has about 35 MB
WHOLE_MAX = 2**40  # no size of a model comes near this
NUMBER_MAX = 1e30  # below the largest float32, in which the engine computes


def read_text(path: Path) -> str:
    """Return the text of a file that must exist."""
    try:
        size = path.stat().st_size
        if size > JSON_BYTES_MAX:
            raise ModelError(f"{path} has {size} bytes, more than the {JSON_BYTES_MAX} ROSE reads of such a file")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing", hint="give a complete Hugging Face model folder") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file."""
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:
        raise ModelError(f"{path} holds a number too long to read") from error
    except RecursionError as error:
        raise ModelError(f"{path} is nested too deeply") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {kind_of(value)} where a JSON object is needed")
    return value


def kind_of(value: object) -> str:
    """Return the kind of a JSON value, in words for a message."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def sibling_name(path: Path) -> Path:
    """Return a unique name beside `path`, for a file or folder that is renamed when it is whole."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


class Keys:
    """Typed access to the keys of one JSON object; every error names the file and the key."""

    def __init__(self, file: str, values: dict[str, Any], prefix: str = "") -> None:
        self.file = file
        self.values = values
        self.prefix = prefix

    def __contains__(self, key: str) -> bool:
        """Return whether the key has a value; null counts as absent, as it does for transformers."""
        return self.values.get(key) is not None

    def complaint(self, key: str, what: str) -> ModelError:
        return ModelError(f"{self.file}: {self.prefix}{key} {what}")

    def get(self, key: str, default: Any) -> Any:
        if key in self:
            return self.values[key]
        if default is None:
            raise self.complaint(key, "is missing")
        return default

    def whole(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.complaint(key, f"must be a whole number, not {_shown(value)}")
        if not minimum <= value <= WHOLE_MAX:
            raise self.complaint(key, f"must be between {minimum} and {WHOLE_MAX}, not {_shown(value)}")
        return value

    def number(self, key: str, default: float | None = None, above: float = 0.0) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.complaint(key, f"must be a number, not {_shown(value)}")
        if not above < value < NUMBER_MAX:
            raise self.complaint(key, f"must be a finite number above {above:g}, not {_shown(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.complaint(key, f"must be true or false, not {_shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.complaint(key, f"must be a string, not {_shown(value)}")
        return value

    def inner(self, key: str) -> Keys:
        """Return the object under a key; an absent one is empty."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.complaint(key, f"must be an object, not {_shown(value)}")
        return Keys(self.file, value, f"{self.prefix}{key}.")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{kind_of(value)} of {len(text)} characters"
