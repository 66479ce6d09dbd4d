"""Text to tokens and back, for one model folder.

The `tokenizers` package does the work. This module adds the checks that make a folder safe to serve, streamed text
(`stream.py`) and chat templates (`chat_template.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel

from rose.errors import ModelError, RequestRefused
from rose.models.chat_template import ChatTemplate, read_chat_template
from rose.models.files import Keys, read_object, read_text
from rose.models.stream import ByteStream, TextStream, WindowStream, token_bytes

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer, one per process; any thread may encode and decode."""

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
        """Read a folder's tokenizer.json, with tokenizer_config.json and chat_template.jinja if they exist."""
        folder = Path(folder)
        path = folder / TOKENIZER_FILE
        if not path.exists():
            hint = "save the tokenizer in its fast form: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            raise ModelError(f"{path} is missing", hint=hint)
        text = read_text(path)
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises it for everything a tokenizer.json can have wrong
            raise ModelError(f"{path} is not a usable tokenizer: {error}") from error
        config_path = folder / CONFIG_FILE
        config = Keys(str(config_path), read_object(config_path) if config_path.exists() else {})
        special_tokens = {}
        for name in filter(config.__contains__, SPECIAL_NAMES):
            value = config.values[name]
            value = value.get("content") if isinstance(value, dict) else value
            if not isinstance(value, str):
                raise config.complaint(name, "must be a string or an object with a content")
            special_tokens[name] = value
        return cls(str(path), inner, special_tokens, read_chat_template(folder, config, special_tokens))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Return the end tokens of tokenizer_config.json; a model's own config files may name more."""
        end_id = self._inner.token_to_id(self.special_tokens.get("eos_token", ""))
        return () if end_id is None else (end_id,)

    def check_vocabulary(self, vocabulary: int, config_file: str) -> None:
        """Refuse a tokenizer that makes tokens the model has no embedding for; fewer is only padding."""
        if self.size > vocabulary:
            raise ModelError(
                f"{self.file} makes token ids up to {self.size - 1}, but {config_file} has vocab_size {vocabulary}",
                hint="check that the tokenizer belongs to this model",
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. A rendered chat has its special tokens already: pass False for it."""
        _check_text(text)
        return self._inner.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_many(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of several texts. Releases Python's lock, which `encode` holds: call it in a thread."""
        for text in texts:
            _check_text(text)
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens; ids beyond the vocabulary (padding of the model) have none."""
        return self._inner.decode(self._shown(token_ids, skip_special_tokens), skip_special_tokens=False)

    def decode_many(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of several sequences, special tokens too. Releases Python's lock: call it in a thread."""
        return self._inner.decode_batch([self._shown(ids, False) for ids in sequences], skip_special_tokens=False)

    def token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it."""
        return self._inner.id_to_token(token_id) if 0 <= token_id < self.size else None

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """Return a new stream of text, for tokens that come one by one."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        if self._is_byte_level:
            return ByteStream(lambda token_id: b"" if token_id in hidden else self.token_bytes(token_id))
        return WindowStream(
            lambda token_ids: self._inner.decode(token_ids, skip_special_tokens=False),
            lambda token_id: None if token_id in hidden else self.token(token_id),
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token by itself; a byte-level token may be part of a character."""
        known = self._bytes_of_token.get(token_id)
        if known is None:
            token = self.token(token_id)
            if token is None:
                known = b""
            else:
                known = token_bytes(token) if self._is_byte_level else self._inner.decode([token_id], False).encode()
            self._bytes_of_token[token_id] = known
        return known

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation, by the model's template. Raises RequestRefused."""
        if self.chat is None:
            hint = "send a plain prompt to /v1/completions, or add a chat_template.jinja to the model folder"
            raise RequestRefused("this model has no chat template", hint=hint)
        return self.chat.render(messages, add_generation_prompt, tools, variables)

    def _shown(self, token_ids: Iterable[int], skip_special_tokens: bool) -> list[int]:
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return [token_id for token_id in token_ids if token_id not in hidden and 0 <= token_id < self.size]


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestRefused(f"the text has half a surrogate pair at character {error.start}") from error
