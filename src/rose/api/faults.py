"""Errors that cross a socket: a class of the error tree by its name, with what it says.

The engine process of a device and the workers of a gateway send their errors this way. The receiver raises the same
class again, so that a client gets the same answer wherever the error began.
"""

from __future__ import annotations

import msgspec

from rose.bounds import TEXT_CHARACTERS_MAX, Label, Seconds, Text
from rose.errors import ConfigError, ContextTooLong, ModelError, QueueFull, RequestRefused, RoseError, Unavailable

_KINDS: dict[str, type[RoseError]] = {
    kind.__name__: kind
    for kind in (RoseError, ConfigError, ModelError, RequestRefused, ContextTooLong, QueueFull, Unavailable)
}


class Fault(msgspec.Struct, frozen=True):
    """An error that crosses the socket: its class by name, and what it says."""

    kind: Label
    what: Text
    hint: Text | None = None
    retry_after_s: Seconds = 1.0


def fault_of(error: BaseException) -> Fault:
    """How an error travels; one that is not ours becomes `Unavailable`, since to the other side it is just that."""
    if isinstance(error, RoseError):
        known = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS)
        hint = error.hint[:TEXT_CHARACTERS_MAX] if error.hint is not None else None
        return Fault(known, error.what[:TEXT_CHARACTERS_MAX], hint, getattr(error, "retry_after_s", 1.0))
    return Fault("Unavailable", f"the engine failed: {type(error).__name__}: {error}"[:TEXT_CHARACTERS_MAX])


def error_of(fault: Fault) -> RoseError:
    """The error a fault stands for."""
    kind = _KINDS.get(fault.kind, Unavailable)
    if issubclass(kind, QueueFull | Unavailable):
        return kind(fault.what, hint=fault.hint, retry_after_s=fault.retry_after_s)
    return kind(fault.what, hint=fault.hint)
