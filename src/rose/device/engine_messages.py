"""The messages between a front and its engine process, and their frames on the socket.

Commands go to the engine process, events come back. A frame is four bytes of length, little-endian, and one msgpack
value whose tag names the message; nothing else is read from the socket, so the worst a broken peer can do is to be
refused. A command with a `tag` other than 0 is answered by a `Reply` with the same tag. There is one `Stepped` per
engine step: the number of messages does not grow with the number of requests.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rose.api.faults import Fault
from rose.api.frames import FRAME_BYTES_MAX, LENGTH_BYTES
from rose.bounds import Finite, Serial, Text, VersionName
from rose.config.server_settings import EngineSettings, LendSettings
from rose.core.accountant import Breach
from rose.core.history import HistorySnapshot
from rose.engines.base import EngineFacts, LendingStatus, Request, Stepped
from rose.engines.recorded_steps import RecordedSteps


class Lend(msgspec.Struct, frozen=True):
    """The rollout model a device is lent to, and on what terms. Its KV memory is part of the serving model's."""

    folder: Text
    terms: LendSettings
    commands: tuple[AdminCommand, ...] = msgspec.field(default=(), name="words")  # obeyed before the first step
    held_back: Text = ""  # why nothing is lent until `resume`
    history: HistorySnapshot | None = None  # what the engine before this one had learnt of serving


class StartEngine(msgspec.Struct, frozen=True, tag=True):
    """The first command: which engine, on which model, on which cores."""

    factory: Text  # "module:callable", called with (folder, settings=..., device=...)
    folder: Text
    device: Text
    settings: EngineSettings
    lend: Lend | None = None


class Add(msgspec.Struct, frozen=True, tag=True):
    request: Request


class CancelRequest(msgspec.Struct, frozen=True, tag=True):
    request_id: Text
    tag: Serial = 0


class EvictRequest(msgspec.Struct, frozen=True, tag=True):
    request_id: Text
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


class GetSteps(msgspec.Struct, frozen=True, tag=True):
    """A request for the recorded steps of both engines, over the serving socket only."""

    tag: Serial = 0


class AdminCommand(msgspec.Struct, frozen=True, tag=True):
    """A command on lending, over the serving socket only. `limits` changes what is not None."""

    action: Literal["status", "pause", "resume", "drain", "remove", "dry_run", "limits"]
    memory_share: Finite | None = None
    compute_share: Finite | None = None
    tag: Serial = 0


class Want(msgspec.Struct, frozen=True, tag=True):
    """Whether there is work for the rollout model, over the rollout socket. Admin commands go before it."""

    is_wanted: bool
    tag: Serial = 0


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """An order to exit; requests end with the process."""


Command = (
    StartEngine
    | Add
    | CancelRequest
    | EvictRequest
    | Stage
    | Commit
    | GetFacts
    | GetSteps
    | AdminCommand
    | Want
    | Shutdown
)


class StartProgress(msgspec.Struct, frozen=True, tag=True):
    """A sentence for the operator while the engine starts."""

    what: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    facts: EngineFacts


class RequestRejected(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    fault: Fault


class Breached(msgspec.Struct, frozen=True, tag=True):
    breach: Breach


class Learnt(msgspec.Struct, frozen=True, tag=True):
    """What the engine has learnt of its traffic, every few seconds: for the next engine, should this one end."""

    history: HistorySnapshot


class Noted(msgspec.Struct, frozen=True, tag=True):
    """A line of the journal, which the front writes: the engine process touches no disk."""

    line: bytes


class Reply(msgspec.Struct, frozen=True, tag=True):
    tag: int
    facts: EngineFacts
    fault: Fault | None = None
    lending: LendingStatus | None = None
    steps: RecordedSteps | None = None


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The reason why the engine process is about to exit."""

    fault: Fault


Notice = Breached | Noted  # about lending, sent without being asked
Event = StartProgress | Ready | Stepped | RequestRejected | Reply | Breached | Learnt | Noted | EngineFailed

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def frame(message: Command | Event) -> bytes:
    body = _encoder.encode(message)
    assert len(body) <= FRAME_BYTES_MAX, f"a message of {len(body)} bytes"
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def decode_command(body: bytes) -> Command:
    return _commands.decode(body)


def decode_event(body: bytes) -> Event:
    return _events.decode(body)
