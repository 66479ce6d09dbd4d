"""A bell between processes: who waits for a number in a mapped file to grow sleeps in the kernel until it is rung.

Ringing is one system call, which waits for nobody (a futex of Linux). The kernel compares the number before it lets
anybody sleep, so that no ring is missed. Where it has no such call, or forbids it, who waits looks again every few
milliseconds.

The call takes a microsecond, but sixteen where nothing is in a cache, as after a step of a model. So on a board who
waits says until when, on a page that he may write to, and nobody else is rung for. A processor may let the look at that
page overtake the number written before it: then the first ring after a time without listeners goes unheard, and the
wait ends by its limit.

Who rings keeps Python's lock, for which others in its process would make it wait longer than the call takes.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import time
from contextlib import suppress
from functools import partial

from rose.engines.vllm.mapped import WORD, MappedFile

POLL_S = 0.004  # without the system call
FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine())  # machines on which low bytes come first
WAIT, WAKE, ALL = 0, 1, 0x7FFFFFFF
EXPECTED = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)  # rung already, disturbed, too long

_wait = ctypes.CDLL(None, use_errno=True).syscall
_wake = ctypes.PyDLL(None).syscall
for _call in (_wait, _wake):
    _call.restype = ctypes.c_long
    _call.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    )


class _Seconds(ctypes.Structure):
    _fields_ = (("whole", ctypes.c_long), ("nano", ctypes.c_long))


class Bell:
    """On the number in one 8-byte unit of a file. Its writer rings after the number has grown.

    In that place of `heard` stands until when somebody listens; without it everybody is rung for.
    """

    def __init__(self, file: MappedFile, word: int, heard: memoryview[float] | None = None, place: int = 0) -> None:
        self._file, self._word, self._heard, self._place = file, word, heard, place
        self._address = file.address + word * WORD
        self._wake = partial(_wake, FUTEX or 0, self._address, WAKE, ALL, None, None, 0)

    @property
    def number(self) -> int:
        return self._file.words[self._word]

    def ring(self, now_s: float = 0.0) -> None:
        if FUTEX is not None and (self._heard is None or self._heard[self._place] >= now_s):
            self._wake()

    def wait(self, number: int, timeout_s: float) -> None:
        """Until it is another one than this, or for so long; now and then for less."""
        if FUTEX is not None and timeout_s > 0:
            self._listen(time.monotonic() + timeout_s)
            limit = _Seconds(int(timeout_s), int(timeout_s % 1 * 1e9))
            low = number & 0xFFFFFFFF
            if _wait(FUTEX, self._address, WAIT, low, ctypes.byref(limit), None, 0) == 0:
                return
            if ctypes.get_errno() in EXPECTED:
                return
        self._look_out(number, timeout_s)

    def _listen(self, until_s: float) -> None:
        if self._heard is not None:
            with suppress(ValueError):  # the file was closed meanwhile
                self._heard[self._place] = max(self._heard[self._place], until_s)

    def _look_out(self, number: int, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        with suppress(ValueError):  # the file was closed meanwhile
            while self.number == number and (left_s := deadline_s - time.monotonic()) > 0:
                time.sleep(min(left_s, POLL_S))
