"""Compressed bodies: decompressed in a thread, and never beyond the limit of a body.

aiohttp would decompress as a body arrives, on the event loop and without a limit of its own. The servers here switch
that off (connections.py) and do it once the compressed body is there, which the limit of a body bounds too.
"""

from __future__ import annotations

import zlib

from aiohttp import hdrs, web

from rose.front.failures import Failure, bad_request
from rose.front.offload import offload

GZIP_OR_ZLIB = 47  # window bits by which zlib finds out which of the two it is
RAW_DEFLATE = -15  # what some clients send as `deflate`
IDENTITY, ENCODINGS = "identity", ("gzip", "deflate")


async def decompressed(request: web.Request, data: bytes, bytes_max: int) -> bytes:
    """The body as it was before compression. Raises Failure: 415, 413 or 400."""
    encoding = request.headers[hdrs.CONTENT_ENCODING].strip().lower()
    if encoding == IDENTITY or not data:
        return data
    if encoding not in ENCODINGS:
        message = f"the encoding `{encoding[:40]}` is not known; send {' or '.join(ENCODINGS)}, or the body as it is"
        headers = {"Accept-Encoding": ", ".join(ENCODINGS)}
        raise Failure(415, message, code="unsupported_media_type", headers=headers)
    try:
        whole = await offload(_decompress, data, encoding, bytes_max)
    except zlib.error as error:
        raise bad_request("the body is not what its headers say", code="invalid_body") from error
    if len(whole) > bytes_max:
        raise Failure(413, f"the body is too large: more than {bytes_max} bytes", code="request_entity_too_large")
    return whole


def _decompress(data: bytes, encoding: str, bytes_max: int) -> bytes:
    """At most one byte more than allowed. Raises zlib.error."""
    is_raw = encoding == "deflate" and data[0] & 0x0F != 8  # the method that every zlib header names
    stream = zlib.decompressobj(RAW_DEFLATE if is_raw else GZIP_OR_ZLIB)
    whole = stream.decompress(data, bytes_max + 1)
    if len(whole) <= bytes_max and not stream.eof:
        raise zlib.error("the compressed body is incomplete")
    return whole
