"""Weights: one file or shards, any of three types, memory; and every way in which they can be wrong."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rose.errors import ModelError
from rose.models.model_spec import ModelSpec
from rose.models.presets import random_weights
from rose.models.rope import Rope
from rose.models.tensors import (
    MemoryTensors,
    Tensors,
    check,
    expected_tensors,
    from_bf16,
    is_bf16_valued,
    open_tensors,
    tensors_are_bf16_valued,
    to_bf16,
    write_tensors,
)

Weights = dict[str, np.ndarray]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


TINY = ModelSpec(
    family="qwen3",
    architecture="Qwen3ForCausalLM",
    layers=2,
    hidden=16,
    heads=2,
    kv_heads=1,
    head_size=8,
    ffn=24,
    vocabulary=32,
    max_context_tokens=64,
    rms_eps=1e-6,
    tied_embeddings=True,
    qk_norm=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    rope=Rope(),
)


@pytest.fixture
def weights() -> Weights:
    """Random numbers that are exact in bf16, f16 and f32 alike."""
    exact = random_weights(TINY, "plain", "test")
    return {name: np.round(values * 1024).astype(np.float32) / 1024 for name, values in exact.items()}


def write_shards(folder: Path, weights: Weights, shards: int) -> None:
    """The same weights spread over files, with their index."""
    names = sorted(weights)
    places = {name: f"model-{1 + rank % shards:05}-of-{shards:05}.safetensors" for rank, name in enumerate(names)}
    for file in set(places.values()):
        write_tensors(folder / file, {name: weights[name] for name in names if places[name] == file}, "f32")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_all_forms_hold_the_same(tmp_path: Path, weights: Weights) -> None:
    forms: dict[str, Any] = {"memory": MemoryTensors(weights)}
    forms["bits"] = MemoryTensors({name: to_bf16(values) for name, values in weights.items()})
    for dtype in ("bf16", "f16", "f32"):
        (tmp_path / dtype).mkdir()
        write_tensors(tmp_path / dtype / "model.safetensors", weights, dtype)
        forms[dtype] = open_tensors(tmp_path / dtype)
        assert forms[dtype].dtype(Q_PROJ) == dtype.upper()
    write_shards(tmp_path, weights, 3)
    forms["shards"] = open_tensors(tmp_path)
    for form, tensors in forms.items():
        check(tensors, TINY)
        assert sorted(tensors.names()) == sorted(weights), form
        for name, values in weights.items():
            assert tensors.shape(name) == values.shape
            assert tensors.float32(name).dtype == np.float32
            np.testing.assert_array_equal(tensors.float32(name), values, err_msg=f"{form} {name}")
            np.testing.assert_array_equal(tensors.bits16(name), to_bf16(values), err_msg=f"{form} {name}")
        assert tensors_are_bf16_valued(tensors, TINY)


def test_files_are_those_of_safetensors(tmp_path: Path, weights: Weights) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    write_tensors(tmp_path / "ours.safetensors", weights, "bf16", {"b": "2", "a": "1"})
    theirs = load_file(tmp_path / "ours.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in theirs.values())
    for name, values in weights.items():
        np.testing.assert_array_equal(theirs[name].float().numpy(), values)
    save_file({name: torch.from_numpy(values) for name, values in weights.items()}, tmp_path / "model.safetensors")
    ours = open_tensors(tmp_path)
    np.testing.assert_array_equal(ours.float32(Q_PROJ), weights[Q_PROJ])


def test_folder_saved_by_transformers_in_shards(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=32)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert not (tmp_path / "model.safetensors").exists()
    from rose.models.model_spec import read_spec

    tensors = open_tensors(tmp_path)
    check(tensors, read_spec(tmp_path))
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(tensors.float32(name), parameter.detach().numpy())


def test_same_weights_same_bytes(tmp_path: Path, weights: Weights) -> None:
    backwards = dict(reversed(weights.items()))
    write_tensors(tmp_path / "a", weights, "bf16", {"x": "1", "y": "2", "z": "3"})
    write_tensors(tmp_path / "b", backwards, "bf16", {"z": "3", "y": "2", "x": "1"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_unaligned_file_is_read(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    header += b" " * (1 - len(header) % 2)
    assert len(header) % 2 == 1
    numbers = np.array([1.5, -2.5], dtype=np.float32)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + numbers.tobytes())
    read = open_tensors(tmp_path).float32("x")
    assert read.flags.aligned
    np.testing.assert_array_equal(read, numbers)


floats = arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32, allow_nan=True, allow_infinity=True))


@given(floats)
def test_bf16_rounds_as_torch_does(values: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    theirs = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    ours = from_bf16(to_bf16(values))
    np.testing.assert_array_equal(ours, theirs)
    assert is_bf16_valued(ours[~np.isnan(ours)])
    np.testing.assert_array_equal(from_bf16(to_bf16(ours)), ours)


def test_ties_go_to_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], dtype=np.uint32)
    assert to_bf16(bits.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80]


def test_values_that_are_not_bf16_are_noticed(tmp_path: Path, weights: Weights) -> None:
    weights[Q_PROJ] = weights[Q_PROJ] + np.float32(1 + 2**-10)
    for dtype in ("f16", "f32"):
        write_tensors(tmp_path / "model.safetensors", weights, dtype)
        tensors = open_tensors(tmp_path)
        assert not tensors_are_bf16_valued(tensors, TINY)
        with pytest.raises(ModelError, match=f"{Q_PROJ} in model.safetensors holds numbers that are not bf16"):
            tensors.bits16(Q_PROJ)
    write_tensors(tmp_path / "model.safetensors", weights, "bf16")
    assert tensors_are_bf16_valued(open_tensors(tmp_path), TINY)


def test_norms_need_not_be_bf16(weights: Weights) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"] + np.float32(2**-20)
    assert tensors_are_bf16_valued(MemoryTensors(weights), TINY)


def test_f16_overflow_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="x holds numbers beyond 65504"):
        write_tensors(tmp_path / "x.safetensors", {"x": np.array([1e6], dtype=np.float32)}, "f16")
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_the_old_file(tmp_path: Path, weights: Weights) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path, weights, "f16")
    before = path.read_bytes()
    with pytest.raises(ModelError):
        write_tensors(path, {**weights, "z": np.array([1e6], dtype=np.float32)}, "f16")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.safetensors"]


def refusal(tensors: Tensors, spec: ModelSpec) -> str:
    with pytest.raises(ModelError) as refused:
        check(tensors, spec)
    return str(refused.value)


class TestWrongFolders:
    """Each case names the file at fault."""

    @pytest.fixture
    def folder(self, tmp_path: Path, weights: Weights) -> Path:
        write_tensors(tmp_path / "model.safetensors", weights)
        return tmp_path

    @pytest.fixture
    def sharded(self, tmp_path: Path, weights: Weights) -> Path:
        write_shards(tmp_path, weights, 2)
        return tmp_path

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"model\.safetensors is missing, and so is model\.safetensors\.index"):
            open_tensors(tmp_path)

    @pytest.mark.parametrize("kept", [0, 4, 8, 100, -1])
    def test_truncated(self, folder: Path, kept: int) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(ModelError, match=r"model\.safetensors is not a whole safetensors file: .*\n.*truncated"):
            open_tensors(folder)

    def test_not_safetensors(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
        with pytest.raises(ModelError, match=r"model\.safetensors is not a whole safetensors file"):
            open_tensors(folder)

    def test_a_folder_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").mkdir()
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            open_tensors(tmp_path)

    def test_missing_shard(self, sharded: Path) -> None:
        (sharded / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ModelError, match=r"index\.json names model-00002-of-00002\.safetensors, which is not in"):
            open_tensors(sharded)

    def test_truncated_shard(self, sharded: Path) -> None:
        path = sharded / "model-00001-of-00002.safetensors"
        path.write_bytes(path.read_bytes()[:-7])
        with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors is not a whole safetensors file"):
            open_tensors(sharded)

    def test_index_that_lies(self, sharded: Path) -> None:
        path = sharded / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["extra"] = "model-00001-of-00002.safetensors"
        path.write_text(json.dumps(index))
        with pytest.raises(ModelError, match=r"says extra is in model-00001-of-00002\.safetensors, but it is not"):
            open_tensors(sharded)

    @pytest.mark.parametrize("places", [None, {}, [], {"a": 3}, {"a": "../b.safetensors"}, {"a": ""}, {"a": ".."}])
    def test_index_without_a_map(self, tmp_path: Path, places: object) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json: weight_map"):
            open_tensors(tmp_path)

    def test_unknown_tensor(self, folder: Path) -> None:
        with pytest.raises(ModelError, match="holds no tensor nothing"):
            open_tensors(folder).float32("nothing")
        with pytest.raises(ModelError, match="memory holds no tensor nothing"):
            MemoryTensors({}).float32("nothing")

    def test_missing_tensor(self, folder: Path, weights: Weights) -> None:
        del weights[Q_PROJ]
        write_tensors(folder / "model.safetensors", weights)
        assert f"the weights in {folder} lack {Q_PROJ}, which config.json implies" in refusal(
            open_tensors(folder), TINY
        )

    def test_many_missing_tensors_are_counted(self, folder: Path) -> None:
        message = refusal(open_tensors(folder), replace(TINY, layers=4))
        assert "lack model.layers.2.input_layernorm.weight" in message
        assert "and 19 more" in message

    def test_untied_model_without_head(self, folder: Path) -> None:
        assert "lack lm_head.weight" in refusal(open_tensors(folder), replace(TINY, tied_embeddings=False))

    def test_wrong_shape(self, sharded: Path, weights: Weights) -> None:
        weights[Q_PROJ] = weights[Q_PROJ][:, :8]
        write_shards(sharded, weights, 2)
        tensors = open_tensors(sharded)
        expected = f"{Q_PROJ} in {tensors.place(Q_PROJ)} is (16, 8), config.json implies (16, 16)"
        assert expected in refusal(tensors, TINY)
        assert expected.replace(tensors.place(Q_PROJ), "memory") in refusal(MemoryTensors(weights), TINY)

    def test_wrong_dtype(self, folder: Path, weights: Weights) -> None:
        from safetensors.numpy import save_file

        save_file({**weights, Q_PROJ: np.zeros((16, 16), dtype=np.int8)}, folder / "model.safetensors")
        tensors = open_tensors(folder)
        assert f"{Q_PROJ} in model.safetensors is I8; supported are BF16, F16, F32" in refusal(tensors, TINY)
        with pytest.raises(ModelError, match="is I8"):
            tensors.float32(Q_PROJ)

    def test_wrong_dtype_in_memory(self, weights: Weights) -> None:
        tensors = MemoryTensors({**weights, Q_PROJ: np.zeros((16, 16))})
        assert f"{Q_PROJ} in memory is float64" in refusal(tensors, TINY)
        with pytest.raises(ModelError, match="is float64"):
            tensors.bits16(Q_PROJ)

    def test_tensor_that_would_be_ignored(self, weights: Weights) -> None:
        name = "model.layers.0.self_attn.q_proj.bias"
        message = refusal(MemoryTensors({**weights, name: np.zeros(16, dtype=np.float32)}), TINY)
        assert f"{name} in memory has no place in the model config.json describes" in message

    def test_harmless_extras(self, weights: Weights) -> None:
        extras = {
            "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, dtype=np.float32),
            "v_head.weight": np.zeros(4, dtype=np.float32),
            "lm_head.weight": weights["model.embed_tokens.weight"],
        }
        check(MemoryTensors({**weights, **extras}), TINY)
        assert "lm_head.weight" not in expected_tensors(TINY)

    def test_tied_model_with_another_head(self, weights: Weights) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
        message = refusal(MemoryTensors(weights), TINY)
        assert "config.json ties lm_head.weight to model.embed_tokens.weight, but the one in memory differs" in message
        check(MemoryTensors(weights), replace(TINY, tied_embeddings=False))
