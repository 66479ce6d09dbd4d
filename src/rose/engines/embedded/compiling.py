"""How the engine's functions are compiled: without Python's lock, and once per machine.

numba keeps compiled functions on disk and notices when the file of a function changes, but not when a file it is made
from does. So the kernels are kept in a folder of their own, named after the digest of this package's sources: a change
anywhere in it compiles anew, and two checkouts do not disturb each other. `NUMBA_CACHE_DIR` overrules the place.

Wrappers for callers in Python or C take longer to compile than most functions, so only `entry` functions, which Python
calls, get the one they need.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import numba
from numba import njit

FOLDERS_KEPT = 8  # of other versions; each holds a megabyte or two


def cache_folder() -> Path:
    """Where this version's kernels are kept."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return _caches() / f"kernels-{digest.hexdigest()[:16]}"


def _caches() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rose"


def _use_cache_folder() -> None:
    folder = cache_folder()
    numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
    if folder.exists() or not _caches().exists():
        return
    others = sorted(_caches().glob("kernels-*"), key=lambda place: place.stat().st_mtime, reverse=True)
    for place in others[FOLDERS_KEPT:]:
        shutil.rmtree(place, ignore_errors=True)


_use_cache_folder()
_njit: Any = njit  # its published types leave out the options for wrappers

inner = _njit(nogil=True, cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
entry = _njit(nogil=True, cache=True, no_cfunc_wrapper=True)
