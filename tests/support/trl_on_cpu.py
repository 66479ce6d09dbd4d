"""Runs a script of TRL's asynchronous trainer on a machine without a GPU: python trl_on_cpu.py SCRIPT ARGUMENTS...

TRL needs one kernel of FlashAttention 3, which exists for GPUs only, and the peak speed of the device, which torch does
not know of a CPU. Both are replaced here. Everything else is TRL's own.
"""

from __future__ import annotations

import os
import runpy
import sys
import types
from itertools import pairwise

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
import trl.experimental.async_grpo.async_grpo_trainer as trainer_module
import trl.experimental.async_grpo.packing as packing

PEAK_FLOPS = 1e12  # any number: only a share that TRL logs depends on it


def attend(query, key, value, query_edges, key_edges, *_, softmax_scale=None, **__) -> torch.Tensor:
    """FlashAttention's varlen call, causal and aligned at the end, one segment at a time."""
    parts = []
    for (first, last), (key_first, key_last) in zip(pairwise(query_edges.tolist()), pairwise(key_edges.tolist())):
        queries, keys, values = (
            part.transpose(0, 1)[None]
            for part in (query[first:last], key[key_first:key_last], value[key_first:key_last])
        )
        rows, columns = queries.shape[2], keys.shape[2]
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        found = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts)


def install() -> None:
    torch.set_num_threads(1)
    packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=attend)
    trainer_module.get_peak_flops_per_device = lambda *_, **__: PEAK_FLOPS


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
