"""Names have one meaning, words of the old dialect do not come back, and docstrings are sentences."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tidy.counts import FUNCTIONS, class_places, fragments, is_fragment, trees

from rose.cli.main import COMMANDS, CommandParser

DIALECT_CLASSES = {
    "Beat", "Books", "Door", "Guarded", "Guest", "Lender", "LentExecutor", "Member", "Owner", "Seat", "TurnDesk",
}  # fmt: skip
# Metaphors with a word of the field, as parts of names: `open_door`, `TurnDesk`, `_bury`.
DIALECT_PARTS = {
    "bell", "bury", "desk", "door", "doors", "epitaph", "farewell", "guest", "guests", "heard", "seat", "seats",
    "shelf", "somebody", "told",
}  # fmt: skip
# Words that no text of a command may have.
DIALECT_TEXT = re.compile(
    r"\b(door|doors|guest|guests|seat|seats|desk|nobody|somebody|anybody|whoever|the owner's word|story tells)\b"
)
# Rooms whose names and docstrings are still to be gone over; the list gets shorter, never longer.
ROOMS_TO_DO = {
    "run",
}  # fmt: skip


def is_done(path: Path) -> bool:
    return path.parts[0].removesuffix(".py") not in ROOMS_TO_DO


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and name of every class, function, argument, variable and attribute that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def parts_of(name: str) -> set[str]:
    """Return the words of a name: `open_door`, `TurnDesk` -> {open, door}, {turn, desk}."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def texts_of(parser: CommandParser) -> Iterator[str]:
    """Yield every text that the help of a command shows, of its actions too."""
    yield from filter(None, (parser.description, parser.epilog))
    for action in parser._actions:
        yield from filter(None, (action.help,))
        if isinstance(action.choices, dict):
            for inner in action.choices.values():
                yield from texts_of(inner)


def test_every_class_name_occurs_once() -> None:
    assert {name: places for name, places in class_places().items() if len(places) > 1} == {}


def test_class_names_are_the_words_of_the_field() -> None:
    assert DIALECT_CLASSES & class_places().keys() == set()


def test_names_have_no_word_of_the_old_dialect() -> None:
    odd = [
        f"{path}:{line} {name}"
        for path, tree in trees().items()
        if is_done(path)
        for line, name in defined_names(tree)
        if parts_of(name) & DIALECT_PARTS
    ]
    assert odd == []


@pytest.mark.parametrize("command", COMMANDS)
def test_texts_of_commands_are_plain(command: str) -> None:
    parser = CommandParser(prog=f"rose {command}", description=COMMANDS[command])
    importlib.import_module(f"rose.cli.{command}").configure(parser)
    assert [text for text in texts_of(parser) if DIALECT_TEXT.search(text.lower())] == []


def test_docstrings_are_no_fragments() -> None:
    assert [place for path, place in fragments() if is_done(path)] == []


@pytest.mark.parametrize(
    ("docstring", "is_odd"),
    [
        ("Of the thread that asks first.", True),
        ("With a token it is a worker.", True),
        ("By nearest rank; NaN of nothing.", True),
        ("For each worker, return its load.", False),
        ("Until the deadline, keep the request.", False),
        ("Return the load of each worker, in order.", False),
        ("One request of a trace.", False),
    ],
)
def test_a_fragment_is_told_from_a_sentence(docstring: str, is_odd: bool) -> None:
    assert is_fragment(docstring) is is_odd
