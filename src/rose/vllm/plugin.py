"""What vLLM loads at start-up in every process where ROSE is installed (`vllm.general_plugins`).

The weight-transfer engine `rose` does nothing until it is requested by name. Only rollout engines, which the agent
starts with a variable set, get more: CPU weights are kept as they are loaded, because vLLM packs them for its kernels,
and packed weights cannot be patched. Process groups of one share a Gloo device, because vLLM makes a dozen groups, each
with a thread that wakes up a hundred times a second. On a CPU the worker processes of several ranks sleep where vLLM's
spin on the cores that serve: between steps, and while a rank waits for another one. An exception here would end vLLM.
So with an unsupported version it logs one line and goes on without ROSE; only a rollout engine, which could not get
weights then, does not start.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from rose.vllm.supported_versions import WRITTEN_FOR

logger = logging.getLogger("vllm.rose")

ROLLOUT_VARIABLE = "ROSE_VLLM_ROLLOUT"
POOL_VARIABLE = "ROSE_KV_POOL"  # of a serving engine `auto` or a folder; of a rollout engine serving's folder


def register() -> None:
    """Register what ROSE adds to vLLM, which calls this more than once per process."""
    is_rollout, pool = os.environ.get(ROLLOUT_VARIABLE) == "1", os.environ.get(POOL_VARIABLE, "")
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        if "rose" not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine("rose", "rose.vllm.vllm_weights", "RoseWeights")
        if is_rollout:
            _keep_weights_unpacked()
            _share_gloo_device()
            _let_ranks_sleep()
        if pool:
            from rose.vllm.kv_allocation import install

            install(pool, is_serving=not is_rollout)
    except Exception as error:
        if is_rollout or pool:
            raise
        logger.warning("ROSE is written for vLLM %s, and this one goes on without it: %r", WRITTEN_FOR, error)


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


def _let_ranks_sleep() -> None:
    """Let the ranks of an engine on a CPU wait for messages and for each other without spinning.

    vLLM spins for a second after every message, and in its sums over shared memory until every rank has come. Gloo,
    which it has for ranks that share no memory, sleeps, and fails at once when a rank has died.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        SpinCondition.record_read = lambda condition: None
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda communicator: False
