"""RoPE: the frequencies are those of transformers, in every supported variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.models.model_configs import LLAMA3, YARN, write_config

from rose.models.model_spec import read_spec
from rose.models.rope import rope_frequencies

ROPES: dict[str, dict[str, Any]] = {
    "default, old": {"rope_theta": 1e6},
    "default, new": {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "default, silent": {"rope_theta": ...},
    "linear, old": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear, new": {"rope_theta": ..., "rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 2e4}},
    "llama3, old": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3, new": {"rope_theta": ..., "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    "yarn, old": {"rope_scaling": {"type": "yarn", **YARN}},
    "yarn, new": {"rope_theta": ..., "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
    "yarn, factor implied": {"rope_scaling": {"rope_type": "yarn", **YARN, "factor": None}},
    "yarn, not truncated": {"rope_scaling": {"rope_type": "yarn", **YARN, "truncate": False}},
    "yarn, betas": {"rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": 20, "beta_slow": 2}},
    "yarn, mscale": {"rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 0.9}},
    "yarn, attention factor": {"rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 1.3}},
    "original context outside": {
        "original_max_position_embeddings": 256,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0},
    },
}


@pytest.mark.parametrize("head_size", [16, 64, 128])
@pytest.mark.parametrize("case", ROPES)
def test_frequencies_are_those_of_transformers(tmp_path: Path, case: str, head_size: int) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    write_config(tmp_path, head_dim=head_size, **ROPES[case])
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    spec = read_spec(tmp_path)
    ours, scaling = rope_frequencies(spec.rope, spec.head_size)
    assert ours.dtype == np.float32
    assert scaling == theirs.attention_scaling
    # Equal but for the last bit of a power, which differs between the two libraries by machine; llama3's blend makes
    # three of it.
    np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=6e-7, atol=0)
