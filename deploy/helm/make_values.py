"""Write the chart's values.yaml and values.schema.json from the values of `rose deploy k8s`.

    python deploy/helm/make_values.py

So the chart has the same keys, defaults and limits, and Helm refuses an unknown key as ROSE does. A test compares.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rose.config.schema import METADATA_KEY, SettingLimits
from rose.deploy.deploy_values import DeployValues

CHART = Path(__file__).parent / "rose"
HEAD = "# Written by deploy/helm/make_values.py; `rose deploy k8s --values` takes the same file (docs/deploy.md).\n"
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}


def values_lines(settings: Any, indent: str = "") -> Iterator[str]:
    for each in fields(settings):
        value = getattr(settings, each.name)
        if is_dataclass(value):
            yield f"{indent}{each.name}:"
            yield from values_lines(value, indent + "  ")
            continue
        plain = json.dumps(list(value) if isinstance(value, tuple) else value)
        yield f"{indent}{each.name}: {plain}  # {each.metadata[METADATA_KEY].what}"


def schema_of(settings: Any) -> dict[str, Any]:
    annotations = get_type_hints(type(settings))
    properties = {
        each.name: schema_of(value)
        if is_dataclass(value := getattr(settings, each.name))
        else _field(each, annotations)
        for each in fields(settings)
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _field(each: Any, annotations: dict[str, Any]) -> dict[str, Any]:
    limits: SettingLimits = each.metadata[METADATA_KEY]
    schema = {"description": limits.what, **_type(annotations[each.name])}
    if limits.pattern:
        schema["pattern"] = f"^(?:{limits.pattern})$"
    for key in ("minimum", "maximum"):
        if getattr(limits, key) is not None:
            schema[key] = getattr(limits, key)
    return schema


def _type(annotation: Any) -> dict[str, Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _type(arguments[0])}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _type(arguments[1])}
    if origin in (types.UnionType, typing.Union):
        return {"type": [TYPES[each] for each in arguments]}
    return {"type": TYPES[annotation]}


def chart_files() -> dict[str, str]:
    """Return the content of both files by name."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema_of(DeployValues())}
    return {
        "values.yaml": HEAD + "\n".join(values_lines(DeployValues())) + "\n",
        "values.schema.json": json.dumps(schema, indent=1) + "\n",
    }


if __name__ == "__main__":
    for name, content in chart_files().items():
        (CHART / name).write_text(content)
