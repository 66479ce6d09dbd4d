"""Text: round trips, streams that never take anything back, chat templates that render as in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from rose.errors import ModelError, RequestRefused
from rose.models.presets import write_preset
from rose.models.stream import ByteStream, WindowStream, token_bytes
from rose.models.tokenizer import Tokenizer
from rose.models.vocabulary import CHATML, LAKE_CHARACTERS, byte_vocabulary, lake_vocabulary

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wohin? 湖 <b>"},
    {"role": "assistant", "content": "<answer>Left</answer>"},
    {"role": "user", "content": "Again."},
]


def wrap(inner: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer("tokenizer.json", inner, {}, None)


def sentencepiece_like(decoder: Any) -> tokenizers.Tokenizer:
    """Pieces that begin with a lower one eighth block for a space, and bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "é", "▁a", "▁the", "la", "ke", "lake", "�"]
    merges = [("▁", "a"), ("l", "a")]
    vocabulary = {piece: rank for rank, piece in enumerate([*pieces, "l"])}
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoder
    inner.add_special_tokens(["<s>", "</s>"])
    inner.add_tokens([AddedToken("<think>", special=False)])
    return inner


def llama_decoder() -> Any:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(parts)


def byte_level_merged() -> tokenizers.Tokenizer:
    """Byte-level with merges that cut characters in two, and an added token outside the byte alphabet."""
    alphabet = {character: rank for rank, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ã", "©"), ("Ġ", "a"), ("ð", "Ł"), ("ĺ", "Ģ")]
    vocabulary = alphabet | {left + right: len(alphabet) + rank for rank, (left, right) in enumerate(merges)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    inner.add_tokens([AddedToken("<a b 湖>", special=False, normalized=False)])
    return inner


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bytes": lambda: byte_vocabulary().tokenizer,
    "lake": lambda: lake_vocabulary().tokenizer,
    "byte-level": byte_level_merged,
    "llama": lambda: sentencepiece_like(llama_decoder()),
    "metaspace": lambda: sentencepiece_like(decoders.Metaspace()),
}


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return wrap(KINDS[kind]())


# --- round trips -------------------------------------------------------------------------------------------


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


# --- streams -----------------------------------------------------------------------------------------------


@st.composite
def split_ids(draw: st.DrawFn, kind: str) -> list[list[int]]:
    """Token ids of some text or none at all, in batches of any size."""
    tokenizer = tokenizer_of(kind)
    of_text = st.text(max_size=20).map(tokenizer.encode)
    anything = st.lists(st.integers(0, tokenizer.size + 1), max_size=20)
    ids = [token_id for part in draw(st.lists(of_text | anything, max_size=5)) for token_id in part]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)])]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_of_any_split_are_the_whole(kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    batches = data.draw(split_ids(kind))
    stream = tokenizer.stream(skip_special_tokens=skip)
    pieces = [stream.push(batch) for batch in batches]
    whole = tokenizer.decode([token_id for batch in batches for token_id in batch], skip_special_tokens=skip)
    assert "".join([*pieces, stream.finish()]) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_as_soon_as_it_is_certain(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    stream = tokenizer.stream()
    ids = tokenizer.encode("a b a b")
    assert "".join(stream.push([token_id]) for token_id in ids) == "a b a b"


def test_a_character_waits_for_its_bytes() -> None:
    stream = tokenizer_of("bytes").stream()
    assert [stream.push([byte]) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert stream.push([0xE6]) == ""
    assert stream.finish() == "�"


def test_bytes_that_are_no_character_do_not_wait() -> None:
    stream = tokenizer_of("bytes").stream()
    assert [stream.push([0x80]) for _ in range(3)] == ["�", "�", "�"]


@pytest.mark.parametrize("kind", ["lake", "llama", "metaspace"])
def test_a_window_stays_small(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    inner = KINDS[kind]()
    decoded_tokens = []

    def decode(ids: Any) -> str:
        decoded_tokens.append(len(ids))
        return inner.decode(ids, skip_special_tokens=False)

    stream = WindowStream(decode, tokenizer.token)
    ids = tokenizer.encode("the lake é 湖 a ") * 200
    for token_id in ids:
        stream.push([token_id])
    assert sum(decoded_tokens) < 10 * len(ids)


def test_which_stream_is_used() -> None:
    assert isinstance(tokenizer_of("bytes").stream(), ByteStream)
    assert isinstance(tokenizer_of("llama").stream(), WindowStream)


def test_token_bytes() -> None:
    assert token_bytes("Ġa") == b" a"
    assert token_bytes("<a b>") == b"<a b>"
    assert tokenizer_of("bytes").token_bytes(0xE6) == b"\xe6"
    assert tokenizer_of("lake").token_bytes(tokenizer_of("lake").encode("Left")[0]) == b"Left"
    assert tokenizer_of("bytes").token_bytes(10_000) == b""


# --- folders -----------------------------------------------------------------------------------------------


def write_tokenizer(folder: Path, config: dict[str, Any] | None = None, kind: str = "bytes") -> Path:
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_load(tmp_path: Path) -> None:
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
def test_bad_config(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_tokenizer(tmp_path, config)
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: .*{message}"):
        Tokenizer.load(tmp_path)


def test_tokenizer_larger_than_the_model() -> None:
    tokenizer = tokenizer_of("bytes")
    tokenizer.check_vocabulary(264, "config.json")
    tokenizer.check_vocabulary(512, "config.json")
    with pytest.raises(ModelError, match=r"tokenizer\.json makes token ids up to 263, but config\.json has vocab_size"):
        tokenizer.check_vocabulary(263, "config.json")


# --- chat templates ----------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "move", "parameters": {"b": "<é>", "a": [1, None, True]}}}]
TEMPLATES = {
    "chatml": CHATML,
    "whitespace": "{% for m in messages %}\n    {% if true %}\n  {{ m.role }}: {{ m.content | trim }}\n"
    "    {% endif %}\n{% endfor %}\n",
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{{ t | tojson(indent=2) }}{% endfor %}{% endif %}"
    "{{ bos_token }}{{ eos_token }}{{ messages | length }}",
    "namespace and break": "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% break %}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ messages[0]['content'].split(' ')[-1] }}",
    "generation": "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}\n{% endfor %}",
    "variables": "{{ enable_thinking }} {{ undefined_one }} {{ add_generation_prompt }} {{ documents is none }}",
}


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(tmp_path: Path, name: str, tools: Any, prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    special = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    write_tokenizer(tmp_path, {"chat_template": TEMPLATES[name], **special})
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(
        CHAT, tools=tools, add_generation_prompt=prompt, tokenize=False, enable_thinking=False
    )
    ours = Tokenizer.load(tmp_path).render_chat(CHAT, prompt, tools, {"enable_thinking": False})
    assert ours == theirs


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, {"chat_template": named}))
    assert tokenizer.render_chat(CHAT) == "plain"
    assert tokenizer.render_chat(CHAT, tools=TOOLS) == "with tools"


def test_a_template_file_wins(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("new")
    assert Tokenizer.load(tmp_path).render_chat(CHAT) == "new"
    (tmp_path / "chat_template.jinja").write_text("{{")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: chat template 'default' does not parse"):
        Tokenizer.load(tmp_path)


def test_content_in_parts() -> None:
    tokenizer = wrap(byte_vocabulary().tokenizer)
    from rose.models.chat import ChatTemplate

    tokenizer.chat = ChatTemplate({"default": CHATML}, "", {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\nab<|im_end|>" in tokenizer.render_chat([{"role": "user", "content": parts}])
    assert "user\n<|im_end|>" in tokenizer.render_chat([{"role": "user", "content": None}])


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ messages.append(1) }}", "not safely callable|access to attribute 'append'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10000000) %}x{% endfor %}", "[Rr]ange too big"),
        ("{{ messages[0] + 1 }}", "unsupported operand"),
    ],
)
def test_a_failing_template_refuses_the_request(tmp_path: Path, template: str, reason: str) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, {"chat_template": template}))
    with pytest.raises(RequestRefused, match=f"the chat template refuses these messages: .*({reason})"):
        tokenizer.render_chat(CHAT)


