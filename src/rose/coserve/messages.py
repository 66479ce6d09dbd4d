"""What the two processes of a device say to each other, and how it looks on the socket.

Commands go to the engine process, events come back. A frame is four bytes of length, little-endian, and one
msgpack value whose tag says which message it is; nothing else is ever read from the socket, so the worst a broken
peer can do is to be refused. A command with a `tag` other than 0 is answered by a `Reply` with the same tag.

There is one `Stepped` per engine step, with all tokens of that step: the number of messages does not grow with the
number of requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from rose.bounds import TEXT_CHARACTERS_MAX, Count, Finite, Integer, Label, Seconds, Serial, Text, VersionName
from rose.config.device import EngineSettings, LendSettings
from rose.core.breaches import Breach
from rose.engines.base import EngineFacts, Request, TokenEvent
from rose.errors import ConfigError, ContextTooLong, ModelError, QueueFull, RequestRefused, RoseError, Unavailable

LENGTH_BYTES = 4
FRAME_BYTES_MAX = 64 << 20  # a prompt of a million tokens is 5 MB; anything near this is a broken peer

LendingState = Literal["lending", "paused", "drained", "parked", "dry_run", "activating", "failed"]


class Lend(msgspec.Struct, frozen=True):
    """The rollout model a device is lent to, and on what terms. Its KV memory is part of the serving model's.

    `words` is what the owner said to the engines before this one, obeyed before its first step.
    """

    folder: Text
    terms: LendSettings
    words: tuple[Control, ...] = ()
    held_back: Text = ""  # why nothing is lent until the owner says `resume`


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first command: which engine, on which model, on which cores."""

    factory: Text  # "module:callable", called with (folder, settings=..., device=...)
    folder: Text
    device: Text
    settings: EngineSettings
    gated: bool = False
    lend: Lend | None = None


class Add(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    request_id: Text
    tag: Serial = 0


class Evict(msgspec.Struct, frozen=True, tag=True):
    request_id: Text
    tag: Serial = 0


class SetGrant(msgspec.Struct, frozen=True, tag=True):
    """`until_s` is on the monotonic clock, which all processes of a machine share."""

    tokens: Count
    sequences: Count
    until_s: Finite
    tag: Serial = 0


class KvBudget(msgspec.Struct, frozen=True, tag=True):
    budget_bytes: Integer
    tag: Serial = 0


class Stage(msgspec.Struct, frozen=True, tag=True):
    version: VersionName
    folder: Text
    tag: Serial = 0


class Commit(msgspec.Struct, frozen=True, tag=True):
    version: VersionName
    tag: Serial = 0


class GetFacts(msgspec.Struct, frozen=True, tag=True):
    tag: Serial


class Control(msgspec.Struct, frozen=True, tag=True):
    """The owner's word on lending; comes over the serving socket only. `limits` changes what is not None."""

    action: Literal["status", "pause", "resume", "drain", "remove", "dry_run", "limits"]
    memory_share: Finite | None = None
    compute_share: Finite | None = None
    tag: Serial = 0


class Want(msgspec.Struct, frozen=True, tag=True):
    """Whether there is work for the rollout model; comes over the rollouts' socket. The owner's word goes before."""

    is_wanted: bool
    tag: Serial = 0


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


Command = Start | Add | Cancel | Evict | SetGrant | KvBudget | Stage | Commit | GetFacts | Control | Want | Shutdown


class Fault(msgspec.Struct, frozen=True):
    """An error that crosses the socket: its class by name, and what it says."""

    kind: Label
    what: Text
    hint: Text | None = None
    retry_after_s: Seconds = 1.0


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A sentence for people while the engine starts."""

    what: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    facts: EngineFacts


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """What one step did. `step_tokens` is 0 when events came without a step (evictions).

    `started` names the requests that had been waiting until this step.
    """

    events: tuple[TokenEvent, ...]
    facts: EngineFacts
    step_tokens: int = 0
    step_s: float = 0.0
    started: tuple[str, ...] = ()


class Refused(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    fault: Fault


class DryRunStatus(msgspec.Struct, frozen=True):
    """What lending would have given in this time."""

    seconds: float
    tokens: int
    lent_s: float


class LendingStatus(msgspec.Struct, frozen=True):
    """All that an owner may want to know about a lent device. Counters only grow while the engine lives."""

    state: LendingState
    why: str  # what the last decision said, or why nothing is lent
    mode: str
    model: Literal["resident", "parked", "absent"]
    model_bytes: int
    activation_s: float | None  # how long the last one took
    parking_s: float | None
    running: int
    waiting: int
    lent_steps: int
    lent_tokens: int
    lent_s: float
    evictions: int
    evicted_tokens: int  # computed, and thrown away by evictions
    breaches: dict[str, int]
    doubtful: int
    breaker_trips: int
    page_bytes: int
    pages: int
    rollout_pages: int
    rollout_pages_max: int
    serving_pages: int
    headroom_pages: int
    memory_state: str
    lending_stretch: float
    memory_share: float
    compute_share: float
    dry_run: DryRunStatus | None = None
    slack_s: float | None = None  # what serving can spare just now, of its share of the budgets
    is_resting: bool = False  # the circuit breaker has stopped lending for a while
    shut_s: float | None = None  # no step was let through for so long, by serving or the limit on time (`core.gates`)


class Breached(msgspec.Struct, frozen=True, tag=True):
    breach: Breach


class Noted(msgspec.Struct, frozen=True, tag=True):
    """A line for the journal, which the front writes: the engine process touches no disk."""

    line: bytes


class Reply(msgspec.Struct, frozen=True, tag=True):
    tag: int
    facts: EngineFacts
    gate_open: bool = True
    staged_version: str | None = None
    fault: Fault | None = None
    lending: LendingStatus | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine process is about to leave, because of this."""

    fault: Fault


Event = Progress | Ready | Stepped | Refused | Reply | Breached | Noted | Failed

_KINDS: dict[str, type[RoseError]] = {
    kind.__name__: kind
    for kind in (RoseError, ConfigError, ModelError, RequestRefused, ContextTooLong, QueueFull, Unavailable)
}
_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


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


def frame(message: Command | Event) -> bytes:
    body = _encoder.encode(message)
    assert len(body) <= FRAME_BYTES_MAX, f"a message of {len(body)} bytes"
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def decode_command(body: bytes) -> Command:
    return _commands.decode(body)


def decode_event(body: bytes) -> Event:
    return _events.decode(body)


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
