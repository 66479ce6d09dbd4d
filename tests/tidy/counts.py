"""Counts what the rules of the house bound: size, names, imports, docstrings. `make tidy` prints the counts.

The tests of this folder use the same functions, so that a count and a failure cannot disagree.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "rose"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# A docstring that starts with one of these says when, where or whose, but not what.
FRAGMENT_STARTS = {
    "about", "after", "against", "as", "at", "before", "behind", "below", "beside", "between", "but", "by", "during",
    "else", "for", "from", "if", "in", "into", "of", "off", "on", "only", "once", "over", "per", "since", "so",
    "than", "through", "to", "under", "until", "upon", "when", "where", "while", "with", "within", "without",
}  # fmt: skip
# One of these after the first clause makes the sentence whole: "For each worker, return its load."
IMPERATIVES = {
    "add", "append", "apply", "ask", "build", "call", "cancel", "check", "choose", "close", "compute", "count",
    "create", "decode", "delete", "encode", "end", "fail", "fetch", "fill", "find", "forget", "hold", "keep", "let",
    "make", "mark", "move", "open", "park", "pass", "place", "play", "print", "publish", "put", "raise", "read",
    "refuse", "reject", "remove", "replace", "report", "return", "run", "send", "serve", "set", "show", "start",
    "stop", "store", "take", "tell", "wait", "write", "yield",
}  # fmt: skip
COUNT_MODULES = """
import sys
before = set(sys.modules)
from rose import GatewayClient
loaded = set(sys.modules) - before
print(sum(name.split(".")[0] == "rose" for name in loaded), len(loaded))
"""


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax tree of every module of the package, by its path inside it."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def module_lines() -> dict[Path, int]:
    return {path: len((PACKAGE / path).read_text(encoding="utf-8").splitlines()) for path in trees()}


def class_places() -> dict[str, list[str]]:
    """Return the modules in which each class name is defined."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path))
    return places


def is_fragment(docstring: str) -> bool:
    """Return whether a docstring starts with a preposition or conjunction, and no verb in the imperative follows."""
    sentence = re.split(r"[.;:](?:\s|$)", docstring.strip(), maxsplit=1)[0].lower()
    words = re.findall(r"[a-z]+", sentence)
    clauses = re.findall(r",\s+(?:then\s+)?([a-z]+)", sentence)
    return bool(words) and words[0] in FRAGMENT_STARTS and not IMPERATIVES.intersection(clauses)


def fragments() -> Iterator[tuple[Path, str]]:
    """Yield the module of every docstring that is a fragment, with its line, name and first line."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                docstring = ast.get_docstring(node) or ""
                if is_fragment(docstring):
                    yield path, f"{path}:{node.lineno} {node.name}: {docstring.splitlines()[0]}"


def longest_function() -> tuple[int, str]:
    return max(
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{path} {node.name}")
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
    )


def modules_with_a_test() -> tuple[int, int]:
    """Return how many modules have a test file with their name, alone or after their package's, and how many exist."""
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    modules = [path for path in trees() if path.stem not in ("__init__", "__main__")]
    names = ({f"test_{path.stem}", f"test_{'_'.join((*path.parts[:-1], path.stem))}"} for path in modules)
    named_after_room = ({f"test_{path.parent.name}_{path.stem}"} for path in modules)
    return sum(bool(tests & (one | other)) for one, other in zip(names, named_after_room)), len(modules)


def paths() -> dict[str, list[tuple[Path, str]]]:
    """Return the paths that ARCHITECTURE.md follows through the code: of each, the (module, name) of every step."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = page.partition("## The paths in the code")[2].partition("\n## ")[0]
    steps: dict[str, list[tuple[Path, str]]] = {}
    for part in section.split("\n### ")[1:]:
        cells = re.findall(r"\| `([\w/]+\.py): ([\w.]+)` \|", part)
        steps[part.partition("\n")[0]] = [(Path(module), name) for module, name in cells]
    return steps


def names_in(module: Path) -> set[str]:
    """Return the functions and classes of a module, and the methods as `Class.method`."""
    body = trees()[module].body
    names = {node.name for node in body if isinstance(node, (*FUNCTIONS, ast.ClassDef))}
    methods = ((one.name, node.name) for one in body if isinstance(one, ast.ClassDef) for node in one.body
               if isinstance(node, FUNCTIONS))  # fmt: skip
    return names | {f"{owner}.{method}" for owner, method in methods}


def length_of(path: list[tuple[Path, str]]) -> str:
    """Return how many files a path goes through, and how often it changes room."""
    rooms = [module.parts[0] for module, _ in path]
    changes = sum(before != after for before, after in pairwise(rooms))
    return f"{len({module for module, _ in path})} files, {changes} changes of room"


def settings_without_a_page() -> int:
    """Return how many settings docs/settings.md does not list as `rose settings` prints them."""
    command = [sys.executable, "-m", "rose", "settings", "--markdown"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in printed.splitlines() if line.startswith("| `")]
    assert rows, "`rose settings --markdown` prints no settings"
    return sum(row not in page for row in rows)


def main() -> None:
    lines = module_lines()
    longest = max(lines, key=lambda path: lines[path])
    function_lines, function = longest_function()
    command = [sys.executable, "-c", COUNT_MODULES]
    ours, loaded = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    tested, modules = modules_with_a_test()
    rows = {
        "lines in src/rose": f"{sum(lines.values()):,}",
        "class names with two meanings": sum(len(places) > 1 for places in class_places().values()),
        "modules loaded by `from rose import GatewayClient`": f"{ours} of ROSE, {loaded} in all",
        "docstrings that are fragments": sum(1 for _ in fragments()),
        "longest function": f"{function_lines} lines, {function}",
        "longest module": f"{lines[longest]} lines, {longest}",
        "modules whose test is found by its name": f"{tested} of {modules}",
        "settings without a page": settings_without_a_page(),
        **{f"path of {name.lower()}": length_of(path) for name, path in paths().items()},
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
