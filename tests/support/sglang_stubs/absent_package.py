"""Stand-ins for packages that SGLang imports at start-up and does not call for text models on a CPU.

Every submodule can be imported, and every name in it is an empty class: it may be subclassed or asked for attributes.
To call one raises an error, because no test should need what it stands for.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any


class _Absent(type):
    """The class of empty classes."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{cls.__module__}.{cls.__name__} is a stand-in, and was called")


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of one package."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(self._prefix) else None

    def exec_module(self, module: ModuleType) -> None:
        _fill(module)


def _fill(module: ModuleType) -> None:
    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {"__module__": module.__name__})

    module.__getattr__ = attribute  # type: ignore[method-assign]


def install(package: str) -> None:
    """Make a package that is being imported have every name."""
    _fill(sys.modules[package])
    sys.meta_path.append(_StubFinder(package))
