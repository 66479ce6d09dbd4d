"""Text that appears token by token, never taken back.

A token is not a piece of text: one character may need several tokens, and what a token looks like may
depend on its neighbours. A stream gives out only text that later tokens cannot change, so that the pieces of
any split, joined, equal the decoding of all tokens at once. Each token costs the same, however long the text.

There are two ways. Byte-level tokenizers (Qwen, Llama 3) spell bytes, so an incremental UTF-8 decoder is
exact and free. Others (metaspace, byte fallback, characters) are decoded through a window that starts one
piece before the new tokens: the same tokens with and without the new ones, and the difference is the news.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence

HELD_TOKENS_MAX = 4
"""No character has more bytes than this, so a broken end this many tokens old will stay broken."""

BROKEN = "\N{REPLACEMENT CHARACTER}"
FALLBACK_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")


def _byte_alphabet() -> dict[str, int]:
    """The 256 printable characters that byte-level tokenizers write bytes with."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


def token_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; one with a character outside the alphabet stands for itself."""
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


class ByteStream:
    """Text of byte-level tokens; `bytes_of` gives a token's bytes, none for a token that is not shown."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text these tokens made certain; may be empty."""
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """Text of any other tokens; `token_of` gives a token as written, None for one that is not shown."""

    def __init__(self, decode: Callable[[Sequence[int]], str], token_of: Callable[[int], str | None]) -> None:
        self._decode = decode
        self._token_of = token_of
        self._window: list[int] = []
        self._told = 0  # tokens of the window whose text was given out

    def push(self, token_ids: Iterable[int]) -> str:
        """The text these tokens made certain; may be empty."""
        shown = [token_id for token_id in token_ids if self._token_of(token_id) is not None]
        if not shown:
            return ""
        self._window += shown
        # A run of fallback bytes is read as a whole: valid so far says nothing before it has ended.
        if FALLBACK_BYTE.match(self._token_of(shown[-1]) or ""):
            return ""
        return self._tell(final=False)

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        return self._tell(final=True)

    def _tell(self, final: bool) -> str:
        text = self._decode(self._window)
        waiting = len(self._window) - self._told
        if text.endswith(BROKEN) and waiting < HELD_TOKENS_MAX and not final:
            return ""
        news = text[len(self._decode(self._window[: self._told])) :]
        self._window = self._window[self._told :]
        self._told = len(self._window)
        return news


TextStream = ByteStream | WindowStream
