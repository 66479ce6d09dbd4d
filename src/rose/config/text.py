"""Settings as text: a strict, small YAML, and dotted overrides `a.b=value`.

The dialect is YAML 1.2's core: `true`, `false`, `null`, decimal numbers and text. `yes`, `off`, `12:30`, `010` and
dates are not what they look like in YAML 1.1, so here they are text or plain decimals. A key written twice is an
error, since the first one would be ignored in silence. What is written is read back equal: reader and writer share
one table.
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

_SCALARS = (
    ("tag:yaml.org,2002:null", r"null|~|", ["n", "~", ""]),
    ("tag:yaml.org,2002:bool", r"true|false", list("tf")),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
        list("-+.0123456789"),
    ),
)


class _Reader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - how PyYAML holds its tables

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in lines:
                raise _Twice(key, lines[key], line)
            lines[key] = line
        return super().construct_mapping(node, deep)

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))


class _Writer(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Breaks that only Unicode knows would be folded into spaces; between double quotes they are escaped."""
        style = '"' if any(mark in data for mark in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


for _tag, _pattern, _first in _SCALARS:
    for _side in (_Reader, _Writer):
        _side.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), _first)
_Writer.add_representer(str, _Writer.represent_str)
_Reader.add_constructor("tag:yaml.org,2002:int", _Reader.construct_decimal)


class _Twice(Exception):
    def __init__(self, key: str, first_line: int, second_line: int) -> None:
        super().__init__(f"`{key}` is written twice, in lines {first_line} and {second_line}")


def read_file(path: Path) -> Any:
    """The tree in a YAML file; None if it is empty."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"settings file {path} is over {FILE_BYTES_MAX} bytes", hint="is it the right file?")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"settings file {path} cannot be read: {error.strerror}", hint="check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"settings file {path} is not UTF-8 text", hint="is it the right file?") from error
    return parse(text, str(path))


def parse(text: str, origin: str) -> Any:
    """The tree in a YAML text; `origin` says in errors where it came from."""
    try:
        return yaml.load(text, Loader=_Reader)
    except _Twice as error:
        raise ConfigError(f"{origin}: {error}", hint="keep one of them") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{origin} is not valid YAML{_where(error)}", hint="check the indentation and quotes"
        ) from error


def write(tree: dict[str, Any]) -> str:
    """The tree as YAML that `parse` reads back equal."""
    return yaml.dump(tree, Dumper=_Writer, sort_keys=False, allow_unicode=True)


def parse_override(text: str) -> tuple[list[str], Any]:
    """`front.port=9000` -> (["front", "port"], 9000)."""
    dotted, equals, value = text.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"override `{text}` is not of the form key=value", hint="write it like --set front.port=9000")
    return keys, parse(value, f"the value of --set {text}")


def as_override(key: str, value: object) -> str:
    """The override that sets `key` to a plain value: ("front.port", 9000) -> `front.port=9000`."""
    if isinstance(value, str):
        quoted = yaml.dump(value, Dumper=_Writer, default_style='"', width=math.inf)
        return f"{key}={quoted.strip()}"
    return f"{key}={json.dumps(value)}"


def _where(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    line = f" (line {mark.line + 1})" if mark is not None else ""
    return f"{line}: {problem}" if problem else line
