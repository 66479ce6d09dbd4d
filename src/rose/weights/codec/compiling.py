"""How the codec's functions are compiled: without Python's lock, and once per machine.

As in `rose.engines.embedded.compiling`, compiled functions are kept in a folder named after the digest of the sources
they are made from, here those of this package: numba alone would notice a change in a function's own file only. The
place is set around each decoration, because numba has one for the whole process. `rose doctor` fills it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba

_njit: Any = numba.njit  # its published types leave out the options for wrappers

Function = TypeVar("Function", bound=Callable[..., Any])

FOLDERS_KEPT = 8  # of other versions; each holds some megabytes


@cache
def cache_folder() -> Path:
    """Where this version's functions are kept; `NUMBA_CACHE_DIR` overrules it."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rose"
    return _without_old(caches / f"codec-{digest.hexdigest()[:16]}")


def _without_old(folder: Path) -> Path:
    """The folder; when it is about to be made, the oldest of other versions go."""
    if not folder.exists() and folder.parent.exists():
        others = sorted(folder.parent.glob("codec-*"), key=lambda place: place.stat().st_mtime, reverse=True)
        for place in others[FOLDERS_KEPT:]:
            shutil.rmtree(place, ignore_errors=True)
    return folder


def _compiled(function: Function, **options: Any) -> Function:
    settings: Any = numba.config
    before = settings.CACHE_DIR
    settings.CACHE_DIR = str(cache_folder())
    try:
        compiled: Function = _njit(nogil=True, cache=True, no_cfunc_wrapper=True, **options)(function)
    finally:
        settings.CACHE_DIR = before
    return compiled


def entry(function: Function) -> Function:
    """For functions that Python calls."""
    return _compiled(function)


def inner(function: Function) -> Function:
    """For functions that only other compiled ones call: they need no wrapper."""
    return _compiled(function, no_cpython_wrapper=True)


def inlined(function: Function) -> Function:
    """For those that are called for every change: LLVM would leave the larger ones as calls."""
    return _compiled(function, no_cpython_wrapper=True, forceinline=True)
