"""Everything that is decoded from outside is bounded by its type.

The test reads the source for every call that decodes into a type (`msgspec.*.Decoder`, `decode(..., type=)`,
`convert`, `BodyReader`), evaluates that type and walks it. An integer or float without both ends, a text, list or
mapping without a longest length, or `Any`, is a failure that names the field.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect as inspect
import pytest

from rose.run.run_records import KINDS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "rose"

# Decoders whose type is an argument: the types that are passed there.
PASSED = {
    "rose.vllm.control_segment": [
        "rose.vllm.control_segment:EngineControl",
        "rose.vllm.control_segment:Status",
    ],
    "rose.weights.manifest": [f"rose.weights.manifest:{kind}" for kind in ("Manifest", "RankManifest", "Claim")],
    "rose.run.run_records": [f"rose.run.run_records:{kind.__name__}" for kind in KINDS.values()],
    "rose.openai.request_parsing": [],  # its `BodyReader` is found by name
}
# A whole message is bounded before it is decoded, and nothing is done per item: why is said there.
EXEMPT = {
    "rose.device.engine_messages:Command": "of the same user's process: the peer's uid is checked, frames are bounded",
    "rose.device.engine_messages:Event": "the same, in the other direction",
    "rose.client:Batch": "of the trainer's own gateway, which bounded every part of it when it came in",
    "rose.config.loading:annotation": "the operator's own settings: FILE_BYTES_MAX, and `_violation` checks the limits",
    "rose.engines.profiles:dict[str, Any]": "PROFILE_BYTES_MAX; its keys are checked, its values are StepProfile",
    "rose.observe.journal:_Line": "LINE_BYTES_MAX; read by `rose journal` only, and the records are checked one by one",
    "rose.observe.journal:self._types[kind]": "facts of the core, which may be infinite; integers have 64 bits",
    "rose.openai.request_parsing:dict[str, msgspec.Raw]": "only keys are read; their number was bounded before",
    "rose.run.trainer_rank:Order": "of rank 0 of the same trainer, which it follows in everything; WORD_BYTES_MAX",
    "rose.run.trainer_rank:RankPlan": "comes from the process that started it, which has checked the settings",
    "rose.device.rollout_front:RolloutFront": "comes from the process that started it, which has checked the settings",
}


def decoded_types(file: Path) -> Iterator[tuple[str, str]]:
    """(module, expression) of each type that a call in this file decodes into."""
    module = ".".join(("rose", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).removeprefix("msgspec.")
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in ("json.Decoder", "msgpack.Decoder", "BodyReader") and (node.args or "type" in given):
            yield module, ast.unparse(node.args[0] if node.args else given["type"])
        elif name in ("json.decode", "msgpack.decode") and "type" in given:
            yield module, ast.unparse(given["type"])
        elif name == "convert":
            yield module, ast.unparse(given["type"] if "type" in given else node.args[1])


FOUND = sorted({found for file in PACKAGE.rglob("*.py") for found in decoded_types(file)})


def resolve(module: str, expression: str) -> Any:
    return eval(expression, vars(importlib.import_module(module)) | {"msgspec": msgspec, "Any": Any})


def unbounded(kind: Any) -> list[str]:
    """Where the type has no bound, as a path of fields."""
    found: list[str] = []
    _walk(inspect.type_info(kind), "", found, set())
    return found


def _walk(info: Any, path: str, found: list[str], seen: set[Any]) -> None:
    match info:
        case inspect.IntType() | inspect.FloatType():
            low = info.ge if info.ge is not None else info.gt
            high = info.le if info.le is not None else info.lt
            if low is None or high is None:
                found.append(f"{path}: {type(info).__name__} without both ends")
        case inspect.StrType() | inspect.BytesType() | inspect.ByteArrayType():
            if info.max_length is None and getattr(info, "pattern", None) is None:
                found.append(f"{path}: {type(info).__name__} without a longest length")
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            if info.max_length is None:
                found.append(f"{path}: {type(info).__name__} without a longest length")
            _walk(info.item_type, f"{path}[]", found, seen)
        case inspect.DictType():
            if info.max_length is None:
                found.append(f"{path}: DictType without a longest length")
            _walk(info.key_type, f"{path}.key", found, seen)
            _walk(info.value_type, f"{path}.value", found, seen)
        case inspect.TupleType():
            for place, item in enumerate(info.item_types):
                _walk(item, f"{path}[{place}]", found, seen)
        case inspect.UnionType():
            for item in info.types:
                _walk(item, path, found, seen)
        case inspect.StructType() | inspect.DataclassType() | inspect.TypedDictType() | inspect.NamedTupleType():
            if info.cls in seen:
                return
            seen.add(info.cls)
            for field in info.fields:
                _walk(field.type, f"{path}.{info.cls.__name__}.{field.encode_name}", found, seen)
        case inspect.Metadata():
            if "checked_by" not in (info.extra or {}):  # what checks it right after it is decoded, by name
                _walk(info.type, path, found, seen)
        case inspect.AnyType() | inspect.RawType():
            found.append(f"{path}: anything at all")
        case inspect.NoneType() | inspect.BoolType() | inspect.LiteralType() | inspect.EnumType():
            pass
        case _:
            found.append(f"{path}: the test does not know {type(info).__name__}")


@pytest.mark.parametrize(("module", "expression"), FOUND)
def test_a_decoded_type_is_bounded(module: str, expression: str) -> None:
    if f"{module}:{expression}" in EXEMPT:
        return
    try:
        kind = resolve(module, expression)
    except NameError:
        assert module in PASSED, f"{module} decodes into `{expression}`: list in PASSED what that is"
        kinds = [getattr(importlib.import_module(name.split(":")[0]), name.split(":")[1]) for name in PASSED[module]]
    else:
        kinds = [kind]
    problems = [problem for kind in kinds for problem in unbounded(kind)]
    assert not problems, "\n".join(problems)
