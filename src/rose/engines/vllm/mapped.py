"""Memory in a file that one process writes and others read, with no lock: nobody waits for anybody, ever.

`Slots` holds the newest of a sequence of messages. The writer fills the next of a few slots, then says its number; a
reader copies the slot that was named last and looks whether it still is that one. `Ring` holds the newest few hundred
of a sequence of equal records, for readers that must miss none. Both carry a checksum: on a machine that reorders
writes, a copy that mixes two messages is thrown away like one that was overtaken, and never taken for a message.

The file is filled under another name and then renamed, so that nobody opens half of one. Plain `mmap`, because
`multiprocessing.shared_memory` removes a segment when any process that looked at it ends (Python < 3.13).
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

WORD = 8
_checksum = zlib.adler32  # not a CRC: its tables are never in a cache when a step ends, and cost more than all the rest
SLOTS = 4  # a reader is overtaken only if the writer goes round all of them during one copy
SLOT_HEAD_BYTES = 3 * WORD  # number, length, checksum
TRIES = 16


class Torn(Exception):
    """The writer was faster than the reader, again and again; ask later."""


class MappedFile:
    """A file of fixed size, mapped. `words` and `floats` are its 8-byte units, each written and read at once."""

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self.bytes = mmap.mmap(descriptor, 0, access=access)
        finally:
            os.close(descriptor)
        self.words = memoryview(self.bytes).cast("Q")
        self.floats: memoryview[float] = memoryview(self.bytes).cast("d")
        self.address = int(np.frombuffer(self.bytes, np.uint8).ctypes.data)  # for the kernel, as long as it is open

    @classmethod
    def create(cls, path: Path, size_bytes: int, fill: Callable[[MappedFile], None]) -> MappedFile:
        """A new file in place of whatever had this name; readers of that keep what they have."""
        hidden = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)  # full memory is told now, not by a signal later
        finally:
            os.close(descriptor)
        made = cls(hidden, writable=True)
        fill(made)
        os.rename(hidden, path)
        made.path = path
        return made

    def close(self) -> None:
        self.words.release()
        self.floats.release()
        self.bytes.close()


class MappedPage:
    """The page of such a file that its readers write to. They have no other that they could spoil."""

    def __init__(self, path: Path, offset: int) -> None:
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._bytes = mmap.mmap(descriptor, mmap.PAGESIZE, offset=offset)
        finally:
            os.close(descriptor)
        self.floats: memoryview[float] = memoryview(self._bytes).cast("d")

    def close(self) -> None:
        self.floats.release()
        self._bytes.close()


class Slots:
    """The newest message of at most `message_bytes_max` bytes."""

    def __init__(self, file: MappedFile, offset: int, message_bytes_max: int) -> None:
        self._file = file
        self._newest = offset // WORD
        self._first = offset + WORD
        self._stride = _whole_words(SLOT_HEAD_BYTES + message_bytes_max)
        self.message_bytes_max = message_bytes_max

    @staticmethod
    def size_bytes(message_bytes_max: int) -> int:
        return WORD + SLOTS * _whole_words(SLOT_HEAD_BYTES + message_bytes_max)

    @property
    def number(self) -> int:
        """Of the newest message; 0 before the first."""
        return self._file.words[self._newest]

    def write(self, message: bytes | bytearray | memoryview) -> int:
        """By the only writer. Returns the message's number."""
        words, number = self._file.words, self._file.words[self._newest] + 1
        start = self._first + (number % SLOTS) * self._stride
        head, body = start // WORD, start + SLOT_HEAD_BYTES
        words[head] = 0
        self._file.bytes[body : body + len(message)] = message
        words[head + 1] = len(message)
        words[head + 2] = _checksum(message, number & 0xFFFFFFFF)
        words[head] = number
        words[self._newest] = number
        return number

    def read(self) -> tuple[int, bytes]:
        """The newest message and its number; (0, b"") before the first. Raises Torn."""
        words = self._file.words
        for _ in range(TRIES):
            number = words[self._newest]
            if number == 0:
                return 0, b""
            start = self._first + (number % SLOTS) * self._stride
            head, body = start // WORD, start + SLOT_HEAD_BYTES
            length, checksum = words[head + 1], words[head + 2]
            message = self._file.bytes[body : body + min(length, self.message_bytes_max)]
            if words[head] == number and _checksum(message, number & 0xFFFFFFFF) == checksum:
                return number, message
        raise Torn


class Ring:
    """The newest `capacity` records of `values` floats each, numbered from 1."""

    def __init__(self, file: MappedFile, offset: int, capacity: int, values: int) -> None:
        self._file = file
        self._newest = offset // WORD
        self._first = offset + WORD
        self._stride = (values + 2) * WORD  # number, values, checksum
        self._capacity = capacity
        self._packed = struct.Struct(f"={values + 1}d").pack

    @staticmethod
    def size_bytes(capacity: int, values: int) -> int:
        return WORD + capacity * (values + 2) * WORD

    @property
    def number(self) -> int:
        return self._file.words[self._newest]

    def append(self, *values: float) -> int:
        words, number = self._file.words, self._file.words[self._newest] + 1
        record = self._packed(number, *values)
        start = self._first + (number % self._capacity) * self._stride
        self._file.bytes[start : start + len(record)] = record
        words[(start + len(record)) // WORD] = _checksum(record)
        words[self._newest] = number
        return number

    def newest(self) -> tuple[float, ...] | None:
        """The last record; None before the first. Raises Torn."""
        for _ in range(TRIES):
            number = self.number
            if number == 0:
                return None
            found = self._read(number)
            if found is not None:
                return found[1]
        raise Torn

    def since(self, seen: int) -> tuple[list[tuple[int, tuple[float, ...]]], int]:
        """Records after number `seen`, in order, and how many of them were overwritten before they were read."""
        newest = self.number
        first = max(seen + 1, newest - self._capacity + 2)  # the oldest may be on its way out
        found = [record for number in range(first, newest + 1) if (record := self._read(number)) is not None]
        return found, newest - seen - len(found)

    def _read(self, number: int) -> tuple[int, tuple[float, ...]] | None:
        start = self._first + (number % self._capacity) * self._stride
        end = start + self._stride - WORD
        record = self._file.bytes[start:end]
        if _checksum(record) != self._file.words[end // WORD]:
            return None
        values = array("d", record)
        return (number, tuple(values[1:])) if values[0] == number else None


def _whole_words(size_bytes: int) -> int:
    return -(-size_bytes // WORD) * WORD
