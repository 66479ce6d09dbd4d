"""Settings are typed and strict, and every refusal names the key, the value and the place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rose.config import yaml_text as text
from rose.config.loading import load_settings, write_resolved
from rose.config.schema import setting
from rose.config.server_settings import DeviceSettings
from rose.errors import ConfigError, Unavailable


@dataclass(frozen=True, slots=True)
class Inner:
    rate: float = setting(0.5, "how fast", minimum=0, maximum=1)
    tags: tuple[str, ...] = setting((), "words", pattern="[a-z]+", example="rose")


@dataclass(frozen=True, slots=True)
class Outer:
    name: str = setting("rose", "what it is called")
    count: int = setting(1, "how many", minimum=1)
    limit: int | None = setting(None, "at most", maximum=10)
    mode: Literal["idle", "decode"] = setting("idle", "how")
    on: bool = setting(True, "whether")
    inner: Inner = field(default_factory=Inner)


@dataclass(frozen=True, slots=True)
class Open:
    options: Mapping[str, bool | int | float | str] = setting({}, "what somebody else knows", maximum=9)


def load(tmp_path, yaml_text="", *overrides):
    path = tmp_path / "settings.yaml"
    path.write_text(yaml_text, encoding="utf-8")
    return load_settings(Outer, path, overrides)


def refusal(tmp_path, yaml_text="", *overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, yaml_text, *overrides)
    return str(caught.value)


def test_nothing_given_is_the_defaults(tmp_path):
    assert load_settings(Outer) == load(tmp_path) == load(tmp_path, "inner:\n# nothing\n") == Outer()


def test_the_file_then_the_overrides_in_order(tmp_path):
    found = load(tmp_path, "count: 2\ninner: {rate: 0.25}", "count=3", "inner.tags=[a, b]", "count=4")
    assert found == Outer(count=4, inner=Inner(rate=0.25, tags=("a", "b")))


@pytest.mark.parametrize(
    "override, key, value",
    [
        ("name=yes", "name", "yes"),
        ("name=12:30", "name", "12:30"),
        ("name=2026-01-01", "name", "2026-01-01"),
        ("name='5'", "name", "5"),
        ("name=a=b", "name", "a=b"),
        ("limit=", "limit", None),
        ("count=010", "count", 10),
        ("limit=null", "limit", None),
        ("limit=3", "limit", 3),
        ("on=false", "on", False),
        ("mode=decode", "mode", "decode"),
    ],
)
def test_overrides_are_yaml_values_without_its_surprises(tmp_path, override, key, value):
    assert getattr(load(tmp_path, "", override), key) == value


@pytest.mark.parametrize("written, value", [("1e-3", 0.001), ("1", 1.0), (".5", 0.5)])
def test_numbers_are_read_as_people_write_them(tmp_path, written, value):
    rate = load(tmp_path, f"inner: {{rate: {written}}}").inner.rate
    assert rate == value and type(rate) is float


@pytest.mark.parametrize(
    "yaml_text, overrides, words",
    [
        ("cuont: 1", (), ["`cuont`", "settings.yaml", "nearest", "`count`"]),
        ("inner: {rat: 1}", (), ["`inner.rat`", "settings.yaml", "`inner.rate`"]),
        ("rate: 1", (), ["`rate`", "`inner.rate`"]),
        ("1: 2", (), ["`1`", "nearest"]),
        ("", ("inner.x.y=1",), ["`inner.x`", "--set inner.x.y=1"]),
        ("count: many", (), ["`count`", "a whole number", "'many'", "settings.yaml", "default is 1"]),
        ("count: 1.5", (), ["`count`", "a whole number", "1.5"]),
        ("count: true", (), ["`count`", "a whole number", "true"]),
        ("count: null", (), ["`count`", "a whole number", "null"]),
        ("count: 0", (), ["`count`", "at least 1", "0"]),
        ("name: 5", (), ["`name`", "text", "5"]),
        ("on: 1", (), ["`on`", "true or false"]),
        ("limit: 11", (), ["`limit`", "at most 10", "11"]),
        ("limit: x", (), ["`limit`", "a whole number or null"]),
        ("mode: paper", (), ["`mode`", "one of idle, decode", "'paper'"]),
        ("inner: {rate: 2}", (), ["`inner.rate`", "between 0 and 1", "2"]),
        ("inner: {rate: 1e999}", (), ["`inner.rate`"]),
        ("inner: {tags: a}", (), ["`inner.tags`", "a list, each text"]),
        ("inner: {tags: [a, 1]}", (), ["`inner.tags`", "a list, each text"]),
        ("inner: {tags: [A]}", (), ["`inner.tags`", "like rose", "'A'"]),
        ("inner: 5", (), ["`inner`", "group", "rate, tags"]),
        ("- 1", (), ["top level", "group"]),
        ("count: 1\nname: a\ncount: 2", (), ["`count`", "twice", "lines 1 and 3"]),
        ("inner: {rate: 1, rate: 1}", (), ["`rate`", "twice"]),
        ("a: [", (), ["not valid YAML", "line 1"]),
        ("[1]: 2", (), ["not valid YAML"]),
        ("{" * 1500, (), ["not valid YAML"]),
        ("!!python/object/apply:os.getcwd []", (), ["not valid YAML"]),
        ("inner: {tags: !!set {a, b}}", (), ["not valid YAML", "line 1"]),
        ("name: !!timestamp 2026-01-01", (), ["not valid YAML", "line 1"]),
        ("", ("count",), ["`count`", "key=value"]),
        ("", ("=1",), ["key=value"]),
        ("", ("inner..rate=1",), ["key=value"]),
        ("", ("count=[",), ["--set count=[", "not valid YAML"]),
    ],
)
def test_refusals_name_the_key_the_value_and_the_place(tmp_path, yaml_text, overrides, words):
    said = refusal(tmp_path, yaml_text, *overrides)
    assert [word for word in words if word not in said] == [], said
    assert "\n  try: " in said


@pytest.mark.parametrize("content, words", [(b"\xff\xfe\x00", "UTF-8"), (b"#" * (text.FILE_BYTES_MAX + 1), "over")])
def test_a_file_that_is_no_settings_file(tmp_path, content, words):
    path = tmp_path / "odd.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load_settings(Outer, path)


def test_names_that_somebody_else_knows_are_laid_over_each_other_and_read_back(tmp_path):
    path = tmp_path / "open.yaml"
    path.write_text("options: {size: 4, view: grid}")
    settings = load_settings(Open, path, ["options.size=8", "options.share=0.5", "options="])
    assert settings == Open({"size": 8, "view": "grid", "share": 0.5})
    assert load_settings(Open, write_resolved(settings, tmp_path / "run")) == settings
    assert load_settings(Open, write_resolved(Open(), tmp_path / "other")) == Open()


@pytest.mark.parametrize(
    "override, words",
    [
        ("options=8", "a group of names"),
        ("options={1: 2}", "a group of names"),
        ("options.size=[8]", "each with true or false or a whole number or a number or text"),
        ("options.size.x=8", "a group of names"),
        ("options.size=", "not {'size': None}"),
        ("options.size=10", "at most 9"),
        ("option.size=8", "`options`"),
    ],
)
def test_what_no_name_may_have_is_refused(override, words):
    with pytest.raises(ConfigError) as refused:
        load_settings(Open, None, [override])
    assert words in str(refused.value) and override in str(refused.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml cannot be read: No such file"):
        load_settings(Outer, tmp_path / "absent.yaml")


def test_resolved_settings_read_back_equal(tmp_path):
    settings = load_settings(DeviceSettings, None, ["device=cpu:0-1", "front.port=0", "model_name=1e5x"])
    path = write_resolved(settings, tmp_path / "runs" / "one")
    assert path.name == "settings.yaml"
    assert load_settings(DeviceSettings, path) == settings
    assert [file.name for file in path.parent.iterdir()] == ["settings.yaml"]


def test_settings_that_cannot_be_written_are_told_and_leave_nothing_half_done(tmp_path):
    (tmp_path / "settings.yaml").mkdir()
    with pytest.raises(Unavailable, match=r"settings\.yaml cannot be written: Is a directory"):
        write_resolved(Outer(), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["settings.yaml"]
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="cannot be written"):
        write_resolved(Outer(), tmp_path / "file" / "folder")


@given(st.text(), st.floats(0, 1), st.lists(st.from_regex("[a-z]+", fullmatch=True)), st.none() | st.integers(-99, 10))
@example("\x85", 0.0, [], None)
@example("a\u2028b\u2029", 0.0, [], None)
def test_what_is_written_is_read_back_equal(name, rate, tags, limit):
    settings = replace(Outer(), name=name, limit=limit, inner=Inner(rate, tuple(tags)))
    with TemporaryDirectory() as folder:
        assert load_settings(Outer, write_resolved(settings, folder)) == settings
