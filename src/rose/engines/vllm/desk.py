"""The desk of a rollout engine: what its agent wants of it, and how it is, in two mapped files of one folder.

The agent writes `control`, the engine `status`; each reads the other's. Nothing is asked and answered: the agent
writes what it wants whole, under a number, and the engine shows the number it has done. What the agent wants includes
a grant that expires, so an agent that is gone is a closed gate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from rose.bounds import ITEMS_MAX, Count, Label, NonNegative, Seconds, Serial, Share, Text
from rose.core.admission import Mode
from rose.engines.vllm.bell import Bell
from rose.engines.vllm.mapped import MappedFile, Slots
from rose.errors import Unavailable

MESSAGE_BYTES_MAX = 65536
KINDS_MAX = 64  # kinds of breaches; there are three
DESK_VARIABLE = "ROSE_ROLLOUT_DESK"  # the folder, in the environment of the rollout engine


class Terms(msgspec.Struct, frozen=True):
    """What lending is decided by, beside a serving engine."""

    board: Text
    mode: Mode = "idle"
    ttft_s: Seconds = 0.5
    tpot_s: Seconds = 0.15
    slack_share: Share = 0.7
    answer_s: Seconds = 60.0


class Control(msgspec.Struct, frozen=True):
    """What the agent wants. Without `terms` nobody is served beside, and the grant is all there is to obey."""

    tokens: Count = 0
    sequences: Count = 0
    until_s: NonNegative = 0.0
    kv_bytes: Serial | None = None  # the most KV memory; None is all of the engine's
    terms: Terms | None = None
    stopped: Text = ""  # why nothing may run, by the owner
    compute_share: Share = 1.0
    dry_run: bool = False
    resumes: Serial = 0  # grows when the owner says to lend again, whatever stopped it


State = Literal["parked", "running", "idle"]


class Lent(msgspec.Struct, frozen=True):
    """The account of lending so far."""

    steps: Serial = 0
    tokens: Serial = 0
    seconds: Seconds = 0.0
    breaches: Annotated[dict[Label, Serial], Meta(max_length=KINDS_MAX)] = {}
    doubtful: Serial = 0
    breaker_trips: Serial = 0
    requests: Serial = 0  # of serving, that ended
    attained: Serial = 0  # of those, within both budgets
    missing: Text = ""  # what must be seen before anything is lent
    closed_s: Annotated[dict[Text, Seconds], Meta(max_length=ITEMS_MAX)] = {}  # waiting at the gate, by the reason
    resting: Text = ""  # why the circuit breaker has stopped lending for a while
    dry_run_tokens: Serial = 0
    dry_run_lent_s: Seconds = 0.0
    dry_run_s: Seconds = 0.0


class Status(msgspec.Struct, frozen=True):
    """How the engine is. `done` is the number of the newest control that it obeys."""

    process_id: Serial
    done: Serial = 0
    at_s: Seconds = 0.0
    state: State = "idle"
    gate_open: bool = False
    until_s: NonNegative = 0.0  # when it closes by itself
    why: Text = ""
    version: Text = ""
    running: Serial = 0
    waiting: Serial = 0
    kv_blocks_limit: Serial = 0
    kv_blocks_used: Serial = 0
    kv_blocks_cached: Serial = 0
    block_tokens: Serial = 0
    block_bytes: Serial = 0
    max_context_tokens: Serial = 0
    prefix_query_tokens: Serial = 0
    prefix_hit_tokens: Serial = 0
    preemptions: Serial = 0
    steps: Serial = 0
    prompt_tokens: Serial = 0
    generated_tokens: Serial = 0
    evictions: Serial = 0
    evicted_tokens: Serial = 0
    live: Annotated[dict[Label, tuple[Serial, Serial]], Meta(max_length=ITEMS_MAX)] = {}
    """Requests that began: tokens found in the prefix cache, tokens made."""
    lent: Lent = Lent()


Message = TypeVar("Message", Control, Status)


class Sheet(Generic[Message]):
    """One of the two files: made by its writer, opened by its reader."""

    def __init__(self, path: Path, kind: type[Message], *, create: bool) -> None:
        """Raises Unavailable if it is not there."""
        self._kind: type[Message] = kind
        try:
            if create:
                self._file = MappedFile.create(path, Slots.size_bytes(MESSAGE_BYTES_MAX), lambda file: None)
            else:
                self._file = MappedFile(path, writable=False)
        except (OSError, ValueError) as error:
            raise Unavailable(f"there is nothing at {path}: {error}") from error
        self._slots = Slots(self._file, 0, MESSAGE_BYTES_MAX)
        self._bell = Bell(self._file, 0)  # whose number is the newest message's

    @property
    def number(self) -> int:
        return self._slots.number

    def write(self, message: Message) -> int:
        number = self._slots.write(msgspec.msgpack.encode(message))
        self._bell.ring()
        return number

    def wait(self, number: int, timeout_s: float) -> None:
        """Until there is another message than this one, or for so long."""
        self._bell.wait(number, timeout_s)

    def read(self) -> tuple[int, Message | None]:
        """(0, None) before anything was written. Raises Torn, and Unavailable for a message of another kind."""
        number, text = self._slots.read()
        try:
            return number, msgspec.msgpack.decode(text, type=self._kind) if number else None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Unavailable(f"{self._file.path} holds no {self._kind.__name__}: {error}") from error

    def close(self) -> None:
        self._file.close()


def control_sheet(folder: Path, *, create: bool = False) -> Sheet[Control]:
    return Sheet(folder / "control", Control, create=create)


def status_sheet(folder: Path, *, create: bool = False) -> Sheet[Status]:
    return Sheet(folder / "status", Status, create=create)
