"""The messages between the gateway and the agents of devices, and their encoding on the WebSocket.

A frame is one msgpack list of tagged messages, so the number of frames grows with time and not with turns. Frames are
bounded and nothing but these messages is ever decoded; a peer that sends anything else is cut off.

Weights have a name and a hash. The name is the publisher's own and stands in every span of tokens; the hash is that of
all their numbers. A worker reports the hash of what it really runs, or nothing while it does not know it.

An *attempt id* is a fencing token: each placement of a turn on a worker has a new one, never used again. All messages
about a turn carry it, so those of a worker that has lost the turn are ignored.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rose.api.faults import Fault
from rose.api.requests import PROMPT_LOGPROBS_MAX, FinishReason, Request
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
    Share,
    Text,
    TokenId,
    TokenIds,
    VersionName,
)
from rose.errors import Unavailable

FRAME_BYTES = 1 << 20  # a frame is closed when it has this much: reading it takes milliseconds
FRAME_BYTES_MAX = 16 << 20  # a single message may be as long as a context: a million tokens are 5 MB
FRAME_MESSAGES_MAX = 1024
CONCURRENCY_MAX = 1 << 16  # turns at once on one worker
WAITING_MAX = 1 << 17  # messages for one peer: twice the turns that a worker can have at once
AT_ONCE = 32  # messages that are encoded together; if that is too much for a frame, one by one
PIECES_MAX = 1024  # of one `TokensAdded`; a worker with more turns sends several
ALTERNATIVES_MAX = 128  # per token; clients may ask for 20
PHASES_MAX = 32  # of taking a version
LABELS_MAX = 16  # of one worker
LABEL_CHARACTERS_MAX = 64  # of a label's key, and of its value
CONNECT_PATH = "/v1/workers/connect"
ON_WIRE = {"attempt_id": "ticket"}  # the name that earlier versions of ROSE gave it

Kind = Literal["dedicated", "borrowed"]
LabelValue = Annotated[str, Meta(max_length=LABEL_CHARACTERS_MAX)]
Residency = Literal["resident", "parked", "absent", "activating"]
"""Where the rollout model is: loaded, parked (KV cache released), unloaded, or being loaded."""


WorkerLabels = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=LABEL_CHARACTERS_MAX)], LabelValue], Meta(max_length=LABELS_MAX)
]
"""Words by which an operator chooses workers, such as `rack: a3`."""


class ServingReport(msgspec.Struct, frozen=True):
    """What a lent device reports of its users: latencies of the last thousand requests, budgets, and what was lost.

    `counted` are deadlines that lending missed, `ambiguous` those that it may have cost. `lent_share` is the share of
    the time that rollout steps ran, over some seconds.
    """

    requests: Count = 0
    ttft_p50_s: Seconds | None = None
    ttft_p99_s: Seconds | None = None
    tpot_p50_s: Seconds | None = None
    tpot_p99_s: Seconds | None = None
    ttft_budget_s: Seconds | None = None
    tpot_budget_s: Seconds | None = None
    lent_share: Share | None = None
    counted: Serial = 0
    ambiguous: Serial = 0
    breaker_trips: Serial = 0
    is_resting: bool = False  # the circuit breaker has stopped lending for a while


class Join(msgspec.Struct, frozen=True, tag=True, rename={"max_concurrency": "seats"}):
    """The registration of a worker, its first message."""

    name: Name
    kind: Kind
    model: Name
    version: VersionName
    max_concurrency: Annotated[int, Meta(ge=1, le=CONCURRENCY_MAX)]
    kv_tokens: Serial
    context_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)]
    hash: Label = ""
    place: Residency = "resident"
    is_offered: bool = True
    shards: Count = 0  # how many gateways it knows and could join
    has_moved: bool = False  # from another gateway to this one
    labels: WorkerLabels = {}


class Heartbeat(msgspec.Struct, frozen=True, tag="Beat"):
    """The state of a worker; renews its lease.

    A worker whose gate is not open takes no turns: `why` says whether lending rests, its owner holds it back, or it is
    parked. `is_offered` is the owner's decision alone. Serving may block an open gate for the moment: `shut_s` is for
    how long, by the rule of `core.admission_stalls`. `decode_tok_s` is the rate of one sequence beside the others that
    run there, waits at the gate included; `slack_s` is what serving can spare now, `kv_use` its share of the device's
    KV memory. None means that the worker does not know, or does not report it.
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
    place: Residency = "resident"
    is_offered: bool = True
    activation_s: Seconds | None = None  # how long the last one took
    can_park: bool = False  # it understands `Activate` and `Park`
    shut_s: Seconds | None = None
    serving: ServingReport | None = None  # of a device that serves users


Alternatives = Annotated[tuple[tuple[TokenId, LogProbability], ...], Meta(max_length=ALTERNATIVES_MAX)]


PromptLogprobs = Annotated[
    tuple[tuple[LogProbability, Count, Alternatives], ...], Meta(max_length=PROMPT_LOGPROBS_MAX)
]  # of each token of the prompt but the first: its log-probability, its rank, the best tokens


class TurnTokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens added to one turn under one version of the weights; the first bring the prompt's log-probabilities."""

    attempt_id: Serial
    token_ids: TokenIds
    logprobs: LogProbabilities
    version: VersionName
    finish_reason: FinishReason | None = None
    cached_tokens: Count | None = None
    top_logprobs: Annotated[tuple[Alternatives, ...], Meta(max_length=TOKENS_MAX)] = ()
    prompt_logprobs: PromptLogprobs = ()


class TokensAdded(msgspec.Struct, frozen=True, tag="Tokens"):
    """Tokens that some steps of the engine added to all turns. The finish reason "abort" hands a turn back."""

    pieces: Annotated[tuple[TurnTokens, ...], Meta(max_length=PIECES_MAX)]


