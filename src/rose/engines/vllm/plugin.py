"""What vLLM loads at start-up in every process where ROSE is installed (`vllm.general_plugins`).

It registers the weight-transfer engine `rose`, which does nothing until somebody asks for it by name. Only in rollout
engines, which our own agent starts with a variable set, it does more; serving engines are left alone.
CPU weights are kept as they are loaded: vLLM packs them for its kernels and throws the originals away, and packed
weights cannot be patched. And process groups of one share a Gloo device: vLLM makes a dozen of them, and torch gives
each a device with a thread that wakes up a hundred times a second, which a gated engine should not.

Whatever is raised here would end vLLM. So one that this was not written for is told of in a line and goes on as if ROSE
were not installed; only a rollout engine, which nobody could give weights then, does not start.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from rose.engines.vllm.support import WRITTEN_FOR

logger = logging.getLogger("vllm.rose")

ROLLOUT_VARIABLE = "ROSE_VLLM_ROLLOUT"


def register() -> None:
    """Called without arguments, more than once."""
    is_rollout = os.environ.get(ROLLOUT_VARIABLE) == "1"
    try:
        _offer_weights()
        if is_rollout:
            _keep_weights_unpacked()
            _share_gloo_device()
    except Exception as error:
        if is_rollout:
            raise
        logger.warning("ROSE is written for vLLM %s, and this one goes on without it: %r", WRITTEN_FOR, error)


def _offer_weights() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "rose" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("rose", "rose.engines.vllm.weights", "RoseWeights")


def _keep_weights_unpacked() -> None:
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = utils.torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep


def _share_gloo_device() -> None:
    distributed_c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")  # vLLM has loaded torch
    gloo: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if gloo is None or hasattr(gloo, "rose_device"):
        return

    class Sharing(gloo):  # type: ignore[misc]
        rose_device: Any = None

        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            if size > 1:
                super().__init__(store, rank, size, timeout=timeout)
                return
            Sharing.rose_device = Sharing.rose_device or gloo.create_default_device()
            options = gloo._Options()
            options._devices, options._timeout = [Sharing.rose_device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Sharing
