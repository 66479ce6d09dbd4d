"""Shared memory in a file that one process writes and others read, without a lock: neither side ever blocks.

`Slots` holds the newest of a sequence of messages: the writer fills the next of a few slots, then publishes its number.
`Ring` holds the newest few hundred of a sequence of equal records, for readers that must miss none. Readers check the
number and a checksum of what they copied: on a machine that reorders writes, a copy may mix two messages. The file is
filled under another name and then renamed, so no process opens half of one. It uses plain `mmap`, because
`multiprocessing.shared_memory` removes a segment when any process that opened it ends (Python < 3.13).
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from array import array
from pathlib import Path

import numpy as np

WORD = 8
_checksum = zlib.adler32  # not a CRC: its tables are never in a cache when a step ends, and cost more than all the rest
SLOTS = 4  # a reader is overtaken only if the writer goes round all of them during one copy
SLOT_HEAD_BYTES = 3 * WORD  # number, length, checksum
TRIES = 16


class Torn(Exception):
    """A read that the writer overtook again and again; read later."""


class MappedFile:
    """A file of fixed size, mapped. `words` and `floats` are its 8-byte units, each written and read at once."""

    def __init__(self, path: Path, *, writable: bool, offset: int = 0, size_bytes: int = 0) -> None:
        """Map this part of the file, by default all of it."""
        self.path = path
        descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self.bytes = mmap.mmap(descriptor, size_bytes, access=access, offset=offset)
        finally:
            os.close(descriptor)
        self.words = memoryview(self.bytes).cast("Q")
        self.floats: memoryview[float] = memoryview(self.bytes).cast("d")
        self.address = int(np.frombuffer(self.bytes, np.uint8).ctypes.data)  # for the kernel, as long as it is open

    @classmethod
    def create(cls, path: Path, size_bytes: int, head: bytes = b"") -> MappedFile:
        """Create a file that begins with this head, in place of any with this name; readers of the old one keep it."""
        hidden = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)  # full memory is an error now, not a signal later
        finally:
            os.close(descriptor)
        file = cls(hidden, writable=True)
        file.bytes[: len(head)] = head
        os.rename(hidden, path)
        file.path = path
        return file

    def close(self) -> None:
        self.words.release()
        self.floats.release()
        self.bytes.close()


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
        """Return the number of the newest message; 0 before the first."""
        return self._file.words[self._newest]

    def write(self, message: bytes | bytearray | memoryview) -> int:
        """Write a message as the only writer. Return its number."""
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
        """Return the newest message and its number; (0, b"") before the first. Raises Torn."""
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
        """Append a record as the only writer. Return its number."""
        words, number = self._file.words, self._file.words[self._newest] + 1
        record = self._packed(number, *values)
        start = self._first + (number % self._capacity) * self._stride
        self._file.bytes[start : start + len(record)] = record
        words[(start + len(record)) // WORD] = _checksum(record)
        words[self._newest] = number
        return number

    def newest(self) -> tuple[float, ...] | None:
        """Return the last record; None before the first. Raises Torn."""
        for _ in range(TRIES):
            number = self.number
            if number == 0:
                return None
            record = self._read(number)
            if record is not None:
                return record[1]
        raise Torn

    def since(self, seen: int) -> tuple[list[tuple[int, tuple[float, ...]]], int]:
        """Return the records after number `seen` in order, and how many were overwritten unread."""
        newest = self.number
        first = max(seen + 1, newest - self._capacity + 2)  # the writer may be overwriting the oldest
        records = [record for number in range(first, newest + 1) if (record := self._read(number)) is not None]
        return records, newest - seen - len(records)

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
