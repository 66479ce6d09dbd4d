"""Reads and writes settings as text: YAML files, and dotted overrides `a.b=value`.

The dialect is YAML 1.2's core: `true`, `false`, `null`, decimal numbers and text. PyYAML implements YAML 1.1, where
`yes`, `off`, `12:30`, `010` and dates are not what they look like; its tables are replaced. A key that occurs twice is
an error, because the first value would be ignored silently. The reader and the writer share one table, so that
settings are read back equal.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import yaml

from rose.errors import ConfigError

FILE_BYTES_MAX = 1 << 20  # far above any settings a person writes; a wrong file is refused before it is parsed

_TAG = "tag:yaml.org,2002:"
_SCALARS = {  # type -> (pattern, first characters), tried in this order
    "null": (r"null|~|", ["n", "~", ""]),
    "bool": (r"true|false", list("tf")),
    "int": (r"[-+]?[0-9]+", list("-+0123456789")),
    "float": (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
}


class _Reader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - how PyYAML holds its tables

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in lines:
                raise _DuplicateKey(f"`{key}` is written twice, in lines {lines[key]} and {line}")
            lines[key] = line
        return super().construct_mapping(node, deep)


class _Writer(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012


class _DuplicateKey(Exception):
    pass


def _represent_text(writer: _Writer, data: str) -> yaml.ScalarNode:
    # YAML folds these line breaks of Unicode into spaces, unless they are escaped between double quotes.
    style = '"' if any(mark in data for mark in "\x85\u2028\u2029") else None
    return writer.represent_scalar(f"{_TAG}str", data, style=style)


def _construct_decimal(reader: _Reader, node: yaml.ScalarNode) -> int:
    return int(reader.construct_scalar(node))  # 010 is ten


for _name, (_pattern, _first) in _SCALARS.items():
    for _side in (_Reader, _Writer):
        _side.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"(?:{_pattern})\Z"), _first)
_Writer.add_representer(str, _represent_text)
_Reader.yaml_constructors = {  # without dates, sets and binary data, which no setting takes
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix(_TAG) in {*_SCALARS, "str", "seq", "map"}
}
_Reader.add_constructor(f"{_TAG}int", _construct_decimal)


def read_file(path: Path) -> Any:
    """Return the tree in a YAML file; None if it is empty."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"settings file {path} is over {FILE_BYTES_MAX} bytes", hint="is it the right file?")
        return parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"settings file {path} cannot be read: {error.strerror}", hint="check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"settings file {path} is not UTF-8 text", hint="is it the right file?") from error


def parse(text: str, origin: str) -> Any:
    """Return the tree in a YAML text; `origin` says in errors where it came from."""
    try:
        return yaml.load(text, Loader=_Reader)
    except _DuplicateKey as error:
        raise ConfigError(f"{origin}: {error}", hint="keep one of them") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = (f" (line {mark.line + 1})" if mark else "") + (f": {problem}" if problem else "")
        raise ConfigError(f"{origin} is not valid YAML{where}", hint="check the indentation and quotes") from error


def write(tree: dict[str, Any]) -> str:
    """Return the tree as YAML that `parse` reads back equal."""
    return yaml.dump(tree, Dumper=_Writer, sort_keys=False, allow_unicode=True)


def parse_override(text: str) -> tuple[list[str], Any]:
    """Return the keys and the value of an override: `front.port=9000` -> (["front", "port"], 9000)."""
    dotted, equals, value = text.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"override `{text}` is not of the form key=value", hint="write it like --set front.port=9000")
    return keys, parse(value, f"the value of --set {text}")


def as_override(key: str, value: object) -> str:
    """Return the override that sets `key` to a plain value: ("front.port", 9000) -> `front.port=9000`."""
    if isinstance(value, str):
        quoted = yaml.dump(value, Dumper=_Writer, default_style='"', width=math.inf)
        return f"{key}={quoted.strip()}"
    return f"{key}={json.dumps(value)}"
