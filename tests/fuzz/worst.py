"""Worst-case bodies of a route, as large as the route lets them be.

They are made from the route's request struct: for every field that may hold a list, a text, a mapping or anything, one
body in which that field fills the whole limit. Rows of `SPECIAL` reach work behind the decoder that a single field does
not: many prompts, many messages, long conversations.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import msgspec.inspect as inspect

from rose.openai.request_parsing import ESCAPES_MAX

DEEP = 1000  # nested lists that a decoder with a recursion limit still takes


@dataclass(frozen=True)
class Worst:
    what: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


REQUIRED: dict[str, Any] = {
    "prompt": "x",
    "input": "x",
    "messages": [{"role": "user", "content": "x"}],
    "token_ids": [1],
    "tokens": [1],
    "version": "v",
}


def worst_bodies(kind: type[msgspec.Struct], limit_bytes: int) -> Iterator[Worst]:
    """Yield the bodies of one route; each is at most `limit_bytes` long, but for those that are compressed."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    needed = {part.encode_name: REQUIRED.get(part.encode_name, 1) for part in info.fields if part.required}
    size = limit_bytes - 1024
    yield from _anywhere(needed, size)
    for part in info.fields:
        for what, filled in _filled(part.type, size):
            yield Worst(f"{part.encode_name}: {what}", _with(needed, part.encode_name, filled))
    for what, make in SPECIAL.get(kind.__name__, {}).items():
        yield Worst(what, make(size))


