"""The desk of a rollout engine: what its agent wants of it, and how it is, in two mapped files of one folder.

The agent writes `control`, the engine `status`; each reads the other's. Nothing is asked and answered: the agent
writes what it wants whole, under a number, and the engine shows the number it has done. What the agent wants includes
a grant that expires, so an agent that is gone is a closed gate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Generic, Literal, TypeVar

import msgspec

from rose.core.admission import Mode
from rose.engines.vllm.bell import Bell
from rose.engines.vllm.mapped import MappedFile, Slots
from rose.errors import Unavailable

MESSAGE_BYTES_MAX = 65536
DESK_VARIABLE = "ROSE_ROLLOUT_DESK"  # the folder, in the environment of the rollout engine


class Terms(msgspec.Struct, frozen=True):
    """What lending is decided by, beside a serving engine."""

    board: str
    mode: Mode = "idle"
    ttft_s: float = 0.5
    tpot_s: float = 0.15
    slack_share: float = 0.7
    answer_s: float = 60.0


class Control(msgspec.Struct, frozen=True):
    """What the agent wants. Without `terms` nobody is served beside, and the grant is all there is to obey."""

    tokens: int = 0
    sequences: int = 0
    until_s: float = 0.0
    kv_bytes: int | None = None  # the most KV memory; None is all of the engine's
    terms: Terms | None = None
    stopped: str = ""  # why nothing may run, by the owner
    compute_share: float = 1.0
    dry_run: bool = False
    resumes: int = 0  # grows when the owner says to lend again, whatever stopped it


State = Literal["parked", "running", "idle"]


class Lent(msgspec.Struct, frozen=True):
    """The account of lending so far."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    breaches: dict[str, int] = {}
    doubtful: int = 0
    breaker_trips: int = 0
    requests: int = 0  # of serving, that ended
    attained: int = 0  # of those, within both budgets
    missing: str = ""  # what must be seen before anything is lent
    closed_s: dict[str, float] = {}  # for how long rollouts waited at the gate, by the reason
    resting: str = ""  # why the circuit breaker has stopped lending for a while
    dry_run_tokens: int = 0
    dry_run_lent_s: float = 0.0
    dry_run_s: float = 0.0


class Status(msgspec.Struct, frozen=True):
    """How the engine is. `done` is the number of the newest control that it obeys."""

    process_id: int
    done: int = 0
    at_s: float = 0.0
    state: State = "idle"
    gate_open: bool = False
    until_s: float = 0.0  # when it closes by itself
    why: str = ""
    version: str = ""
    running: int = 0
    waiting: int = 0
    kv_blocks_limit: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    block_tokens: int = 0
    block_bytes: int = 0
    max_context_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    evictions: int = 0
    evicted_tokens: int = 0
    live: dict[str, tuple[int, int]] = {}  # requests that began: tokens found in the prefix cache, tokens made
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
        """(0, None) before anything was written. Raises Torn."""
        number, text = self._slots.read()
        return number, msgspec.msgpack.decode(text, type=self._kind) if number else None

    def close(self) -> None:
        self._file.close()


def control_sheet(folder: Path, *, create: bool = False) -> Sheet[Control]:
    return Sheet(folder / "control", Control, create=create)


def status_sheet(folder: Path, *, create: bool = False) -> Sheet[Status]:
    return Sheet(folder / "status", Status, create=create)