class TurnRefused(msgspec.Struct, frozen=True, tag="Refused", rename=ON_WIRE):
    """A turn that cannot run or continue on this worker; what was received of it so far is valid."""

    attempt_id: Serial
    fault: Fault


class VersionReady(msgspec.Struct, frozen=True, tag=True):
    """A version that the worker runs from now on, or could not load.

    `seconds` by phase: those of the receiver, `stage` for the engine's own copy, and `commit`, in which generation
    stalls.
    """

    version: VersionName
    fault: Fault | None = None
    hash: Label = ""
    size_bytes: Serial = 0  # read from the relay
    seconds: Annotated[dict[Label, Seconds], Meta(max_length=PHASES_MAX)] = {}


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The gateway's answer to a registration."""

    beat_s: Seconds


class Turn(msgspec.Struct, frozen=True, tag=True, rename=ON_WIRE):
    """A turn to run, from its partial on. A worker with another version than this one refuses it."""

    attempt_id: Serial
    request: Request
    version: VersionName | None = None


class EvictTurn(msgspec.Struct, frozen=True, tag="Evict", rename=ON_WIRE):
    """A request to hand the turn back with everything produced so far."""

    attempt_id: Serial


class CancelTurn(msgspec.Struct, frozen=True, tag="Cancel", rename=ON_WIRE):
    """A request to forget the turn."""

    attempt_id: Serial


class NewVersion(msgspec.Struct, frozen=True, tag=True):
    """Weights to stage beside the running ones, and then to swap in between two steps.

    They are in a folder that the worker can read, or under the run's name in a relay, where the hash selects them. The
    worker loads only weights that have the hash.
    """

    version: Name
    folder: Text = ""
    relay: Text = ""
    run: Label = ""
    hash: Label = ""


class Activate(msgspec.Struct, frozen=True, tag=True):
    """A request to load the rollout model, as far as the owner allows: there is work for it."""

    why: Text


class Park(msgspec.Struct, frozen=True, tag=True):
    """A request to give the rollout model's memory to serving, and to hand back the turns that still run."""

    why: Text


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The end of the connection. The worker connects again after `retry_s`, or never without a number."""

    why: Text
    retry_s: Seconds | None = None


class Move(msgspec.Struct, frozen=True, tag=True):
    """The end of the connection: the worker joins another shard, whose address it knows by its number."""

    shard: Count
    why: Text = ""


ToGateway = Join | Heartbeat | TokensAdded | TurnRefused | VersionReady
ToAgent = Welcome | Turn | EvictTurn | CancelTurn | NewVersion | Activate | Park | Leave | Move

ToGatewayFrame = Annotated[list[ToGateway], Meta(max_length=FRAME_MESSAGES_MAX)]
ToAgentFrame = Annotated[list[ToAgent], Meta(max_length=FRAME_MESSAGES_MAX)]
_encoder = msgspec.msgpack.Encoder()
_to_gateway: msgspec.msgpack.Decoder[list[ToGateway]] = msgspec.msgpack.Decoder(ToGatewayFrame)
_to_agent: msgspec.msgpack.Decoder[list[ToAgent]] = msgspec.msgpack.Decoder(ToAgentFrame)


def encode(messages: Sequence[ToGateway | ToAgent]) -> bytes:
    return _encoder.encode(messages)


def decode_to_gateway(frame: bytes) -> list[ToGateway]:
    """Return the messages of a worker's frame. Raise Unavailable for anything else."""
    try:
        return _to_gateway.decode(frame)
    except UNREADABLE as error:
        raise Unavailable(f"a worker sent something unreadable: {error}") from error


def decode_to_agent(frame: bytes) -> list[ToAgent]:
    """Return the messages of a gateway's frame. Raise Unavailable for anything else."""
    try:
        return _to_agent.decode(frame)
    except UNREADABLE as error:
        hint = "see that both ends run the same version of ROSE"
        raise Unavailable(f"the gateway sent something unreadable: {error}", hint=hint) from error


class SendQueue:
    """The messages that wait for one connection: put without waiting, sent in one frame with all that wait by then.

    Messages that are put while a frame is being sent go with the next one, so a slow connection makes fewer and larger
    frames instead of a longer queue. A peer for which `WAITING_MAX` messages wait loses its connection, which bounds
    the memory. A peer that reads nothing at all is cut off by the connection itself, at both ends.
    """

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._messages: deque[ToGateway | ToAgent] = deque()
        self._news = asyncio.Event()
        self._is_full = False

    def put(self, message: ToGateway | ToAgent) -> None:
        if len(self._messages) >= WAITING_MAX:
            self._is_full = True
        else:
            self._messages.append(message)
        self._news.set()

    async def run(self) -> None:
        """Send messages until cancelled. Raise ConnectionError when the peer is gone or does not read."""
        while True:
            await self._news.wait()
            await self.flush()

    async def flush(self) -> None:
        self._news.clear()
        while self._messages:
            await self._send(self._next_frame())
            if self._is_full:
                raise ConnectionResetError(f"{WAITING_MAX} messages wait for a peer that does not read")

    def _next_frame(self) -> bytes:
        messages = self._messages
        if len(messages) <= AT_ONCE:
            frame = _encoder.encode(list(messages))
            if len(frame) <= FRAME_BYTES or len(messages) == 1:
                messages.clear()
                return frame
        parts: list[msgspec.Raw] = []
        size = 0
        while messages and len(parts) < FRAME_MESSAGES_MAX and size < FRAME_BYTES:
            part = _encoder.encode(messages.popleft())
            parts.append(msgspec.Raw(part))
            size += len(part)
        return _encoder.encode(parts)
