"""The house rules that a machine can check: sizes, essays, no loose ends, nothing that holds on one machine only."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 500

# Written in pieces, so that this file does not find itself.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:root|work|home/\w+|tmp/\w)/")
WORDS = ("TO" + "DO", "FIX" + "ME", "X" + "XX", "NotImplemented" + "Error")
LOOSE_ENDS = re.compile(rf"\b(?:{'|'.join(WORDS)})\b")

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def files() -> list[Path]:
    """What is tracked or about to be; without git, everything that is not hidden."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
        found = [ROOT / name for name in listed.decode().split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        found = [path for path in ROOT.rglob("*") if not any(p.startswith(".") for p in path.relative_to(ROOT).parts)]
    return sorted(path for path in found if path.is_file())


def texts() -> list[tuple[str, str]]:
    """(name, text) of every file that is text."""
    found = []
    for path in files():
        data = path.read_bytes()
        if b"\0" not in data[:8192]:
            found.append((str(path.relative_to(ROOT)), data.decode("utf-8")))
    return found


def sources() -> list[Path]:
    return [path for path in files() if path.suffix == ".py"]


def matches(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def test_nobody_who_waits_with_a_limit_is_deaf_to_being_cancelled():
    """Python 3.11's asyncio.wait_for forgets a cancellation that comes together with what it waits for, and an agent
    that was to end went on for ever; asyncio.timeout does not."""
    calls = re.compile(r"asyncio\.wait_for\(")
    found = [place for place in matches(calls) if place.startswith("src/")]
    assert not found, "use `async with asyncio.timeout(...)`:\n" + "\n".join(found)


def test_there_is_a_house_to_look_at():
    names = {name for name, _ in texts()}
    assert {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile"} <= names
    assert len(sources()) > 20


def test_no_path_of_one_machine():
    assert matches(MACHINE_PATHS) == []


def test_no_loose_ends():
    assert matches(LOOSE_ENDS) == []


def test_constraints_are_exact_and_come_from_nowhere_in_particular():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    assert "torch==2.13.0" in pins


def test_every_module_begins_with_an_essay():
    modules = [path for path in sources() if path.is_relative_to(ROOT / "src")]
    bare = [path for path in modules if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))]
    assert bare == []


def test_no_file_is_too_long():
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert {name: lines for name, lines in long.items() if lines > FILE_LINES_MAX} == {}


def test_no_function_is_too_long():
    long = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, FUNCTIONS):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines")
    assert long == []


def _checks_directly(function: ast.AST) -> bool:
    calls = {_called(node) for node in ast.walk(function) if isinstance(node, ast.Call)}
    is_told = any(name in ("raises", "run_state_machine_as_test") or name.startswith("assert_") for name in calls)
    return is_told or any(isinstance(node, ast.Assert) for node in ast.walk(function))


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _silent_tests(paths: list[Path]) -> list[str]:
    """Tests that neither check something themselves nor call a function of the test tree, by its name, that does."""
    trees = {path: ast.walk(ast.parse(path.read_text())) for path in paths}
    found = [(path, node) for path, nodes in trees.items() for node in nodes if isinstance(node, FUNCTIONS)]
    calls = {node: {_called(call) for call in ast.walk(node) if isinstance(call, ast.Call)} for _, node in found}
    checking = {node.name for _, node in found if _checks_directly(node)}
    while more := {node.name for node, called in calls.items() if called & checking} - checking:
        checking |= more
    tests = [(path, node.name) for path, node in found if node.name.startswith("test_")]
    return [f"{path.relative_to(ROOT)} {name}" for path, name in tests if name not in checking]


def test_every_test_asserts_something():
    assert _silent_tests([path for path in sources() if path.is_relative_to(ROOT / "tests")]) == []


def test_a_silent_test_is_found_and_a_helper_that_checks_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "helpers.py").write_text("def eventually(x):\n    assert x\n")
    (tmp_path / "test_it.py").write_text("def test_loud():\n    eventually(1)\ndef test_silent():\n    print(1)\n")
    assert _silent_tests(sorted(tmp_path.iterdir())) == ["test_it.py test_silent"]


TARGETS = (
    "run",
    "test",
    "test-all",
    "bench",
    "check",
    "soak",
    "venv",
    "venv-vllm",
    "venv-sglang",
    "venv-ray",
    "test-ray",
    "help",
)


@pytest.mark.parametrize("target", TARGETS)
def test_the_makefile_has_every_target(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
