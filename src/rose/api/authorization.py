"""The header Authorization: a bearer token, or the password of HTTP Basic.

Some clients can only be given an address: `http://:TOKEN@HOST:PORT` becomes Basic. The user's name in it is ignored.
"""

from __future__ import annotations

import base64
import binascii
from contextlib import suppress


def key_of_header(header: str) -> bytes:
    """Return the key that a header bears, as bytes, since a header may hold any. Empty if none can be read."""
    kind, _, value = header.partition(" ")
    key = value.strip().encode(errors="surrogateescape")
    match kind.lower():
        case "bearer":
            return key
        case "basic":
            with suppress(binascii.Error):
                return base64.b64decode(key, validate=True).partition(b":")[2]
    return b""
