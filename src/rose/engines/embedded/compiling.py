"""How the engine's functions are compiled: without Python's lock, kept on disk for the next start.

Wrappers for callers in Python or C take longer to compile than most functions, so only `entry` functions, which Python
calls, get the one they need. numba notices changes of the file a function is in, not of files it is made from: after
editing `vector.py`, `touch` the files that use it.
"""

from __future__ import annotations

from typing import Any

from numba import njit

_njit: Any = njit  # its published types leave out the options for wrappers

inner = _njit(nogil=True, cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
entry = _njit(nogil=True, cache=True, no_cfunc_wrapper=True)
