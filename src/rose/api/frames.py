"""Frames of a byte stream: four bytes of length, little-endian, and a body of that length.

The sockets between the processes of a device and the files of the turn log are read this way. A length above the limit
is refused before memory for it is taken.
"""

from __future__ import annotations

from collections.abc import Iterator

from rose.errors import Unavailable

LENGTH_BYTES = 4
FRAME_BYTES_MAX = 64 << 20  # a prompt of a million tokens is 5 MB; anything near this is a broken peer


class FrameReader:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def push(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are complete with this data. A length no peer of ours would send raises Unavailable."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= LENGTH_BYTES:
            length = int.from_bytes(buffer[start : start + LENGTH_BYTES], "little")
            if length > FRAME_BYTES_MAX:
                raise Unavailable(f"the other process of this device sent a frame of {length} bytes")
            end = start + LENGTH_BYTES + length
            if len(buffer) < end:
                break
            yield bytes(buffer[start + LENGTH_BYTES : end])
            start = end
        del buffer[:start]
