"""Text: round trips, streams that never take anything back, chat templates that render as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.models.made_tokenizers import CHAT, KINDS, tokenizer_of, wrap, write_tokenizer

from rose.errors import ModelError, RequestRefused
from rose.models.presets import CHATML, byte_vocabulary, write_preset
from rose.models.tokenizer import Tokenizer


def test_special_tokens_are_hidden_or_shown() -> None:
    tokenizer = tokenizer_of("bytes")
    ids = tokenizer.encode("<|im_start|>hi<think>")
    assert tokenizer.decode(ids) == "hi<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<think>"


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_padding_have_no_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    beyond = [tokenizer.size, tokenizer.size + 1000, -1, 2**40]
    assert tokenizer.decode(beyond) == ""
    assert tokenizer.token(-1) is None
    assert tokenizer.token(2**40) is None
    stream = tokenizer.stream()
    assert stream.push(beyond) + stream.finish() == ""


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestRefused, match="half a surrogate pair at character 2"):
        tokenizer_of("bytes").encode("ab\ud800")


def test_truncation_of_a_tokenizer_file_is_off() -> None:
    inner = byte_vocabulary().tokenizer
    inner.enable_truncation(3)
    inner.enable_padding(length=10)
    assert len(wrap(inner).encode("longer")) == 6


def test_a_folder_is_loaded_with_its_special_tokens_and_template(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": None, "chat_template": CHATML}
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, config))
    assert tokenizer.eos_ids == (258,)
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>"}
    assert tokenizer.size == 264
    assert tokenizer.render_chat(CHAT[:1]) == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n"


def test_load_without_a_config(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    assert (tokenizer.eos_ids, tokenizer.chat) == ((), None)
    with pytest.raises(RequestRefused, match="no chat template"):
        tokenizer.render_chat(CHAT)


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"type": "BPE"}}'])
def test_unusable_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a usable tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"eos_token": 3}, "eos_token must be a string or an object with a content"),
        ({"chat_template": 3}, "chat_template must be a string or a list"),
        ({"chat_template": [{"name": "x"}]}, "chat_template must be a string or a list"),
        ({"chat_template": [{"name": "x", "template": "y"}]}, "must have a template named 'default'"),
        ({"chat_template": "{% if %}"}, "chat template 'default' does not parse: .* at line 1"),
    ],
)
def test_a_bad_tokenizer_config_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_tokenizer(tmp_path, config)
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: .*{message}"):
        Tokenizer.load(tmp_path)


def test_tokenizer_larger_than_the_model() -> None:
    tokenizer = tokenizer_of("bytes")
    tokenizer.check_vocabulary(264, "config.json")
    tokenizer.check_vocabulary(512, "config.json")
    with pytest.raises(ModelError, match=r"tokenizer\.json makes token ids up to 263, but config\.json has vocab_size"):
        tokenizer.check_vocabulary(263, "config.json")


@pytest.mark.parametrize("special", [False, True])
def test_many_texts_are_encoded_and_decoded_like_each_of_them(tmp_path: Path, special: bool) -> None:
    tokenizer = Tokenizer.load(write_preset("qwen3-3m", tmp_path / "m", seed=0))
    texts = ["", "hello", "h\u00e9llo \U0001f600" * 50, "<|im_start|>user\n", "a" * 5000]
    encoded = tokenizer.encode_many(texts, special)
    assert encoded == [tokenizer.encode(text, special) for text in texts]
    assert tokenizer.decode_many(encoded) == [tokenizer.decode(ids, skip_special_tokens=False) for ids in encoded]
    with pytest.raises(RequestRefused):
        tokenizer.encode_many(["fine", "\ud800"], special)
