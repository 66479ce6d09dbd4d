"""Imports point inward. Reads every import in src/rose and says which arrow is wrong.

The table is also in ARCHITECTURE.md, for people; a test here keeps the two equal.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "rose"

_INNER = ["errors", "bounds", "private_files", "clock", "core", "api", "config", "observe", "models"]
_ENGINE = [*_INNER, "engines"]
_SERVERS = ["vllm", "sglang"]
_JOB = [*_ENGINE, "openai", "device", "client", "load", "weights", "envs", "worker", "gateway", *_SERVERS]
_JOB += ["train", "cost"]

# A part may import itself, `rose` (the version) and these.
MAY_IMPORT = {
    "errors": [],
    "bounds": [],
    "private_files": ["errors"],
    "clock": ["errors"],
    "numba_cache": [],
    "core": ["errors"],
    "api": ["errors", "bounds", "core"],
    "client": ["errors", "bounds", "core", "api"],
    "sharded_client": ["errors", "bounds", "core", "api", "client"],
    "config": ["errors", "bounds", "private_files", "core"],
    "observe": ["errors", "bounds", "clock", "core"],
    "models": ["errors", "bounds", "core", "config", "observe"],
    "engines": [*_INNER, "numba_cache"],
    "openai": _ENGINE,
    "device": [*_ENGINE, "openai"],
    "load": _INNER,
    "weights": [*_INNER, "numba_cache"],
    "envs": _INNER,
    "adapters": [*_INNER, "client", "weights", "envs"],
    "worker": [*_ENGINE, "device", "weights"],
    "gateway": [*_ENGINE, "openai", "weights"],
    "vllm": [*_ENGINE, "openai", "device", "worker", "gateway"],
    "sglang": [*_ENGINE, "openai", "device", "worker", "gateway", "vllm"],
    "verify": [*_ENGINE, "openai", "device", "load", "worker", "gateway", "vllm"],
    "train": [*_INNER, "weights", "envs"],
    "cost": ["errors", "bounds", "core", "config"],
    "sim": [*_ENGINE, "device", "client", "sharded_client", "weights", "worker", "gateway"],
    "plan": [*_ENGINE, "load", "cost", "sim"],
    "run": _JOB,
    "deploy": ["errors", "config"],
    "cli": [*_JOB, "sim", "plan", "run", "verify", "deploy"],
}
# What comes from outside: the core is pure, and nothing that serves loads torch or unpickles what it was sent.
CORE_OUTSIDE = {"numpy"}
NOWHERE = {"torch", "transformers", "pydantic", "fastapi", "pickle", "openai", "hypothesis", "pytest"}
# A trainer's own; what serves never loads it.
OWN = {("torch", "train"), ("torch", "weights"), ("transformers", "train")}

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(file: Path) -> str:
    inside = file.relative_to(PACKAGE)
    return inside.parts[0].removesuffix(".py")


def imports_of(file: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, inside functions too; `from a import b` is both `a` and `a.b`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively: write the whole name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def wrong_arrow(part: str, name: str) -> str | None:
    """Why `part` may not import `name`, or None."""
    words = name.split(".")
    if words[0] != "rose":
        if words[0] in NOWHERE and (words[0], part) not in OWN:
            return f"nothing in src/rose imports {words[0]}"
        is_pure = words[0] in CORE_OUTSIDE or words[0] in sys.stdlib_module_names
        return None if part != "core" or is_pure else f"the core is standard library and numpy, not {words[0]}"
    target = words[1] if len(words) > 1 else "__init__"
    if target in ("__init__", "__version__", part) or part in ("__init__", "__main__"):
        return None
    if target not in MAY_IMPORT.get(part, []):
        return f"{part} may not import {target}, only {', '.join(MAY_IMPORT.get(part, [])) or 'nothing'}"
    return None


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_arrows_point_inward(file):
    part = part_of(file)
    assert part in MAY_IMPORT or part.startswith("__"), f"{part} is a new part: give it a row in MAY_IMPORT"
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}: {reason}"
        for line, name in imports_of(file)
        if (reason := wrong_arrow(part, name))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "part, name, is_wrong",
    [
        ("core", "rose.engines.base", True),
        ("core", "rose.clock", True),
        ("core", "msgspec", True),
        ("core", "numpy.typing", False),
        ("core", "dataclasses", False),
        ("engines", "torch.nn", True),
        ("train", "torch.nn", False),
        ("train", "pickle", True),
        ("engines", "rose.openai", True),
        ("engines", "rose.models.model_spec", False),
        ("cli", "rose.openai.application", False),
        ("cli", "rose.__version__", False),
    ],
)
def test_the_rule_itself(part, name, is_wrong):
    assert (wrong_arrow(part, name) is not None) is is_wrong


def test_no_circles_in_the_table():
    order = list(MAY_IMPORT)
    backwards = [(part, name) for part in order for name in MAY_IMPORT[part] if order.index(name) >= order.index(part)]
    assert backwards == []


def test_the_architecture_page_shows_this_table():
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|$", page, re.MULTILINE)
    shown = {part: re.findall(r"`(\w+)`", names) for part, names in rows if part in MAY_IMPORT}
    assert shown == MAY_IMPORT
