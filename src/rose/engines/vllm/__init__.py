"""vLLM as an engine of ROSE: schedulers for both sides of a lent device, and what joins them.

    vllm serve MODEL --scheduler-cls rose.engines.vllm.ServingScheduler    beside which rollouts may run
    vllm serve MODEL --scheduler-cls rose.engines.vllm.RolloutScheduler    started by `rose lend vllm`

`mapped.py`, `board.py`, `desk.py`, `finding.py` and `gate.py` do not need vLLM; only the schedulers load it, when they
are asked for by name. Which of the two names of a side is right depends on vLLM's own scheduling; the wrong one is
refused at start-up. So is a vLLM that they were not written for, before anything else of it is loaded, which may not be
there.
"""

from __future__ import annotations

from typing import Any

_WHERE = {
    "ServingScheduler": "serving",
    "AsyncServingScheduler": "serving",
    "RolloutScheduler": "rollout",
    "AsyncRolloutScheduler": "rollout",
}


def __getattr__(name: str) -> Any:
    """The schedulers, by the names that `--scheduler-cls` is given; vLLM is loaded then."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    import vllm

    from rose.engines.vllm.support import check_version

    check_version(vllm.__version__)
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
