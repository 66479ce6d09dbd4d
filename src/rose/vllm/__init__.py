"""vLLM as an engine of ROSE: schedulers for both sides of a lent device, and what joins them.

    vllm serve MODEL --scheduler-cls rose.vllm.ServingScheduler    beside which rollouts may run
    vllm serve MODEL --scheduler-cls rose.vllm.RolloutScheduler    started by `rose lend vllm`

Only the schedulers and the weight transfer load vLLM. The wrong scheduler of a side and an unsupported version of vLLM
are refused at start-up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_MODULES = {
    "ServingScheduler": "serving_scheduler",
    "AsyncServingScheduler": "serving_scheduler",
    "RolloutScheduler": "rollout_scheduler",
    "AsyncRolloutScheduler": "rollout_scheduler",
}


def __getattr__(name: str) -> Any:
    """Return a scheduler by the name given to `--scheduler-cls`, and load vLLM only then."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    import vllm

    from rose.vllm.supported_versions import check_names, check_version

    check_version(vllm.__version__)
    if vllm.__file__:
        check_names(Path(vllm.__file__).parent)
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
