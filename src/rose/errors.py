"""The error tree. Every error that ROSE raises on purpose says what happened and what to do about it.

    RoseError
    ├── ConfigError      bad input at start-up: settings, flags, model folders, devices
    │   └── ModelError   a model folder that cannot be used; names the file
    ├── RequestRefused   one request cannot be accepted; the others continue
    │   ├── ContextTooLong
    │   ├── QueueFull    carries retry_after_s
    │   └── VersionUnavailable  carries the newest version of the weights
    ├── Unavailable      the world failed: a process, a peer, a disk; carries retry_after_s
    └── JournalCorrupt   a journal line that cannot be read back

Parts that have more to tell apart derive their own: `weights` has KeyExists, KeyMissing, RangeRefused,
WeightsRefused and Fenced under RequestRefused, RelayFull under Unavailable, LayoutError under ConfigError, and
CodecError.

Bugs are `assert`, left on in production. The CLI prints `str(error)` without a traceback and exits with `exit_code`.
"""

from __future__ import annotations


class RoseError(Exception):
    """An error with what happened and, optionally, what to try; `str()` shows both."""

    exit_code = 1

    def __init__(self, what: str, *, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what}\n  try: {self.hint}" if self.hint else self.what


class ConfigError(RoseError):
    exit_code = 2


class ModelError(ConfigError):
    """A model folder that cannot be used; `what` names the file."""


class RequestRefused(RoseError):
    """A fault of one request; no other is affected."""


class ContextTooLong(RequestRefused):
    pass


class QueueFull(RequestRefused):
    def __init__(self, what: str, *, retry_after_s: float = 1.0, hint: str | None = None) -> None:
        super().__init__(what, hint=hint)
        self.retry_after_s = retry_after_s


class VersionUnavailable(RequestRefused):
    """No engine runs the weights that a request demands; `newest` is the newest version that one could demand."""

    def __init__(self, what: str, *, newest: str = "", hint: str | None = None) -> None:
        super().__init__(what, hint=hint)
        self.newest = newest


class Unavailable(RoseError):
    def __init__(self, what: str, *, retry_after_s: float = 1.0, hint: str | None = None) -> None:
        super().__init__(what, hint=hint)
        self.retry_after_s = retry_after_s


class JournalCorrupt(RoseError):
    pass
