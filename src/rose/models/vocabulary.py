"""The two small tokenizers of the presets, made in memory: bytes, and FrozenLake's characters and words.

Both spell any text: the first exactly, byte by byte; the second by characters and a few whole words, with `?`
for what it does not know. Few tokens keep the embedding of a small model small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rose.models.stream import BYTE_OF_CHARACTER

END_OF_TEXT, CHAT_START, CHAT_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD = "<|pad|>"
BYTE_SPECIALS = (END_OF_TEXT, CHAT_START, CHAT_END, PAD)
BYTE_WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
LAKE_SPECIALS = (END_OF_TEXT, CHAT_START, CHAT_END)
LAKE_WORDS = (
    *("<answer>", "</answer>", "Left", "Right", "Up", "Down"),
    *("user", "assistant", "system", "goal", "hole"),
)
LAKE_CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))

CHATML = """\
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages[0]['role'] == 'system' -%}
        {{- messages[0]['content'] + '\\n\\n' -}}
    {%- endif -%}
    {{- 'Tools you may call, one JSON object per line:\\n<tools>\\n' -}}
    {%- for tool in tools -%}
        {{- tool | tojson + '\\n' -}}
    {%- endfor -%}
    {{- '</tools>\\nTo call one, say:\\n<tool_call>\\n' -}}
    {{- '{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if not (tools and loop.first and message['role'] == 'system') -%}
        {{- '<|im_start|>' + message['role'] + '\\n' -}}
        {%- if message['content'] is string -%}
            {{- message['content'] -}}
        {%- elif message['content'] -%}
            {%- for part in message['content'] -%}
                {{- part['text'] -}}
            {%- endfor -%}
        {%- endif -%}
        {%- for call in message['tool_calls'] or [] -%}
            {%- if message['content'] or not loop.first -%}
                {{- '\\n' -}}
            {%- endif -%}
            {{- '<tool_call>\\n{"name": ' + (call['function']['name'] | tojson) -}}
            {{- ', "arguments": ' + (call['function']['arguments'] | tojson) + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer and the names of its special tokens."""

    tokenizer: Tokenizer
    pad: str

    @property
    def size(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def id_of(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        assert found is not None, token
        return found

    def config(self, max_context_tokens: int) -> dict[str, Any]:
        """The tokenizer_config.json beside it."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": CHAT_END,
            "pad_token": self.pad,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_context_tokens,
            "chat_template": CHATML,
        }


def byte_vocabulary() -> Vocabulary:
    """256 bytes, each with its own value as id, and eight more tokens: 264."""
    tokenizer = Tokenizer(models.BPE(vocab=BYTE_OF_CHARACTER, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added(tokenizer, BYTE_SPECIALS, BYTE_WORDS, PAD)


def lake_vocabulary() -> Vocabulary:
    """Newline and printable ASCII, three specials and eleven words: 110."""
    tokens = {character: rank for rank, character in enumerate(LAKE_CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    return _with_added(tokenizer, LAKE_SPECIALS, LAKE_WORDS, END_OF_TEXT)


def _with_added(tokenizer: Tokenizer, specials: tuple[str, ...], words: tuple[str, ...], pad: str) -> Vocabulary:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in words])
    return Vocabulary(tokenizer, pad)
