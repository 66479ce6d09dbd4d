"""config.json: what transformers reads from it, we read the same; what we cannot run is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.models.model_configs import LLAMA3, write_config

from rose.errors import ModelError
from rose.models.model_spec import read_spec
from rose.models.tensors import expected_tensors

FAMILIES = {
    "llama": {},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}


def test_every_field_is_read(tmp_path: Path) -> None:
    spec = read_spec(write_config(tmp_path))
    assert (spec.family, spec.architecture) == ("llama", "LlamaForCausalLM")
    assert (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_size) == (2, 64, 4, 2, 16)
    assert (spec.ffn, spec.vocabulary, spec.max_context_tokens, spec.rms_eps) == (96, 100, 2048, 1e-5)
    assert (spec.tied_embeddings, spec.qk_norm, spec.eos_token_ids, spec.bos_token_id) == (False, False, (2,), 1)
    assert (spec.rope.kind, spec.rope.theta, spec.dtype) == ("default", 500000.0, "bfloat16")
    assert spec.kv_values_per_token == 2 * 2 * 2 * 16


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_those_of_transformers(tmp_path: Path, family: str, tied: bool, bias: bool) -> None:
    transformers = pytest.importorskip("transformers")
    changes = FAMILIES[family] | {"attention_bias": bias, "mlp_bias": bias, "tie_word_embeddings": tied}
    spec = read_spec(write_config(tmp_path, **changes))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert expected_tensors(spec) == theirs


def test_missing_head_dim_follows_transformers(tmp_path: Path) -> None:
    assert read_spec(write_config(tmp_path, head_dim=...)).head_size == 16
    assert read_spec(write_config(tmp_path, head_dim=..., **FAMILIES["qwen3"])).head_size == 128


def test_defaults_of_old_configs(tmp_path: Path) -> None:
    removed = dict.fromkeys(("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"), ...)
    spec = read_spec(write_config(tmp_path, architectures=..., torch_dtype=..., **removed))
    assert (spec.architecture, spec.kv_heads, spec.rms_eps) == ("LlamaForCausalLM", 4, 1e-6)
    assert (spec.rope.theta, spec.tied_embeddings, spec.dtype) == (10000.0, False, "float32")


def test_new_dtype_key(tmp_path: Path) -> None:
    assert read_spec(write_config(tmp_path, torch_dtype=..., dtype="float16")).dtype == "float16"


def test_end_tokens_of_both_files(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=[7, 2])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert read_spec(tmp_path).eos_token_ids == (7, 2, 9)
    write_config(tmp_path, eos_token_id=None)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert read_spec(tmp_path).eos_token_ids == (5,)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["MixtralForCausalLM"]}, "names architecture MixtralForCausalLM"),
    ({"architectures": ..., "model_type": "gpt2"}, "names model_type 'gpt2'"),
    ({"architectures": ..., "model_type": ...}, "names no architecture"),
    ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings"),
    ({"hidden_size": ...}, "hidden_size is missing"),
    ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ({"max_position_embeddings": ...}, "max_position_embeddings is missing"),
    ({"vocab_size": "many"}, "vocab_size must be a whole number, not 'many'"),
    ({"vocab_size": True}, "vocab_size must be a whole number, not True"),
    ({"vocab_size": 10**30}, "vocab_size must be between"),
    ({"intermediate_size": -96}, "intermediate_size must be between 1 and"),
    ({"intermediate_size": 96.5}, "intermediate_size must be a whole number, not 96.5"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be between 1 and"),
    ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
    ({"head_dim": ..., "hidden_size": 66}, r"hidden_size \(66\) must be a multiple of num_attention_heads"),
    ({"head_dim": 15}, "head_dim must be even"),
    ({"rms_norm_eps": 0}, "rms_norm_eps must be a finite number above 0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number above 0"),
    ({"rope_theta": 10**400}, "rope_theta must be a finite number"),
    ({"rope_theta": 1}, "rope_theta must be a finite number above 1"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, not 'yes'"),
    ({"torch_dtype": 16}, "torch_dtype must be a string"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu"),
    ({"use_sliding_window": True}, "use_sliding_window is true; sliding window attention is not supported"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types names 'sliding_attention'"),
    ({"layer_types": "full_attention"}, "layer_types must be a list"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is set; quantised weights"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor is not 1"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type is 'dynamic', which depends on the run"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type is 'longrope', which depends on"),
    ({"rope_parameters": {"rope_type": "mrope"}}, "rope_parameters.rope_type is 'mrope', which is not known"),
    ({"rope_parameters": {"full_attention": {}}}, "rope_parameters is given per layer type"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    ({"rope_scaling": {"type": "linear", "factor": -2}}, "rope_scaling.factor must be a finite number above 0"),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor must be above"),
    ({"rope_scaling": [1]}, "rope_scaling must be an object"),
    ({"eos_token_id": 100}, "eos_token_id names token 100, outside the vocabulary of 100"),
    ({"eos_token_id": [2, "x"]}, "eos_token_id must be a token id or a list of them"),
    ({"bos_token_id": -1}, "bos_token_id names token -1"),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=[message for _, message in REFUSED])
def test_a_config_that_cannot_run_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message) as refused:
        read_spec(tmp_path)
    assert str(tmp_path / "config.json") in str(refused.value)


def test_supported_architectures_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM"):
        read_spec(write_config(tmp_path, architectures=["BertModel"]))


def test_bad_generation_config_is_named(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1000}')
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id names token 1000"):
        read_spec(tmp_path)
