"""What vLLM loads at start-up in every process where ROSE is installed (`vllm.general_plugins`).

It registers the weight-transfer engine `rose`, which does nothing until somebody asks for it by name. Only in rollout
engines, which our own agent starts with a variable set, it also keeps CPU weights as they are loaded: vLLM packs them
for its kernels and throws the originals away, and packed weights cannot be patched. Serving engines are left alone.
"""

from __future__ import annotations

import os
from typing import Any

ROLLOUT_VARIABLE = "ROSE_VLLM_ROLLOUT"


def register() -> None:
    """Called without arguments, more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "rose" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("rose", "rose.engines.vllm.weights", "RoseWeights")
    if os.environ.get(ROLLOUT_VARIABLE) == "1":
        _keep_weights_unpacked()


def _keep_weights_unpacked() -> None:
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = utils.torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep
