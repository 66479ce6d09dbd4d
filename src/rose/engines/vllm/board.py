"""The board: what a serving engine shows of itself, so that rollouts beside it can be decided on.

It is `ServingView` in a mapped file, and two rings beside it: every finished step with its shape and times, from which
step times are learnt, and every milestone of a request (came, first token, ended, gone), from which prompts are known
at once, deadlines are judged and a view is completed: a request that came after the newest view waits, whatever that
view says. Times are CLOCK_MONOTONIC, which all processes of a machine share.

Whoever decodes in step with all others has a row that need not be written again: its newest token is the last step's,
and its context is a constant plus the number of steps that were made together. So the record of a step names the view
that it goes on from, and after a step in which nobody came or went that record is all that is written. The view is
written first: a record never names one that is not there. The reader puts both together.

A board belongs to one boot of one process. Its reader holds the process by a descriptor, so that a dead boot is known
for dead at once and a reused process id is not taken for it. An idle engine writes nothing, so silence proves nothing;
but an engine that has work and is silent is *stale*. A writer that met an error says so and never writes again.

Who waits for a chance need not look all the time: a bell is rung at whatever is shown, once for a step and the view
before it, and another one when there is nothing left to do. The last page is the readers' only one: there they say that
they listen, and nobody is rung for who does not.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import select
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rose.bounds import Count, Label, Serial, Text
from rose.core.facts import RunningRequest, ServingView, StepFeatures, WaitingRequest
from rose.core.passive import FinishedStep, Milestone, MilestoneKind
from rose.engines.vllm.bell import Bell
from rose.engines.vllm.mapped import WORD, MappedFile, MappedPage, Ring, Slots, Torn
from rose.errors import Unavailable

LAYOUT = 5
HEAD_BYTES = 4096
OFF_WORD, OFF_BYTES = 256, 1024  # where in the head the writer says that it has stopped, and why
IDLE_WORD, NEWS_WORD = 448, 449  # how often serving ran out of work, and showed anything
IDLE_HEARD, NEWS_HEARD = 0, 1  # places on the readers' page: until when somebody waits for that
WAITING_SHOWN = 64  # admission closes long before this many wait
RUNNING_SHOWN = 1024
STEPS_KEPT, STEP_VALUES = 512, 10
MILESTONES_KEPT, MILESTONE_VALUES = 2048, 4
FIXED_VALUES = 13  # of a view, before its requests
IN_STEP = 0.0  # in place of a row's last token: that of the last step
STALE_S = 5.0  # no step takes that long where anybody has a latency objective

Told = tuple[float, float, float, float, float, float]  # a finished step: began, ended, and its four features
NO_STEP: Told = (0.0, 0.0, 0, 0, 0, 0)

_FIXED = struct.Struct(f"={FIXED_VALUES}d")
_VIEW_BYTES = WORD * (FIXED_VALUES + 2 * WAITING_SHOWN + 3 * RUNNING_SHOWN)
_VIEW_AT = HEAD_BYTES
_STEPS_AT = _VIEW_AT + Slots.size_bytes(_VIEW_BYTES) + WORD
BUSY_WORD = _STEPS_AT // WORD - 1  # since when the step runs that has not ended; 0 if none does
_MILESTONES_AT = _STEPS_AT + Ring.size_bytes(STEPS_KEPT, STEP_VALUES)
_END = _MILESTONES_AT + Ring.size_bytes(MILESTONES_KEPT, MILESTONE_VALUES)
_HEARD_AT = -(-_END // mmap.PAGESIZE) * mmap.PAGESIZE
BOARD_BYTES = _HEARD_AT + mmap.PAGESIZE


class About(msgspec.Struct, frozen=True):
    """Who writes a board, and the sizes of its engine."""

    process_id: Count
    started: Serial  # of the process, in the kernel's ticks: tells it from another of the same id
    boot: Label
    engine: Label  # "vllm 0.32.0"
    model: Text
    step_tokens: Count
    sequences: Count
    kv_blocks: Count
    block_bytes: Serial
    layout: Count = LAYOUT


def about_me(engine: str, model: str, *, step_tokens: int, sequences: int, kv_blocks: int, block_bytes: int) -> About:
    process_id = os.getpid()
    started = started_ticks(process_id)
    assert started is not None
    sizes = (step_tokens, sequences, kv_blocks, block_bytes)
    return About(process_id, started, secrets.token_hex(8), engine, model, *sizes)


def started_ticks(process_id: int) -> int | None:
    """When a process started, as the kernel tells it; None if there is none of this id."""
    with suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{process_id}/stat").read_text()
        return int(text.rpartition(")")[2].split()[19])
    return None


class BoardWriter:
    """By the serving engine's own thread. Every call takes microseconds and waits for nothing."""

    def __init__(self, path: Path, about: About) -> None:
        self.about = about
        self._file = MappedFile.create(path, BOARD_BYTES, lambda file: _fill(file, about))
        self._views = Slots(self._file, _VIEW_AT, _VIEW_BYTES)
        self._steps = Ring(self._file, _STEPS_AT, STEPS_KEPT, STEP_VALUES)
        self._milestones = Ring(self._file, _MILESTONES_AT, MILESTONES_KEPT, MILESTONE_VALUES)
        heard, first = self._file.floats, _HEARD_AT // WORD
        self._news = Bell(self._file, NEWS_WORD, heard, first + NEWS_HEARD)
        self._idle = Bell(self._file, IDLE_WORD, heard, first + IDLE_HEARD)
        self._number = self._view_slot = 0

    def busy_since(self, began_s: float) -> None:
        """0 when no step runs."""
        self._file.floats[BUSY_WORD] = began_s

    def step(
        self, step: Told, kv_used_blocks: int = 0, together: int = 0, busy_since_s: float = 0.0, is_view: bool = False
    ) -> None:
        """After the view that it belongs to; if `is_view`, nothing else has changed since the last one."""
        self._number += is_view
        self._steps.append(*step, self._view_slot, self._number, kv_used_blocks, together)
        self._file.floats[BUSY_WORD] = busy_since_s
        self._tell(step[1])

    def milestone(self, kind: MilestoneKind, key: int, at_s: float, tokens: int = 0) -> None:
        self._milestones.append(kind, key, at_s, tokens)

    def view(
        self,
        now_s: float,
        waiting: Sequence[float],
        running: Sequence[float],
        kv_used_blocks: int,
        last: Told = NO_STEP,
        together: int = 0,
        is_step_next: bool = False,
    ) -> None:
        """`waiting`: arrival and tokens left of each; `running`: last token, context less `together`, and arrival.

        An array of floats is taken as it is; of anything else one is made first. With `is_step_next` ringing is left
        to the step that it belongs to.
        """
        self._number += 1
        waiting = waiting if len(waiting) <= 2 * WAITING_SHOWN else waiting[: 2 * WAITING_SHOWN]
        running = running if len(running) <= 3 * RUNNING_SHOWN else running[: 3 * RUNNING_SHOWN]
        sizes = (len(waiting), len(running), self._number, together)
        fixed = _FIXED.pack(now_s, self._milestones.number, kv_used_blocks, *sizes, *last)
        parts = [part if isinstance(part, array) else array("d", part) for part in (waiting, running)]
        self._view_slot = self._views.write(b"".join((fixed, *parts)))
        if not waiting and not running:
            self._file.words[IDLE_WORD] += 1
            self._idle.ring(now_s)
        if not is_step_next:
            self._tell(now_s)

    def _tell(self, now_s: float) -> None:
        self._file.words[NEWS_WORD] += 1
        self._news.ring(now_s)

    def turn_off(self, why: str) -> None:
        """Nothing will be written any more, and readers know why."""
        text = why.encode()[: OFF_BYTES - WORD]
        begin = OFF_WORD * WORD + WORD
        self._file.bytes[begin : begin + len(text)] = text
        self._file.words[OFF_WORD] = max(1, len(text))

    def close(self) -> None:
        with suppress(OSError):
            self._file.path.unlink()
        self._file.close()


