"""Counts the tokens in a stream of server-sent events, with as little work per token as it can.

A load generator that is slower than the server measures itself. So bytes are cut into lines by hand, and of a chunk
only the few fields that count are decoded. With `token_ids` in the chunk the count is exact; without, an event with
text is one token, and the usage at the end says how many there really were.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from rose.bounds import ITEMS_MAX, TOKENS_MAX, Count, Integer, Label
from rose.load.records import Failed

LINE_BYTES_MAX = 64 << 20  # far above any chunk: an endless line is not a stream of events
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError)  # msgspec lets the second one through
_DATA = b"data:"
_DONE = b"[DONE]"


class _Choice(msgspec.Struct):
    text: Annotated[str, Meta(max_length=LINE_BYTES_MAX)] | None = None
    token_ids: Annotated[list[Integer], Meta(max_length=TOKENS_MAX)] | None = None
    finish_reason: Label | None = None


class _Usage(msgspec.Struct):
    completion_tokens: Count = 0


class _Error(msgspec.Struct):
    """Any object; its message is read by `message_of`."""


class _Chunk(msgspec.Struct):
    choices: Annotated[list[_Choice], Meta(max_length=ITEMS_MAX)] = []
    usage: _Usage | None = None
    error: _Error | Annotated[str, Meta(max_length=LINE_BYTES_MAX)] | None = None


_decoder = msgspec.json.Decoder(_Chunk)


class EventReader:
    """The answer to one request."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.tokens_counted = 0
        self._is_stream = False
        self._rest = b""

    def feed(self, data: bytes) -> int:
        """How many tokens these bytes bring. Raises Failed for an error event and for what is no event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise Failed("the server streams something without line ends")
        return sum(self._tokens(line[len(_DATA) :].strip()) for line in lines if line.startswith(_DATA))

    def finish(self) -> None:
        """The stream has ended; raises Failed unless it ended as it should."""
        if self.finish_reason is None:
            raise Failed("the answer broke off" if self._is_stream else "the answer is not a stream of events")
        if self.finish_reason not in ("stop", "length"):
            raise Failed(f"the answer ended with `{self.finish_reason}`")

    def _tokens(self, payload: bytes) -> int:
        self._is_stream = True
        if payload == _DONE:
            return 0
        chunk = _decoded(payload)
        if chunk.error is not None:
            raise Failed(f"the server broke off the answer: {message_of(bytes(payload))}")
        if chunk.usage is not None:
            self.tokens_counted = chunk.usage.completion_tokens
        return sum(map(self._tokens_of, chunk.choices))

    def _tokens_of(self, choice: _Choice) -> int:
        self.finish_reason = choice.finish_reason or self.finish_reason
        return len(choice.token_ids) if choice.token_ids is not None else bool(choice.text)


def _decoded(payload: bytes) -> _Chunk:
    try:
        return _decoder.decode(payload)
    except NOT_JSON as error:
        raise Failed(f"the server sent an event that is not a completion's: {error}") from error


def message_of(body: bytes) -> str:
    """The words in an error of OpenAI's shape, else the start of the text."""
    try:
        tree = msgspec.json.decode(body)
        found = tree.get("error", tree)
        said = found.get("message") if isinstance(found, dict) else found
    except (*NOT_JSON, AttributeError):
        said = None
    return str(said or body[:200].decode(errors="replace").strip() or "(no words)")
