"""The control and status segments of a rollout engine: two mapped files of one folder, shared with its agent.

The agent writes `control` and reads `status`; the engine does the opposite. There is no request and reply: the agent
writes the whole desired state under a number, and the engine's status has the number that it applies. The desired state
includes a grant that expires, so no step runs after the agent's death.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from rose.bounds import ITEMS_MAX, Count, Label, NonNegative, Seconds, Serial, Share, Text
from rose.core.admission import Mode
from rose.core.slo import Budgets, Tpot
from rose.errors import Unavailable
from rose.vllm.futex_event import FutexEvent
from rose.vllm.seqlock_file import MappedFile, Slots

MESSAGE_BYTES_MAX = 65536
TIMES = 9  # a number of requests, and eight times
KINDS_MAX = 64  # kinds of breaches; there are four
ENGINE_FOLDER_VARIABLE = "ROSE_ROLLOUT_DESK"  # the folder, in the environment of the rollout engine


class Terms(msgspec.Struct, frozen=True):
    """The terms of lending beside a serving engine, whose status segment is at `segment`."""

    segment: Text = msgspec.field(name="board")
    mode: Mode = "idle"
    ttft_s: Seconds = 0.5
    tpot_s: Seconds = 0.15
    slack_share: Share = 0.7
    answer_s: Seconds = 60.0
    tpot: Tpot = "mean"

    @property
    def budgets(self) -> Budgets:
        return Budgets(self.ttft_s, self.tpot_s, self.slack_share, self.answer_s, self.tpot)


class EngineControl(msgspec.Struct, frozen=True):
    """The desired state. Without `terms` there is no serving engine, and only the grant counts."""

    tokens: Count = 0
    sequences: Count = 0
    until_s: NonNegative = 0.0
    kv_bytes: Serial | None = None  # the most KV memory; None is all of the engine's
    terms: Terms | None = None
    stopped: Text = ""  # why nothing may run, by the operator
    compute_share: Share = 1.0
    dry_run: bool = False
    resumes: Serial = 0  # grows when the operator resumes lending, whatever stopped it


State = Literal["parked", "running", "idle"]


class LendingAccount(msgspec.Struct, frozen=True):
    """The account of lending so far."""

    steps: Serial = 0
    tokens: Serial = 0
    seconds: Seconds = 0.0
    breaches: Annotated[dict[Label, Serial], Meta(max_length=KINDS_MAX)] = {}
    serving: Annotated[tuple[Seconds, ...], Meta(max_length=TIMES)] = ()  # as in `ServingTimes`
    breaker_trips: Serial = 0
    requests: Serial = 0  # of serving, that have ended
    attained: Serial = 0  # of those, within both budgets
    missing: Text = ""  # what must be observed before anything is lent
    closed_s: Annotated[dict[Text, Seconds], Meta(max_length=ITEMS_MAX)] = {}  # that rollouts waited, by the reason
    resting: Text = ""  # why the circuit breaker has stopped lending for a while
    dry_run_tokens: Serial = 0
    dry_run_lent_s: Seconds = 0.0
    dry_run_s: Seconds = 0.0


class Status(msgspec.Struct, frozen=True):
    """The state of the rollout engine. `done` is the number of the newest control that it applies."""

    process_id: Serial
    done: Serial = 0
    at_s: Seconds = 0.0
    state: State = "idle"
    gate_open: bool = False
    until_s: NonNegative = 0.0  # when the grant expires
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
    pages: Serial = 0  # of the shared pool, that this engine holds
    pages_max: Serial = 0  # the most that it may hold now
    headroom_pages: Serial = 0  # that stay free for serving
    memory_state: Label = "apart"  # of `core.memory.State`, on a shared pool
    moved_blocks: Serial = 0  # copied together when the budget was cut
    live: Annotated[dict[Label, tuple[Serial, Serial]], Meta(max_length=ITEMS_MAX)] = {}
    """Requests that began: tokens found in the prefix cache, tokens produced."""
    lent: LendingAccount = LendingAccount()


Message = TypeVar("Message", EngineControl, Status)


class Segment(Generic[Message]):
    """One of the two files: its writer creates it, its reader opens it."""

    def __init__(self, path: Path, kind: type[Message], *, create: bool) -> None:
        """Open or create the file. Raises Unavailable if it is not there."""
        self._kind: type[Message] = kind
        try:
            if create:
                self._file = MappedFile.create(path, Slots.size_bytes(MESSAGE_BYTES_MAX))
            else:
                self._file = MappedFile(path, writable=False)
        except (OSError, ValueError) as error:
            raise Unavailable(f"there is nothing at {path}: {error}") from error
        self._slots = Slots(self._file, 0, MESSAGE_BYTES_MAX)
        self._event = FutexEvent(self._file, 0)  # on the number of the newest message

    @property
    def number(self) -> int:
        return self._slots.number

    def write(self, message: Message) -> int:
        """Write a message, wake its readers and return its number."""
        number = self._slots.write(msgspec.msgpack.encode(message))
        self._event.notify()
        return number

    def wait(self, number: int, timeout_s: float) -> None:
        """Wait until there is a message other than this one, or for so long."""
        self._event.wait(number, timeout_s)

    def read(self) -> tuple[int, Message | None]:
        """Return the newest message and its number; (0, None) before the first. Raises Torn, or Unavailable."""
        number, text = self._slots.read()
        try:
            return number, msgspec.msgpack.decode(text, type=self._kind) if number else None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Unavailable(f"{self._file.path} holds no {self._kind.__name__}: {error}") from error


def open_control(folder: Path, *, create: bool = False) -> Segment[EngineControl]:
    """Open the control segment, or create it as its writer, the agent."""
    return Segment(folder / "control", EngineControl, create=create)


def open_status(folder: Path, *, create: bool = False) -> Segment[Status]:
    """Open the status segment, or create it as its writer, the engine."""
    return Segment(folder / "status", Status, create=create)
