"""The child's side of a benchmark competitor: one JSON object per line in, one per line out.

Each competitor runs in a process and an environment of its own, loads its model once, and then measures when it is
asked to, so that competitors can take turns within seconds. Whatever else a library prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Work = Callable[[dict[str, Any]], dict[str, Any]]


def serve(load: Callable[[dict[str, Any]], Work]) -> None:
    """The first line says what to load; every further one is measured and answered."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    first = json.loads(sys.stdin.readline())
    os.sched_setaffinity(0, {first["core"]})
    work = load(first)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(work(json.loads(line))) + "\n")
