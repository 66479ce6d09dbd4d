"""The compilation of a package's numba functions: without Python's lock, and once per machine.

numba notices when the file of a function changes, but not when a file it calls does. So the functions of a package are
kept in a folder named after the digest of the package's sources: a change anywhere compiles anew, and two checkouts do
not disturb each other. numba's setting of the folder is global and belongs to the host program: it is set while one
function is decorated, and restored. `NUMBA_CACHE_DIR` overrules the folder. `rose doctor` fills it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numba

FOLDERS_KEPT = 8  # of other versions; each holds some megabytes

Function = TypeVar("Function", bound=Callable[..., Any])
_setting = threading.Lock()


class NumbaCache:
    """The decorators of one package, and the folder of the functions they compile."""

    def __init__(self, package: Path, name: str) -> None:
        self._package, self._name = package, name

    @property
    def folder(self) -> Path:
        chosen = os.environ.get("NUMBA_CACHE_DIR")
        return Path(chosen) if chosen else self._own_folder

    @cached_property
    def _own_folder(self) -> Path:
        digest = hashlib.sha256(numba.__version__.encode())
        for source in [*sorted(self._package.glob("*.py")), Path(__file__)]:
            digest.update(source.read_bytes())
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rose"
        folder = caches / f"{self._name}-{digest.hexdigest()[:16]}"
        if not folder.exists():
            with suppress(OSError):  # another process may remove them at the same time
                others = sorted(caches.glob(f"{self._name}-*"), key=lambda place: place.stat().st_mtime, reverse=True)
                for place in others[FOLDERS_KEPT:]:
                    shutil.rmtree(place, ignore_errors=True)
        return folder

    def entry(self, function: Function) -> Function:
        """Compile a function that Python calls."""
        return self._compile(function)

    def inner(self, function: Function) -> Function:
        """Compile a function that only compiled functions call: its wrapper would take longer than most functions."""
        return self._compile(function, no_cpython_wrapper=True)

    def inlined(self, function: Function) -> Function:
        """Compile a function that is called for every element: LLVM would not inline the larger ones."""
        return self._compile(function, no_cpython_wrapper=True, forceinline=True)

    def callback(self, signature: str) -> Callable[[Function], Any]:
        """Compile a function that machine code calls by its address."""

        def compile_now(function: Function) -> Any:
            with self._placed():
                return numba.cfunc(signature, cache=True)(function)

        return compile_now

    def _compile(self, function: Function, **options: Any) -> Function:
        njit: Any = numba.njit  # its published types leave out the options for wrappers
        with self._placed():
            compiled: Function = njit(nogil=True, cache=True, no_cfunc_wrapper=True, **options)(function)
        return compiled

    @contextmanager
    def _placed(self) -> Iterator[None]:
        config: Any = numba.config
        with _setting:
            before = config.CACHE_DIR
            config.CACHE_DIR = str(self.folder)
            try:
                yield
            finally:
                config.CACHE_DIR = before