def _fill(file: MappedFile, about: About) -> None:
    text = msgspec.json.encode(about)
    assert len(text) < OFF_WORD * WORD - WORD
    file.words[0] = len(text)
    file.bytes[WORD : WORD + len(text)] = text


@dataclass(frozen=True, slots=True)
class Seen:
    """What is new since the last look. `view` counts as waiting who came after it was written."""

    view: ServingView
    written_s: float
    steps: tuple[FinishedStep, ...]
    milestones: tuple[Milestone, ...]
    lost: int  # records that were overwritten before they were read


class BoardReader:
    """One boot of a serving engine, looked at from another process."""

    def __init__(self, path: Path) -> None:
        """Raises Unavailable if there is no board that can be read, or its process is gone."""
        try:
            self._file = MappedFile(path, writable=False)
        except (OSError, ValueError) as error:
            raise Unavailable(f"there is no board at {path}: {error}") from error
        self.path = path
        self.about = _about(self._file)
        try:
            self._heard = MappedPage(path, _HEARD_AT)
        except OSError as error:
            raise Unavailable(f"the board at {path} cannot be listened to: {error}") from error
        self._process = _hold(self.about)
        self._views = Slots(self._file, _VIEW_AT, _VIEW_BYTES)
        self._steps = Ring(self._file, _STEPS_AT, STEPS_KEPT, STEP_VALUES)
        self._milestones = Ring(self._file, _MILESTONES_AT, MILESTONES_KEPT, MILESTONE_VALUES)
        heard = self._heard.floats
        self.news = Bell(self._file, NEWS_WORD, heard, NEWS_HEARD)
        self.idle = Bell(self._file, IDLE_WORD, heard, IDLE_HEARD)
        self._steps_seen = self._milestones_seen = 0
        self._arrivals: deque[tuple[int, WaitingRequest]] = deque(maxlen=WAITING_SHOWN)

    @property
    def is_alive(self) -> bool:
        ready, _, _ = select.select([self._process], [], [], 0)
        return not ready

    @property
    def off(self) -> str:
        """Why its writer has stopped, if it said so."""
        length = min(self._file.words[OFF_WORD], OFF_BYTES - WORD)
        begin = OFF_WORD * WORD + WORD
        return self._file.bytes[begin : begin + length].decode(errors="replace") if length else ""

    @property
    def busy_since_s(self) -> float:
        """When the step began that has not ended yet; infinite if none runs."""
        return self._file.floats[BUSY_WORD] or math.inf

    def why_dark(self, seen: Seen | None, now_s: float) -> str:
        """Why what the board shows cannot be relied on, or an empty text."""
        if not self.is_alive:
            return "the serving engine is gone"
        if off := self.off:
            return f"the serving engine shows nothing any more: {off}"
        if seen is None:
            return "the serving engine has shown nothing yet"
        if not seen.view.is_idle and now_s - seen.written_s > STALE_S:
            return f"the serving engine has work and is silent: for {now_s - seen.written_s:.0f} s"
        return ""

    def look(self) -> Seen | None:
        """None before the first view. Raises Torn, rarely: look again later."""
        newest = self._steps.newest()
        slot, message = self._views.read()
        if newest is not None and newest[6] > slot:
            raise Torn
        milestones, lost_milestones = self._new_milestones()
        steps, lost_steps = self._steps.since(self._steps_seen)
        self._steps_seen += len(steps) + lost_steps
        if slot == 0:
            return None
        values = array("d", message)
        if newest is not None and newest[6] == slot:
            _go_on(values, newest)
        while self._arrivals and self._arrivals[0][0] <= values[1]:
            self._arrivals.popleft()
        return Seen(
            _view(self.about, values, [request for _, request in self._arrivals]),
            values[0],
            tuple(_step(record) for _, record in steps),
            tuple(Milestone(MilestoneKind(int(kind)), int(key), at, int(n)) for _, (kind, key, at, n) in milestones),
            lost_milestones + lost_steps,
        )

    def skip(self) -> None:
        """What has been shown so far is not told; who waits is known all the same."""
        self._new_milestones()
        self._steps_seen = self._steps.number

    def _new_milestones(self) -> tuple[list[tuple[int, tuple[float, ...]]], int]:
        milestones, lost = self._milestones.since(self._milestones_seen)
        self._milestones_seen += len(milestones) + lost
        for record, (kind, _, at_s, tokens) in milestones:
            if kind == MilestoneKind.CAME:
                self._arrivals.append((record, WaitingRequest(at_s, int(tokens))))
        return milestones, lost

    def close(self) -> None:
        os.close(self._process)
        self._heard.close()
        self._file.close()