def test_the_reason_is_bounded(tmp_path: Path) -> None:
    template = "{{ raise_exception(messages[0].content) }}"
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, {"chat_template": template}))
    with pytest.raises(RequestRefused) as refused:
        tokenizer.render_chat([{"role": "user", "content": "long " * 10_000}])
    assert len(str(refused.value)) < 400


def test_a_template_can_tell_the_date(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, {"chat_template": "{{ strftime_now('%Y') }}"}))
    assert tokenizer.render_chat(CHAT).isdigit()


@pytest.mark.parametrize("special", [False, True])
def test_many_texts_are_encoded_and_decoded_like_each_of_them(tmp_path: Path, special: bool) -> None:
    tokenizer = Tokenizer.load(write_preset("qwen3-3m", tmp_path / "m", seed=0))
    texts = ["", "hello", "h\u00e9llo \U0001f600" * 50, "<|im_start|>user\n", "a" * 5000]
    encoded = tokenizer.encode_many(texts, special)
    assert encoded == [tokenizer.encode(text, special) for text in texts]
    assert tokenizer.decode_many(encoded) == [tokenizer.decode(ids, skip_special_tokens=False) for ids in encoded]
    with pytest.raises(RequestRefused):
        tokenizer.encode_many(["fine", "\ud800"], special)
