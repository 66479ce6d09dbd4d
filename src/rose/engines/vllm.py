"""The old name of ROSE's schedulers for vLLM, for one release: `--scheduler-cls rose.engines.vllm.ServingScheduler`.

The schedulers are in `rose.vllm`. A serving engine that is started with the old name keeps working.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Return what `rose.vllm` has under this name."""
    return getattr(import_module("rose.vllm"), name)
