"""What the benchmark's own child processes share."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent
SOURCES = BENCHMARKS.parent / "src"


def environment() -> dict[str, str]:
    """For `python -m coserving.X`: this folder and the project's sources can be imported, whatever is installed."""
    paths = [str(BENCHMARKS), str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def loop_factory() -> Callable[[], Any] | None:
    """uvloop's loop if it is installed, else asyncio's."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop
