"""JSON files of a model folder: what cannot be read or makes no sense is refused, with the file and the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rose.errors import ModelError
from rose.models.files import JSON_BYTES_MAX, Keys, read_object, read_text, sibling_name


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is not JSON"),
        (b"{'a': 1}", "is not JSON: .* line 1, column 2"),
        (b"[]", "holds a list where a JSON object is needed"),
        (b"\xff\xfe{}", "is not UTF-8 text"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "number too long"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message) as refused:
        read_object(tmp_path / "config.json")
    assert str(tmp_path / "config.json") in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_text(tmp_path / "config.json")
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        read_text(tmp_path)


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(JSON_BYTES_MAX + 1)
    with pytest.raises(ModelError, match="more than"):
        read_text(tmp_path / "config.json")


def test_values_have_the_type_that_is_asked_for() -> None:
    keys = Keys("config.json", {"a": 2.0, "b": 0.5, "c": True, "d": "x", "e": None, "f": {"g": 7}})
    assert (keys.whole("a"), keys.number("b"), keys.flag("c", False), keys.text("d")) == (2, 0.5, True, "x")
    assert "e" not in keys and keys.whole("e", 3) == 3, "null counts as absent"
    assert keys.inner("f").whole("g") == 7 and keys.inner("absent").values == {}


@pytest.mark.parametrize(
    "method, value, message",
    [
        ("whole", 1.5, "inner.key must be a whole number, not 1.5"),
        ("whole", True, "inner.key must be a whole number, not True"),
        ("whole", 0, "inner.key must be between 1 and"),
        ("number", "1", "inner.key must be a number, not '1'"),
        ("number", float("inf"), "inner.key must be a finite number above 0, not inf"),
        ("text", 3, "inner.key must be a string, not 3"),
        ("text", ["long"] * 100, "inner.key must be a string, not a list of 800 characters"),
        ("inner", [1], r"inner.key must be an object, not \[1\]"),
        ("whole", None, "inner.key is missing"),
    ],
)
def test_an_error_names_the_file_the_key_and_the_value(method: str, value: Any, message: str) -> None:
    keys = Keys("config.json", {"key": value}, "inner.")
    with pytest.raises(ModelError, match=f"config.json: {message}"):
        getattr(keys, method)("key")


def test_a_sibling_has_a_hidden_and_unique_name(tmp_path: Path) -> None:
    names = {sibling_name(tmp_path / "model").name for _ in range(20)}
    assert len(names) == 20 and all(name.startswith(".model.") for name in names)
