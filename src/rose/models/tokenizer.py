"""Text to tokens and back, for one model folder.

The work is done by the `tokenizers` package on tokenizer.json. Around it: the checks that make a folder safe
to serve, text that streams (`stream.py`) and chat templates (`chat.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel

from rose.errors import ModelError, RequestRefused
from rose.models.chat import ChatTemplate, read_chat_template
from rose.models.files import Keys, read_object, read_text
from rose.models.stream import ByteStream, TextStream, WindowStream, token_bytes

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """One per process and model; encoding and decoding may be called from any thread."""

    def __init__(
        self, file: str, inner: tokenizers.Tokenizer, special_tokens: Mapping[str, str], chat: ChatTemplate | None
    ) -> None:
        inner.no_truncation()
        inner.no_padding()
        self.file = file
        self.special_tokens = special_tokens
        self.chat = chat
        self._inner = inner
        added = inner.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.size = 1 + max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
        self._is_byte_level = isinstance(inner.decoder, ByteLevel)
        self._bytes_of_token: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """From a folder's tokenizer.json, with tokenizer_config.json and chat_template.jinja if they are there."""
        folder = Path(folder)
        path = folder / TOKENIZER_FILE
        if not path.exists():
            hint = "save the tokenizer in its fast form: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            raise ModelError(f"{path} is missing", hint=hint)
        text = read_text(path)
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        # The package raises bare Exception for everything a tokenizer.json can have wrong.
        except Exception as error:
            raise ModelError(f"{path} is not a usable tokenizer: {error}") from error
        config_path = folder / CONFIG_FILE
        config = Keys(str(config_path), read_object(config_path) if config_path.exists() else {})
        special_tokens = _read_special_tokens(config)
        return cls(str(path), inner, special_tokens, read_chat_template(folder, config, special_tokens))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """What tokenizer_config.json calls the end; a model's own config files may name more."""
        found = self._inner.token_to_id(self.special_tokens.get("eos_token", ""))
        return () if found is None else (found,)

    def check_vocabulary(self, vocabulary: int, config_file: str) -> None:
        """Refuse a tokenizer that makes tokens the model has no embedding for; fewer is only padding."""
        if self.size > vocabulary:
            raise ModelError(
                f"{self.file} makes token ids up to {self.size - 1}, but {config_file} has vocab_size {vocabulary}",
                hint="check that the tokenizer belongs to this model",
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. A rendered chat has its special tokens already: give False for one."""
        _check_text(text)
        return self._inner.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_many(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts. Releases Python's lock, which `encode` holds: call it in a thread."""
        for text in texts:
            _check_text(text)
        found = self._inner.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens; ids beyond the vocabulary (padding of the model) have none."""
        return self._inner.decode(self._shown(token_ids, skip_special_tokens), skip_special_tokens=False)

    def decode_many(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Texts of several sequences, special tokens too. Releases Python's lock: call it in a thread."""
        return self._inner.decode_batch([self._shown(ids, False) for ids in sequences], skip_special_tokens=False)

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it."""
        return self._inner.id_to_token(token_id) if 0 <= token_id < self.size else None

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A new stream of text, for tokens that come one by one."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        if self._is_byte_level:
            return ByteStream(lambda token_id: b"" if token_id in hidden else self.token_bytes(token_id))
        return WindowStream(
            lambda token_ids: self._inner.decode(token_ids, skip_special_tokens=False),
            lambda token_id: None if token_id in hidden else self.token(token_id),
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for by itself; of a byte-level token they may be part of a character."""
        found = self._bytes_of_token.get(token_id)
        if found is None:
            found = self._bytes_of_token[token_id] = self._compute_bytes(token_id)
        return found

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation, by the model's template. Raises RequestRefused."""
        if self.chat is None:
            hint = "send a plain prompt to /v1/completions, or add a chat_template.jinja to the model folder"
            raise RequestRefused("this model has no chat template", hint=hint)
        return self.chat.render(messages, add_generation_prompt, tools, variables)

    def _shown(self, token_ids: Iterable[int], skip_special_tokens: bool) -> list[int]:
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return [token_id for token_id in token_ids if token_id not in hidden and 0 <= token_id < self.size]

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if token is None:
            return b""
        return token_bytes(token) if self._is_byte_level else self._inner.decode([token_id], False).encode()


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestRefused(f"the text has half a surrogate pair at character {error.start}") from error


def _read_special_tokens(config: Keys) -> dict[str, str]:
    """bos_token, eos_token and so on, which config files give as a string or as an object with its content."""
    found = {}
    for name in SPECIAL_NAMES:
        if name in config:
            value = config.values[name]
            value = value.get("content") if isinstance(value, dict) else value
            if not isinstance(value, str):
                raise config.complaint(name, "must be a string or an object with a content")
            found[name] = value
    return found