def draw_worst(kind: type[msgspec.Struct], size: int, chance: random.Random) -> Worst:
    """Return one worst-case body of about this size, without making all the others."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    needed = {part.encode_name: REQUIRED.get(part.encode_name, 1) for part in info.fields if part.required}
    special = SPECIAL.get(kind.__name__, {})
    if special and chance.random() < 0.2:
        what = chance.choice(sorted(special))
        return Worst(what, special[what](size))
    part = chance.choice(list(info.fields))
    filled = list(_filled(part.type, size))
    if not filled or chance.random() < 0.2:
        return Worst("one long unknown key", _with(needed, "k" * size, b"1"))
    what, value = chance.choice(filled)
    return Worst(f"{part.encode_name}: {what}", _with(needed, part.encode_name, value))


def _anywhere(needed: dict[str, Any], size: int) -> Iterator[Worst]:
    """Yield what may come to any route."""
    zipped = (("Content-Encoding", "gzip"),)
    yield Worst("nothing but spaces", b" " * size)
    yield Worst("one long unknown key", _with(needed, "k" * size, b"1"))
    yield Worst("one long unknown key of many letters", _with(needed, ("abcdefghij0123456789_" * size)[:size], b"1"))
    keys = b",".join(b'"k%07d":1' % number for number in range(size // 13))
    yield Worst("many unknown keys", b"{" + keys + b"}")
    yield Worst("the same key many times", b"{" + b",".join([b'"model":"m"'] * (size // 12)) + b"}")
    yield Worst("nested lists", b"[" * (size // 2) + b"]" * (size // 2))
    yield Worst("a long integer", b"9" * size)
    yield Worst("a gzip bomb", gzip.compress(bytes(64 * size), 9), zipped)
    yield Worst(
        "gzip of as much as is allowed", gzip.compress(_with(needed, "user", b'"' + b"x" * size + b'"')), zipped
    )


def _filled(info: Any, size: int) -> Iterator[tuple[str, bytes]]:
    """Yield encoded values that fill this size, for each kind of value that the type takes."""
    match info:
        case inspect.Metadata():
            yield from _filled(info.type, size)
        case inspect.UnionType():
            for part in info.types:
                yield from _filled(part, size)
        case inspect.StrType():
            yield "a long text", b'"' + b"x" * size + b'"'
            yield "a long text of escapes", b'"' + b"\\n" * (size // 2) + b'"'
            yield "as many escapes as a body may have", b'"' + b"\\u00e9" * min(size // 6, ESCAPES_MAX) + b'"'
            yield "a long text of words", b'"' + (b"ab cd \xe2\x98\x83 " * (size // 9)) + b'"'
        case inspect.IntType() | inspect.FloatType():
            yield "a long number", b"9" * min(size, 1 << 20)
        case inspect.ListType() | inspect.VarTupleType():
            for what, item in _items(info.item_type):
                yield f"a list of {what}", _list(item, size)
        case inspect.DictType():
            entries = b",".join(b'"k%07d":1' % number for number in range(size // 13))
            yield "many keys", b"{" + entries + b"}"
            yield "nested mappings", b'{"a":' * DEEP + b"1" + b"}" * DEEP
            yield "a long text inside", b'{"a":"' + b"x" * size + b'"}'
            yield "a long list inside", b'{"a":' + _list(b"1", size) + b"}"
        case inspect.RawType() | inspect.AnyType():
            yield "a long list", _list(b"1", size)
            yield "nested lists", b"[" * DEEP + b"]" * DEEP
        case inspect.StructType():
            for part in info.fields:
                for what, inner in _filled(part.type, size):
                    yield f"{part.encode_name}: {what}", _with({}, part.encode_name, inner)


def _items(info: Any) -> Iterator[tuple[str, bytes]]:
    match info:
        case inspect.Metadata():
            yield from _items(info.type)
        case inspect.UnionType():
            for part in info.types:
                yield from _items(part)
        case inspect.StrType():
            yield "texts", b'"a"'
        case inspect.IntType():
            yield "numbers", b"1"
        case inspect.ListType():
            yield "lists", b"[1]"
        case inspect.StructType():
            yield "empty objects", b"{}"
            yield "objects", msgspec.json.encode({p.encode_name: "x" for p in info.fields if p.required})
        case _:
            yield "nulls", b"null"


def _list(item: bytes, size: int) -> bytes:
    return b"[" + b",".join([item] * (size // (len(item) + 1))) + b"]"


def _with(needed: dict[str, Any], name: str, value: bytes) -> bytes:
    fields = {key: msgspec.json.encode(known) for key, known in needed.items()} | {name: value}
    return b"{" + b",".join(msgspec.json.encode(key) + b":" + known for key, known in fields.items()) + b"}"


def _messages(count: int, message: dict[str, Any], **more: Any) -> bytes:
    return msgspec.json.encode({"messages": [message] * count, **more})


def _calls(count: int, arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}] * count}


ITEM_CALL = {"type": "function_call", "call_id": "c", "name": "f"}


def _input(count: int, item: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"input": [item] * count})


def _many_tools(size: int) -> bytes:
    parameters = {f"p{number}": {"type": "integer"} for number in range(size // 512 // 24)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": parameters}}}
    return msgspec.json.encode({"messages": REQUIRED["messages"], "tools": [tool] * 500})


def _in_steps(size: int, count: int, characters: int) -> bytes:
    return msgspec.json.encode({"prompt": ["x" * characters] * min(count, size // (characters + 4))})


def _mixture(size: int) -> bytes:
    return b'{"prompt":[' + b'"a",' * (size // 4 - 2) + b"1]}"


SPECIAL: dict[str, dict[str, Callable[[int], bytes]]] = {
    "CompletionBody": {
        "128 prompts below the inline limit": lambda size: _in_steps(size, 128, 16_000),
        "128 prompts above the inline limit": lambda size: _in_steps(size, 128, 30_000),
        "prompts as many as fit, one of another kind": _mixture,
        "1024 choices of a long prompt": lambda size: msgspec.json.encode({"prompt": [[1] * 900] * 128, "n": 128}),
        "as many log-probabilities of prompts as fit": lambda size: msgspec.json.encode(
            {"prompt": [[1] * 900] * 6, "max_tokens": 1, "prompt_logprobs": 20}
        ),
        "more log-probabilities of prompts than fit": lambda size: msgspec.json.encode(
            {"prompt": [[1] * 900] * 128, "max_tokens": 1, "prompt_logprobs": 20}
        ),
    },
    "ChatBody": {
        "4096 short messages": lambda size: _messages(4096, {"role": "user", "content": "x"}),
        "4096 long messages": lambda size: _messages(4000, {"role": "user", "content": "x" * (size // 4000 - 40)}),
        "many text parts": lambda size: _messages(
            1, {"role": "user", "content": [{"type": "text", "text": "x"}] * (size // 28)}
        ),
        "many tool calls": lambda size: _messages(40, _calls(500, "{}")),
        "tool calls with long arguments": lambda size: _messages(
            1, _calls(500, '{"a": [%s1]}' % ("1," * (size // 1200)))
        ),
        "many tools with many parameters": _many_tools,
        "a tool call with nested arguments": lambda size: _messages(1, _calls(1, '{"a":' * DEEP + "1" + "}" * DEEP)),
    },
    "ResponsesBody": {
        "4096 short messages": lambda size: _input(4096, {"role": "user", "content": "x"}),
        "many text parts": lambda size: _input(
            1, {"role": "user", "content": [{"type": "input_text", "text": "x"}] * (size // 36)}
        ),
        "4096 calls of one answer": lambda size: _input(4096, ITEM_CALL | {"arguments": "{}"}),
        "calls with long arguments": lambda size: _input(
            500, ITEM_CALL | {"arguments": '{"a": [%s1]}' % ("1," * (size // 1200))}
        ),
        "a call with nested arguments": lambda size: _input(
            1, ITEM_CALL | {"arguments": '{"a":' * DEEP + "1" + "}" * DEEP}
        ),
    },
    "TokenizeBody": {
        "a long text with its token texts": lambda size: msgspec.json.encode(
            {"prompt": "x" * (size - 64), "return_token_strs": True}
        ),
        "a text of the context's length with its token texts": lambda size: msgspec.json.encode(
            {"prompt": "x" * 8000, "return_token_strs": True}
        ),
    },
    "GenerateBody": {
        "the log-probabilities of a long prompt": lambda size: msgspec.json.encode(
            {"token_ids": [1] * 900, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 20}}
        ),
        "many sampling keys": lambda size: (
            b'{"token_ids":[1],"sampling_params":{' + b",".join(b'"k%07d":1' % n for n in range(size // 13)) + b"}}"
        ),
        "one long sampling key": lambda size: (
            b'{"token_ids":[1],"sampling_params":{"' + (b"max_tokens_" * size)[: size - 64] + b'":1}}'
        ),
    },
}
