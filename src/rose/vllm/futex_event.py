"""An event between processes: waiters sleep in the kernel (a futex) until a number in a mapped file has grown.

The kernel compares the number before it lets a waiter sleep, so no event is missed. Without the system call, waiters
look again every few milliseconds. Waking takes a microsecond, but sixteen with cold caches, as after a step of a model.
So waiters write their deadline to a shared page, and the writer wakes them only if some deadline is in the future. A
processor may read that page before the number is visible: then the first event after a time without waiters is missed,
and the wait ends by its limit.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import time
from contextlib import suppress
from functools import partial

from rose.vllm.seqlock_file import WORD, MappedFile

POLL_S = 0.004  # without the system call
FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine())  # machines on which low bytes come first
WAIT, WAKE, ALL = 0, 1, 0x7FFFFFFF
EXPECTED = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)  # the number changed already, interrupted, timed out

_wait = ctypes.CDLL(None, use_errno=True).syscall
_wake = ctypes.PyDLL(None).syscall  # keeps Python's lock: releasing and retaking it would take longer than the call
_POINTER, _UINT32 = ctypes.c_void_p, ctypes.c_uint32
for _call in (_wait, _wake):
    _call.restype = ctypes.c_long
    _call.argtypes = (ctypes.c_long, _POINTER, ctypes.c_int, _UINT32, _POINTER, _POINTER, _UINT32)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class FutexEvent:
    """An event on a number in one 8-byte unit of a file. Its writer wakes waiters after the number has grown.

    That place of `deadlines` has the deadline of the last waiter; without it the writer always wakes.
    """

    def __init__(self, file: MappedFile, word: int, deadlines: memoryview[float] | None = None, place: int = 0) -> None:
        self._file, self._word, self._deadlines, self._place = file, word, deadlines, place
        self._address = file.address + word * WORD
        self._wake = partial(_wake, FUTEX or 0, self._address, WAKE, ALL, None, None, 0)

    @property
    def number(self) -> int:
        return self._file.words[self._word]

    def notify(self, now_s: float = 0.0) -> None:
        """Wake the waiters, if any has a deadline after `now_s`."""
        if FUTEX is not None and (self._deadlines is None or self._deadlines[self._place] >= now_s):
            self._wake()

    def wait(self, number: int, timeout_s: float) -> None:
        """Wait until the number differs from this one, or for so long; sometimes for less."""
        deadline_s = time.monotonic() + timeout_s
        with suppress(ValueError):  # the file was closed meanwhile
            if FUTEX is not None and timeout_s > 0:
                if self._deadlines is not None:
                    self._deadlines[self._place] = max(self._deadlines[self._place], deadline_s)
                limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
                low = number & 0xFFFFFFFF
                is_woken = _wait(FUTEX, self._address, WAIT, low, ctypes.byref(limit), None, 0) == 0
                if is_woken or ctypes.get_errno() in EXPECTED:
                    return
            while self.number == number and (left_s := deadline_s - time.monotonic()) > 0:
                time.sleep(min(left_s, POLL_S))