def _about(file: MappedFile) -> About:
    length = file.words[0]
    try:
        about = msgspec.json.decode(file.bytes[WORD : WORD + min(length, OFF_WORD * WORD)], type=About)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unavailable(f"{file.path} is not a board: {error}") from error
    if about.layout != LAYOUT or len(file.bytes) != BOARD_BYTES:
        raise Unavailable(
            f"the board of process {about.process_id} has layout {about.layout}, this ROSE reads {LAYOUT}",
            hint="install the same version of rose-rl on both sides and restart the older one",
        )
    return about


def _hold(about: About) -> int:
    """A descriptor that becomes readable when the process ends."""
    gone = Unavailable(f"the serving engine that wrote this board (process {about.process_id}) is gone")
    try:
        process = os.pidfd_open(about.process_id)
    except OSError as error:
        raise gone from error
    if started_ticks(about.process_id) != about.started:
        os.close(process)
        raise gone
    return process


def _go_on(values: array[float], record: Sequence[float]) -> None:
    """A view as it is after a step that changed nobody."""
    *step, _, number, used, together = record
    values[0], values[2], values[5], values[6] = step[1], used, number, together
    values[7:FIXED_VALUES] = array("d", step)


def _view(about: About, values: Sequence[float], arrivals: list[WaitingRequest]) -> ServingView:
    middle = FIXED_VALUES + int(values[3])
    end, together, in_step_s = middle + int(values[4]), values[6], values[8]
    waiting = [WaitingRequest(values[i], int(values[i + 1])) for i in range(FIXED_VALUES, middle, 2)]
    waiting.sort(key=lambda one: one.arrival_s)
    running = [
        RunningRequest(values[i] or in_step_s, int(values[i + 1] + together), values[i + 2])
        for i in range(middle, end, 3)
    ]
    shape = StepFeatures(*map(int, values[9:FIXED_VALUES]))
    used, total = int(values[2]) * about.block_bytes, about.kv_blocks * about.block_bytes
    seconds = in_step_s - values[7]
    return ServingView(int(values[5]), (*waiting, *arrivals), tuple(running), used, total, shape, seconds)


def _step(record: tuple[float, ...]) -> FinishedStep:
    return FinishedStep(record[0], record[1], StepFeatures(*map(int, record[2:6])))


__all__ = ["About", "BoardReader", "BoardWriter", "Seen", "Torn", "about_me", "started_ticks"]
