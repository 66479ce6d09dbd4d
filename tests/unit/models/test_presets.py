"""Presets: folders that transformers loads, the same bytes for the same seed, whole or not there at all."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.models.made_tokenizers import tokenizer_of

from rose.errors import ConfigError
from rose.models import presets
from rose.models.model_folder import load_model_folder
from rose.models.presets import (
    LAKE_CHARACTERS,
    PRESETS,
    byte_vocabulary,
    lake_vocabulary,
    preset_spec,
    write_preset,
)
from rose.models.tensors import expected_tensors, open_tensors, tensors_are_bf16_valued

PARAMETERS_MILLIONS = {"frozenlake-1m": 1.1, "qwen3-3m": 3.2, "qwen2-3m": 3.2, "llama-3m": 3.2, "qwen3-25m": 25.3}
FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
CHAT = [{"role": "user", "content": "Left or Right? <answer>é</answer>"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("presets")
    return {name: write_preset(name, root / name) for name in PRESETS}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_whole_folder(folders: dict[str, Path], name: str) -> None:
    folder = load_model_folder(folders[name])
    assert set(os.listdir(folders[name])) == FILES
    assert folder.spec == preset_spec(PRESETS[name])
    assert folder.tokenizer.size == folder.spec.vocabulary
    assert folder.spec.max_context_tokens >= 4096
    assert tensors_are_bf16_valued(folder.tensors, folder.spec)
    count = sum(int(np.prod(shape)) for shape in expected_tensors(folder.spec).values())
    assert round(count / 1e6, 1) == PARAMETERS_MILLIONS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_loads_it(folders: dict[str, Path], name: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    folder, spec = folders[name], preset_spec(PRESETS[name])
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == spec.architecture
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (
        spec.layers,
        spec.hidden,
        spec.ffn,
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        spec.heads,
        spec.kv_heads,
        spec.head_size,
    )
    assert (config.vocab_size, config.max_position_embeddings) == (spec.vocabulary, spec.max_context_tokens)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": spec.rope.theta}
    assert config.tie_word_embeddings
    assert tuple(model.generation_config.eos_token_id) == spec.eos_token_ids
    tensors = open_tensors(folder)
    for tensor_name, parameter in model.named_parameters():
        np.testing.assert_array_equal(tensors.float32(tensor_name), parameter.detach().numpy())


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_tokenizes_alike(folders: dict[str, Path], name: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folders[name], local_files_only=True)
    ours = load_model_folder(folders[name]).tokenizer
    assert (theirs.eos_token_id,) == ours.eos_ids
    text = theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert ours.render_chat(CHAT) == text
    ids = theirs(text).input_ids
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.scale == "lively"])
def test_served_presets_give_varied_tokens(folders: dict[str, Path], name: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    ids = torch.tensor([list(b"Once upon a time there was a lake.")])
    with torch.no_grad():
        logits = model(ids).logits[0]
        new = model.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False)[0, ids.shape[1] :]
    assert 0.5 < float(logits.std(-1).mean()) < 2
    assert len(set(new.tolist())) >= 10
    assert float((logits.argmax(-1) == ids[0]).float().mean()) < 0.3


def test_same_seed_same_bytes(folders: dict[str, Path], tmp_path: Path) -> None:
    again = write_preset("qwen3-3m", tmp_path / "again")
    other = write_preset("qwen3-3m", tmp_path / "other", seed=1)
    for file in FILES:
        assert (again / file).read_bytes() == (folders["qwen3-3m"] / file).read_bytes()
    assert (other / "model.safetensors").read_bytes() != (again / "model.safetensors").read_bytes()


def test_the_bytes_are_those_of_every_machine(folders: dict[str, Path]) -> None:
    digests = {name: hashlib.sha256((folders[name] / "model.safetensors").read_bytes()).hexdigest() for name in PRESETS}
    assert {name: digest[:16] for name, digest in digests.items()} == {
        "frozenlake-1m": "52be68d6dd55ae7e",
        "qwen3-3m": "5366406f8c672830",
        "qwen2-3m": "69971ec298223984",
        "llama-3m": "ce0b415d146fbc58",
        "qwen3-25m": "222e07c7190dd9d4",
    }


def test_random_weights_have_the_scale_asked_for() -> None:
    from rose.models.presets import random_weights

    spec = preset_spec(PRESETS["frozenlake-1m"])
    weights = random_weights(spec, "plain", "salt")
    up, down = weights["model.layers.0.mlp.up_proj.weight"], weights["model.layers.0.mlp.down_proj.weight"]
    assert up.std() == pytest.approx(0.02, rel=0.02)
    assert down.std() == pytest.approx(0.02 / 8**0.5, rel=0.02)
    assert abs(up.mean()) < 2e-4
    assert np.all(weights["model.norm.weight"] == 1)
    assert not np.array_equal(up, weights["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.parametrize(
    "name, nearest", [("qwen-3m", "qwen3-3m"), ("frozen", "frozenlake-1m"), ("llama3m", "llama-3m")]
)
def test_unknown_preset_names_the_nearest(tmp_path: Path, name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {nearest}"):
        write_preset(name, tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_unknown_preset_without_a_neighbour(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are frozenlake-1m, qwen3-3m"):
        write_preset("%%%", tmp_path / "model")


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_bad_seed(tmp_path: Path, seed: int) -> None:
    with pytest.raises(ConfigError, match="the seed must be between 0 and"):
        write_preset("qwen3-3m", tmp_path / "model", seed=seed)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        write_preset("frozenlake-1m", tmp_path)
    with pytest.raises(ConfigError, match="is not a plain model folder, so --force does not replace it"):
        write_preset("frozenlake-1m", tmp_path, force=True)
    with pytest.raises(ConfigError, match="is a file"):
        write_preset("frozenlake-1m", tmp_path / "notes.txt", force=True)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_preset("frozenlake-1m", tmp_path / "notes.txt" / "below")
    with pytest.raises(ConfigError, match="is not a plain model folder"):
        write_preset("frozenlake-1m", "/", force=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_force_replaces_a_model(tmp_path: Path) -> None:
    out = write_preset("frozenlake-1m", tmp_path / "model")
    (out / "extra.json").write_text("{}")
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="--force"):
        write_preset("frozenlake-1m", out)
    assert (out / "model.safetensors").read_bytes() == before
    write_preset("frozenlake-1m", out, seed=1, force=True)
    assert (out / "model.safetensors").read_bytes() != before
    assert set(os.listdir(out)) == FILES
    assert os.listdir(tmp_path) == ["model"]


def test_parents_are_made_and_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_preset("frozenlake-1m", tmp_path / "empty")
    write_preset("frozenlake-1m", tmp_path / "a" / "b")
    assert set(os.listdir(tmp_path / "empty")) == set(os.listdir(tmp_path / "a" / "b")) == FILES


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(presets, "write_tensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_preset("frozenlake-1m", tmp_path / "model")
    assert os.listdir(tmp_path) == []


@given(st.text())
@example("<|im_start|>user\n<think>\x00\r\n\t  \U0001f600é湖</tool_call>")
def test_any_text_survives_the_byte_vocabulary(text: str) -> None:
    tokenizer = tokenizer_of("bytes")
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(st.text(st.characters(codec="utf-8", exclude_characters="<")))
def test_a_byte_is_its_own_token(text: str) -> None:
    assert tokenizer_of("bytes").encode(text) == list(text.encode())


@given(st.text(LAKE_CHARACTERS))
@example("<|im_start|>assistant\n<answer>Right</answer><|im_end|>")
def test_ascii_survives_the_lake_vocabulary(text: str) -> None:
    tokenizer = tokenizer_of("lake")
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(st.text())
def test_the_lake_vocabulary_takes_any_text(text: str) -> None:
    tokenizer = tokenizer_of("lake")
    known = "".join(character if character in LAKE_CHARACTERS else "?" for character in text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == known


def test_lake_words_are_single_tokens() -> None:
    tokenizer = tokenizer_of("lake")
    tokens = [tokenizer.token(token_id) for token_id in tokenizer.encode("<answer>Left</answer> Upper é")]
    assert tokens == ["<answer>", "Left", "</answer>", " ", "Up", "p", "e", "r", " ", "?"]


def test_sizes_of_the_vocabularies() -> None:
    assert (byte_vocabulary().size, lake_vocabulary().size) == (264, 110)
