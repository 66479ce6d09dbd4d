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

from rose.bounds import (
    INT32_MAX,
    TOKENS_MAX,
    UNREADABLE,
    Count,
    Finite,
    Label,
    LogProbabilities,
    LogProbability,
    Name,
    NonNegative,
    Seconds,
    Serial,
    Text,
    TokenId,
    TokenIds,
    VersionName,
)
from rose.coserve.messages import Fault
from rose.engines.base import FinishReason, Request
from rose.errors import Unavailable

FRAME_BYTES = 1 << 20  # a frame is closed when it has this much: reading it takes milliseconds
FRAME_BYTES_MAX = 16 << 20  # a single message may be as long as a context: a million tokens are 5 MB
FRAME_MESSAGES_MAX = 1024
SEATS_MAX = 1 << 16  # turns at once on one worker
PIECES_MAX = 1024  # of one `Tokens`; a worker with more turns sends several
ALTERNATIVES_MAX = 128  # per token; clients may ask for 20
PHASES_MAX = 32  # of taking a version
CONNECT_PATH = "/v1/workers/connect"

Kind = Literal["dedicated", "borrowed"]
Place = Literal["resident", "parked", "absent", "activating"]
"""Where the rollout model is: on the device, beside it, not there, on its way back."""


class Join(msgspec.Struct, frozen=True, tag=True):
    """The first message of an agent."""

    name: Name
    kind: Kind
    model: Name
    version: VersionName
    seats: Annotated[int, Meta(ge=1, le=SEATS_MAX)]
    kv_tokens: Serial
    context_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)]
    hash: Label = ""
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

    running: Count
    waiting: Count
    kv_used_tokens: Serial
    kv_tokens: Serial
    version: VersionName
    gate_open: bool
    tokens_per_s: NonNegative = 0.0
    why: Text = ""  # the gate is closed
    hash: Label = ""
    prefill_tok_s: NonNegative | None = None
    decode_tok_s: NonNegative | None = None
    slack_s: Finite | None = None
    kv_use: NonNegative | None = None
    place: Place = "resident"
    is_offered: bool = True
    activation_s: Seconds | None = None  # how long the last one took
    can_park: bool = False  # it knows `Activate` and `Park`
    shut_s: Seconds | None = None


Alternatives = Annotated[tuple[tuple[TokenId, LogProbability], ...], Meta(max_length=ALTERNATIVES_MAX)]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What was added to one turn under one version of the weights."""

    ticket: Serial
    token_ids: TokenIds
    logprobs: LogProbabilities
    version: VersionName
    finish_reason: FinishReason | None = None
    cached_tokens: Count | None = None
    top_logprobs: Annotated[tuple[Alternatives, ...], Meta(max_length=TOKENS_MAX)] = ()


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """What some steps of the engine added to all turns. A finish of "abort" hands the turn back."""

    pieces: Annotated[tuple[Piece, ...], Meta(max_length=PIECES_MAX)]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The turn cannot run or go on here; what was told of it so far is valid."""

    ticket: Serial
    fault: Fault


class VersionReady(msgspec.Struct, frozen=True, tag=True):
    """The worker runs this version from now on, or could not take it.

    `seconds` by phase: those of the receiver, `stage` for the engine's own copy, and `commit`, in which lies the pause.
    """

    version: VersionName
    fault: Fault | None = None
    hash: Label = ""
    size_bytes: Serial = 0  # read from the relay
    seconds: Annotated[dict[Label, Seconds], Meta(max_length=PHASES_MAX)] = {}


class Welcome(msgspec.Struct, frozen=True, tag=True):
    beat_s: Seconds


class Turn(msgspec.Struct, frozen=True, tag=True):
    """Run this, from its partial on; under another version of the weights than this one, refuse."""

    ticket: Serial
    request: Request
    version: VersionName | None = None


class Evict(msgspec.Struct, frozen=True, tag=True):
    """Hand the turn back with everything produced so far."""

    ticket: Serial


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Forget the turn."""

    ticket: Serial


class NewVersion(msgspec.Struct, frozen=True, tag=True):
    """Stage these weights beside the running ones, then swap between two steps.

    They lie in a folder that the worker can read, or under the run's name in a relay; there the hash says which they
    are. Whatever is taken must have it.
    """

    version: Name
    folder: Text = ""
    relay: Text = ""
    run: Label = ""
    hash: Label = ""


class Activate(msgspec.Struct, frozen=True, tag=True):
    """There is work for the rollout model: have it on the device, as far as the owner lets it."""

    why: Text


class Park(msgspec.Struct, frozen=True, tag=True):
    """There is none: give its memory to serving. Turns that are still there are handed back."""

    why: Text


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The connection ends; come back after this long, or, without a number, never."""

    why: Text
    retry_s: Seconds | None = None


ToGateway = Join | Beat | Tokens | Refused | VersionReady
ToAgent = Welcome | Turn | Evict | Cancel | NewVersion | Activate | Park | Leave

_encoder = msgspec.msgpack.Encoder()
ToGatewayFrame = Annotated[list[ToGateway], Meta(max_length=FRAME_MESSAGES_MAX)]
ToAgentFrame = Annotated[list[ToAgent], Meta(max_length=FRAME_MESSAGES_MAX)]
_to_gateway: msgspec.msgpack.Decoder[list[ToGateway]] = msgspec.msgpack.Decoder(ToGatewayFrame)
_to_agent: msgspec.msgpack.Decoder[list[ToAgent]] = msgspec.msgpack.Decoder(ToAgentFrame)


def encode(messages: Sequence[ToGateway | ToAgent]) -> bytes:
    return _encoder.encode(messages)


def encode_one(message: ToGateway | ToAgent) -> msgspec.Raw:
    """Return the message as a part of a frame."""
    return msgspec.Raw(_encoder.encode(message))


def join_frame(parts: Sequence[msgspec.Raw]) -> bytes:
    """Return the frame of these messages."""
    return _encoder.encode(parts)


def decode_to_gateway(frame: bytes) -> list[ToGateway]:
    """Return the messages of a worker's frame. Raises Unavailable for anything else."""
    try:
        return _to_gateway.decode(frame)
    except UNREADABLE as error:
        raise Unavailable(f"a worker sent something unreadable: {error}") from error


def decode_to_agent(frame: bytes) -> list[ToAgent]:
    """Return the messages of a gateway's frame. Raises Unavailable for anything else."""
    try:
        return _to_agent.decode(frame)
    except UNREADABLE as error:
        hint = "see that both ends run the same version of ROSE"
        raise Unavailable(f"the gateway sent something unreadable: {error}", hint=hint) from error
