"""Text that appears token by token and is never taken back.

One character may need several tokens, and a token's text may depend on its neighbours. A stream gives out only text
that later tokens cannot change, so joined pieces equal the decoding of all tokens. Each token costs the same, however
long the text. Byte-level tokenizers (Qwen, Llama 3) spell bytes, so an incremental UTF-8 decoder is exact. Others are
decoded through a window that starts one piece before the new tokens: the difference they make is the new text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence

HELD_TOKENS_MAX = 4  # no character has more bytes, so a broken end this many tokens old will stay broken
BROKEN = "\N{REPLACEMENT CHARACTER}"
FALLBACK_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")


# The 256 printable characters by which byte-level tokenizers write bytes.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF_CHARACTER = {chr(b): b for b in _PRINTABLE} | {chr(256 + rank): b for rank, b in enumerate(_OTHERS)}


def token_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; a token with a character outside the alphabet is encoded as UTF-8."""
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


class ByteStream:
    """The text of byte-level tokens; `bytes_of` returns a token's bytes, none for a hidden token."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens made certain; may be empty."""
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def finish(self) -> str:
        """Return the rest, when no more tokens come."""
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """The text of other tokens; `token_of` returns a token as written, None for a hidden one."""

    def __init__(self, decode: Callable[[Sequence[int]], str], token_of: Callable[[int], str | None]) -> None:
        self._decode = decode
        self._token_of = token_of
        self._window: list[int] = []
        self._shown = 0  # tokens of the window whose text was given out

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens made certain; may be empty."""
        shown = [token_id for token_id in token_ids if self._token_of(token_id) is not None]
        if not shown:
            return ""
        self._window += shown
        # A run of fallback bytes is decoded as a whole: nothing is certain before it has ended.
        if FALLBACK_BYTE.match(self._token_of(shown[-1]) or ""):
            return ""
        return self._new_text(final=False)

    def finish(self) -> str:
        """Return the rest, when no more tokens come."""
        return self._new_text(final=True)

    def _new_text(self, final: bool) -> str:
        text = self._decode(self._window)
        waiting = len(self._window) - self._shown
        if text.endswith(BROKEN) and waiting < HELD_TOKENS_MAX and not final:
            return ""
        new_text = text[len(self._decode(self._window[: self._shown])) :]
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return new_text


TextStream = ByteStream | WindowStream
