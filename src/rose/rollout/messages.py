"""What the gateway and the agents of devices say to each other, and how it looks on the WebSocket.

A frame is one msgpack list of messages, each with a tag that says what it is: whoever has much to say at once says it
in one frame, so the number of frames grows with time, not with turns. Frames are bounded, and nothing but these
messages is ever decoded; a peer that sends anything else is cut off.

Weights have a name and a hash. The name is the publisher's own and stands in every span of tokens; the hash is that of
all their numbers, and a worker tells the hash of what it really runs, or nothing while it does not know it.

A *ticket* is one placement of one turn on one worker, numbered once and for ever. Everything an agent says about a turn
carries its ticket, so what a worker says about a turn that was taken from it meets a closed door.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rose.coserve.messages import Fault
from rose.engines.base import FinishReason, Request
from rose.errors import Unavailable

FRAME_BYTES_MAX = 64 << 20  # a prompt of a million tokens is 5 MB; anything near this is a broken peer
CONNECT_PATH = "/v1/workers/connect"

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Kind = Literal["dedicated", "borrowed"]
Place = Literal["resident", "parked", "absent", "activating"]
"""Where the rollout model is: on the device, beside it, not there, on its way back."""


class Join(msgspec.Struct, frozen=True, tag=True):
    """The first message of an agent."""

    name: Name
    kind: Kind
    model: Name
    version: str
    seats: Annotated[int, Meta(ge=1)]
    kv_tokens: Annotated[int, Meta(ge=0)]
    context_tokens: Annotated[int, Meta(ge=1)]
    hash: str = ""
    place: Place = "resident"
    is_offered: bool = True


class Beat(msgspec.Struct, frozen=True, tag=True):
    """How a worker is; renews its lease.

    A gate that is not open takes no turns, and nobody is to blame: `why` says whether lending rests, its owner holds it
    back, or it is parked. `is_offered` is the owner's word alone. An open one may still be shut by serving for the
    moment: `shut_s` is for how long, by the rule of `core.gates`. `decode_tok_s` is of one sequence beside those that
    run there, waits at the gate included; `slack_s` is what serving can spare just now, `kv_use` its share of the
    device's KV memory. What is not so, what a worker does not know, or an older one does not tell, is None.
    """

    running: int
    waiting: int
    kv_used_tokens: int
    kv_tokens: int
    version: str
    gate_open: bool
    tokens_per_s: float = 0.0
    why: str = ""  # the gate is closed
    hash: str = ""
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    slack_s: float | None = None
    kv_use: float | None = None
    place: Place = "resident"
    is_offered: bool = True
    activation_s: float | None = None  # how long the last one took
    can_park: bool = False  # it knows `Activate` and `Park`
    shut_s: float | None = None


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What was added to one turn under one version of the weights."""

    ticket: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: str
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """What some steps of the engine added to all turns. A finish of "abort" hands the turn back."""

    pieces: tuple[Piece, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The turn cannot run or go on here; what was told of it so far is valid."""

    ticket: int
    fault: Fault


class VersionReady(msgspec.Struct, frozen=True, tag=True):
    """The worker runs this version from now on, or could not take it.

    `seconds` by phase: those of the receiver, `stage` for the engine's own copy, and `commit`, in which lies the pause.
    """

    version: str
    fault: Fault | None = None
    hash: str = ""
    size_bytes: int = 0  # read from the relay
    seconds: dict[str, float] = {}


class Welcome(msgspec.Struct, frozen=True, tag=True):
    beat_s: float


class Turn(msgspec.Struct, frozen=True, tag=True):
    """Run this, from its partial on; under another version of the weights than this one, refuse."""

    ticket: int
    request: Request
    version: str | None = None


class Evict(msgspec.Struct, frozen=True, tag=True):
    """Hand the turn back with everything produced so far."""

    ticket: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Forget the turn."""

    ticket: int


class NewVersion(msgspec.Struct, frozen=True, tag=True):
    """Stage these weights beside the running ones, then swap between two steps.

    They lie in a folder that the worker can read, or under the run's name in a relay; there the hash says which they
    are. Whatever is taken must have it.
    """

    version: Name
    folder: str = ""
    relay: str = ""
    run: str = ""
    hash: str = ""


class Activate(msgspec.Struct, frozen=True, tag=True):
    """There is work for the rollout model: have it on the device, as far as the owner lets it."""

    why: str


class Park(msgspec.Struct, frozen=True, tag=True):
    """There is none: give its memory to serving. Turns that are still there are handed back."""

    why: str


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The connection ends; come back after this long, or, without a number, never."""

    why: str
    retry_s: float | None = None


ToGateway = Join | Beat | Tokens | Refused | VersionReady
ToAgent = Welcome | Turn | Evict | Cancel | NewVersion | Activate | Park | Leave

_encoder = msgspec.msgpack.Encoder()
_to_gateway: msgspec.msgpack.Decoder[list[ToGateway]] = msgspec.msgpack.Decoder(list[ToGateway])
_to_agent: msgspec.msgpack.Decoder[list[ToAgent]] = msgspec.msgpack.Decoder(list[ToAgent])


def encode(messages: Sequence[ToGateway | ToAgent]) -> bytes:
    return _encoder.encode(messages)


def decode_to_gateway(frame: bytes) -> list[ToGateway]:
    """Raises Unavailable for a frame that is none."""
    try:
        return _to_gateway.decode(frame)
    except msgspec.DecodeError as error:
        raise Unavailable(f"a worker sent something unreadable: {error}") from error


def decode_to_agent(frame: bytes) -> list[ToAgent]:
    """Raises Unavailable for a frame that is none."""
    try:
        return _to_agent.decode(frame)
    except msgspec.DecodeError as error:
        hint = "see that both ends run the same version of ROSE"
        raise Unavailable(f"the gateway sent something unreadable: {error}", hint=hint) from error
