"""The status segment: what a serving engine publishes of itself, so that lending beside it can be decided.

A mapped file has the newest `ServingView` and two rings: finished steps with their shapes and times, which teach step
times, and milestones of requests (arrival, first token, end, cancellation). A request that arrived after the newest
view waits, whatever that view says. Times are CLOCK_MONOTONIC, which all processes of a machine share.

After a step in which no request arrived or ended, only its record is written. It names the view that it continues:
every decoding request has one token more, and the reader joins the two. A segment belongs to one boot of one process,
which the reader holds by a descriptor, so a dead one is recognised at once. An idle engine writes nothing; one that has
work and is silent is stale. Readers need not poll: one futex event fires at whatever is published, another when serving
has run out of work.

On a page pool (`kv_allocation`) the segment also has the pages that serving holds, uses and asks for. A third event
fires when it asks for more. On the page for waiters rollouts write how many pages they would use if serving gave them
back, and until when that is true.
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
from rose.core.observed_engine import FinishedStep, Milestone, MilestoneKind
from rose.errors import Unavailable
from rose.vllm.futex_event import FutexEvent
from rose.vllm.seqlock_file import WORD, MappedFile, Ring, Slots, Torn

LAYOUT = 8
HEAD_BYTES = 4096
STOP_WORD, STOP_BYTES = 256, 1024  # where in the head the writer says that it has stopped, and why
IDLE_WORD, NEWS_WORD = 448, 449  # how often serving ran out of work, and published anything
SHORT_WORD = 450  # how often it asked for pages
PAGES_WORD = 451  # pages of the pool: held, used, asked for
IDLE_PLACE, NEWS_PLACE, SHORT_PLACE = 0, 1, 2  # on the readers' page: the deadlines of waiters for each
WANTED_PLACE, WANTED_WORD, WANTED_WAITER = 3, 5, 6  # there too: pages wanted and until when; how often; who waits
WAITING_SHOWN = 64  # admission closes long before this many wait
RUNNING_SHOWN, RUNNING_VALUES = 1024, 5
STEPS_KEPT, STEP_VALUES = 512, 10
MILESTONES_KEPT, MILESTONE_VALUES = 2048, 4
FIXED_VALUES = 13  # of a view, before its requests
IN_STEP = 0.0  # in place of the time of a row's last token: the end of the last step
PAGES_MAX = 1 << 31  # of a pool; a greater number on the page for waiters is not one
STALE_S = 5.0  # no step takes that long where there is a latency objective

StepValues = tuple[float, float, float, float, float, float]  # a finished step: began, ended, and its four features
NO_STEP: StepValues = (0.0, 0.0, 0, 0, 0, 0)

_FIXED = struct.Struct(f"={FIXED_VALUES}d")
_VIEW_BYTES = WORD * (FIXED_VALUES + 2 * WAITING_SHOWN + RUNNING_VALUES * RUNNING_SHOWN)
_VIEW_AT = HEAD_BYTES
_STEPS_AT = _VIEW_AT + Slots.size_bytes(_VIEW_BYTES) + WORD
BUSY_WORD = _STEPS_AT // WORD - 1  # since when the step runs that has not ended; 0 if none does
_MILESTONES_AT = _STEPS_AT + Ring.size_bytes(STEPS_KEPT, STEP_VALUES)
_END = _MILESTONES_AT + Ring.size_bytes(MILESTONES_KEPT, MILESTONE_VALUES)
_DEADLINES_AT = -(-_END // mmap.PAGESIZE) * mmap.PAGESIZE
SEGMENT_BYTES = _DEADLINES_AT + mmap.PAGESIZE


class SegmentHeader(msgspec.Struct, frozen=True):
    """The process that writes a status segment, and the sizes of its engine."""

    process_id: Count
    started: Serial  # of the process, in the kernel's ticks: distinguishes it from another of the same id
    boot: Label
    engine: Label  # "vllm 0.32.0"
    model: Text
    step_tokens: Count
    sequences: Count
    kv_blocks: Count
    block_bytes: Serial
    block_tokens: Count = 16
    pool: Text = ""  # the folder of its KV pool, if it is on one
    pool_pages: Count = 0
    page_bytes: Serial = 0
    group_pages: Count = 0
    group_blocks: Count = 0
    pool_ranks: Count = 0  # every rank has a pool of this size
    replica: Count = 0  # of the engines behind one port (data parallelism)
    is_lockstep: bool = False  # a step of this replica waits for those of the others
    layout: Count = LAYOUT


def own_header(
    engine: str,
    model: str,
    *,
    step_tokens: int,
    sequences: int,
    kv_blocks: int,
    block_bytes: int,
    block_tokens: int,
    pool: tuple[str, int, int, int, int, int] = ("", 0, 0, 0, 0, 0),
    replica: tuple[int, bool] = (0, False),
) -> SegmentHeader:
    """Return the header of this process's segment.

    `pool` has the fields about its KV pool in order, `replica` those about data parallelism.
    """
    process_id = os.getpid()
    started = started_ticks(process_id)
    assert started is not None
    sizes = (step_tokens, sequences, kv_blocks, block_bytes, block_tokens)
    return SegmentHeader(process_id, started, secrets.token_hex(8), engine, model, *(*sizes, *pool, *replica))


def started_ticks(process_id: int) -> int | None:
    """Return the kernel's start time of a process; None if there is none with this id."""
    with suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{process_id}/stat").read_text()
        return int(text.rpartition(")")[2].split()[19])
    return None


class SegmentWriter:
    """The writer in the serving engine's own thread. Every call takes microseconds and never blocks."""

    def __init__(self, path: Path, header: SegmentHeader) -> None:
        text = msgspec.json.encode(header)
        assert len(text) < STOP_WORD * WORD - WORD
        self.header = header
        self._file = MappedFile.create(path, SEGMENT_BYTES, struct.pack("=Q", len(text)) + text)
        self._views = Slots(self._file, _VIEW_AT, _VIEW_BYTES)
        self._steps = Ring(self._file, _STEPS_AT, STEPS_KEPT, STEP_VALUES)
        self._milestones = Ring(self._file, _MILESTONES_AT, MILESTONES_KEPT, MILESTONE_VALUES)
        deadlines, first = self._file.floats, _DEADLINES_AT // WORD
        self._news = FutexEvent(self._file, NEWS_WORD, deadlines, first + NEWS_PLACE)
        self._idle = FutexEvent(self._file, IDLE_WORD, deadlines, first + IDLE_PLACE)
        self._short = FutexEvent(self._file, SHORT_WORD, deadlines, first + SHORT_PLACE)
        self._page = first
        self.wanted = FutexEvent(self._file, first + WANTED_WORD, deadlines, first + WANTED_WAITER)
        self._number = self._view_slot = 0

    def busy_since(self, began_s: float) -> None:
        """Publish when the running step began; 0 when no step runs."""
        self._file.floats[BUSY_WORD] = began_s

    def step(
        self,
        step: StepValues,
        kv_used_blocks: int = 0,
        together: int = 0,
        busy_since_s: float = 0.0,
        is_view: bool = False,
    ) -> None:
        """Publish a step after the view that it belongs to; if `is_view`, nothing else has changed."""
        self._number += is_view
        self._steps.append(*step, self._view_slot, self._number, kv_used_blocks, together)
        self._file.floats[BUSY_WORD] = busy_since_s
        self._notify(step[1])

    def milestone(self, kind: MilestoneKind, key: int, at_s: float, tokens: int = 0) -> None:
        """Publish an event of a request."""
        self._milestones.append(kind, key, at_s, tokens)

    def view(
        self,
        now_s: float,
        waiting: Sequence[float],
        running: Sequence[float],
        kv_used_blocks: int,
        last: StepValues = NO_STEP,
        together: int = 0,
        is_step_next: bool = False,
    ) -> None:
        """Publish the requests. With `is_step_next` waking readers is left to the step that the view belongs to.

        `waiting`: arrival and tokens left of each. `running`: last token, context less `together`, arrival, first
        token, tokens of the answer less `together`, where `together` counts the steps that all of them made. An array
        of floats is taken as it is; of anything else one is made first.
        """
        self._number += 1
        waiting = waiting if len(waiting) <= 2 * WAITING_SHOWN else waiting[: 2 * WAITING_SHOWN]
        most = RUNNING_VALUES * RUNNING_SHOWN
        running = running if len(running) <= most else running[:most]
        sizes = (len(waiting), len(running), self._number, together)
        fixed = _FIXED.pack(now_s, self._milestones.number, kv_used_blocks, *sizes, *last)
        parts = [part if isinstance(part, array) else array("d", part) for part in (waiting, running)]
        self._view_slot = self._views.write(b"".join((fixed, *parts)))
        if not waiting and not running:
            self._file.words[IDLE_WORD] += 1
            self._idle.notify(now_s)
        if not is_step_next:
            self._notify(now_s)

    def _notify(self, now_s: float) -> None:
        self._file.words[NEWS_WORD] += 1
        self._news.notify(now_s)

    def pages(self, held: int, used: int, asked: int) -> None:
        """Publish the pages of the pool that serving holds, uses and asks for."""
        words = self._file.words
        is_short = asked > words[PAGES_WORD + 2]
        words[PAGES_WORD], words[PAGES_WORD + 1], words[PAGES_WORD + 2] = held, used, asked
        if is_short:
            words[SHORT_WORD] += 1
            self._short.notify()

    def wanted_pages(self, now_s: float) -> int:
        """Return how many pages rollouts would use if serving gave them back."""
        wanted, until_s = self._file.floats[self._page + WANTED_PLACE], self._file.floats[self._page + WANTED_PLACE + 1]
        return int(wanted) if 0 < wanted <= PAGES_MAX and now_s < until_s else 0

    def publish_stop(self, reason: str) -> None:
        """Publish that nothing more will be published, and why."""
        text = reason.encode()[: STOP_BYTES - WORD]
        begin = STOP_WORD * WORD + WORD
        self._file.bytes[begin : begin + len(text)] = text
        self._file.words[STOP_WORD] = max(1, len(text))

    def close(self) -> None:
        with suppress(OSError):
            self._file.path.unlink()
        self._file.close()


@dataclass(frozen=True, slots=True)
class StatusChange:
    """The changes since the last read. `view` counts requests that arrived after it was written as waiting."""

    view: ServingView
    written_s: float
    steps: tuple[FinishedStep, ...]
    milestones: tuple[Milestone, ...]
    lost: int  # records that were overwritten before they were read


class SegmentReader:
    """The reader of one boot of a serving engine, in another process."""

    def __init__(self, path: Path) -> None:
        """Open a segment. Raises Unavailable if it cannot be read, or its process is gone."""
        try:
            self._file = MappedFile(path, writable=False)
        except (OSError, ValueError) as error:
            raise Unavailable(f"there is no status segment at {path}: {error}") from error
        self.path = path
        self.header = _header_of(self._file)
        try:
            self._page = MappedFile(path, writable=True, offset=_DEADLINES_AT, size_bytes=mmap.PAGESIZE)
        except OSError as error:
            raise Unavailable(f"the page for waiters of {path} cannot be opened: {error}") from error
        self._process = _open_process(self.header)
        self._views = Slots(self._file, _VIEW_AT, _VIEW_BYTES)
        self._steps = Ring(self._file, _STEPS_AT, STEPS_KEPT, STEP_VALUES)
        self._milestones = Ring(self._file, _MILESTONES_AT, MILESTONES_KEPT, MILESTONE_VALUES)
        self.news = FutexEvent(self._file, NEWS_WORD, self._page.floats, NEWS_PLACE)
        self.idle = FutexEvent(self._file, IDLE_WORD, self._page.floats, IDLE_PLACE)
        self.short = FutexEvent(self._file, SHORT_WORD, self._page.floats, SHORT_PLACE)
        self._wanted = FutexEvent(self._page, WANTED_WORD, self._page.floats, WANTED_WAITER)
        self._steps_seen = self._milestones_seen = 0
        self._arrivals: deque[tuple[int, WaitingRequest]] = deque(maxlen=WAITING_SHOWN)

    @property
    def is_alive(self) -> bool:
        ready, _, _ = select.select([self._process], [], [], 0)
        return not ready

    @property
    def stop_reason(self) -> str:
        """Return why its writer has stopped, or an empty text."""
        length = min(self._file.words[STOP_WORD], STOP_BYTES - WORD)
        begin = STOP_WORD * WORD + WORD
        return self._file.bytes[begin : begin + length].decode(errors="replace") if length else ""

    @property
    def busy_since_s(self) -> float:
        """Return when the running step began; infinite if none runs."""
        return self._file.floats[BUSY_WORD] or math.inf

    @property
    def pages(self) -> tuple[int, int, int]:
        """Return the pages of the pool that serving holds, uses and asks for."""
        words = self._file.words
        return words[PAGES_WORD], words[PAGES_WORD + 1], words[PAGES_WORD + 2]

    def want(self, pages: int, until_s: float, now_s: float) -> None:
        """Write how many pages rollouts would use if serving gave them back."""
        self._page.floats[WANTED_PLACE], self._page.floats[WANTED_PLACE + 1] = float(pages), until_s
        self._page.words[WANTED_WORD] += 1
        self._wanted.notify(now_s)

    def why_unreliable(self, seen: StatusChange | None, now_s: float) -> str:
        """Return why the segment cannot be relied on, or an empty text."""
        if not self.is_alive:
            return "the serving engine is gone"
        if reason := self.stop_reason:
            return f"the serving engine publishes nothing any more: {reason}"
        if seen is None:
            return "the serving engine has published nothing yet"
        if not seen.view.is_idle and now_s - seen.written_s > STALE_S:
            return f"the serving engine has work and is silent: for {now_s - seen.written_s:.0f} s"
        return ""

    def read(self) -> StatusChange | None:
        """Return what has changed; None before the first view. Raises Torn, rarely: read again later."""
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
        if newest is not None and newest[6] == slot:  # steps that changed no request: bring the view up to date
            *step, _, number, used, together = newest
            values[0], values[2], values[5], values[6] = step[1], used, number, together
            values[7:FIXED_VALUES] = array("d", step)
        while self._arrivals and self._arrivals[0][0] <= values[1]:
            self._arrivals.popleft()
        return StatusChange(
            _view(self.header, values, [request for _, request in self._arrivals]),
            values[0],
            tuple(FinishedStep(record[0], record[1], StepFeatures(*map(int, record[2:6]))) for _, record in steps),
            tuple(Milestone(MilestoneKind(int(kind)), int(key), at, int(n)) for _, (kind, key, at, n) in milestones),
            lost_milestones + lost_steps,
        )

    def skip(self) -> None:
        """Ignore what was published so far, except which requests wait."""
        self._new_milestones()
        self._steps_seen = self._steps.number

    def _new_milestones(self) -> tuple[list[tuple[int, tuple[float, ...]]], int]:
        milestones, lost = self._milestones.since(self._milestones_seen)
        self._milestones_seen += len(milestones) + lost
        for record, (kind, _, at_s, tokens) in milestones:
            if kind == MilestoneKind.ARRIVED:
                self._arrivals.append((record, WaitingRequest(at_s, int(tokens))))
        return milestones, lost

    def close(self) -> None:
        os.close(self._process)
        self._page.close()
        self._file.close()


def _header_of(file: MappedFile) -> SegmentHeader:
    length = file.words[0]
    try:
        header = msgspec.json.decode(file.bytes[WORD : WORD + min(length, STOP_WORD * WORD)], type=SegmentHeader)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unavailable(f"{file.path} is not a status segment: {error}") from error
    if header.layout != LAYOUT or len(file.bytes) != SEGMENT_BYTES:
        raise Unavailable(
            f"the status segment of process {header.process_id} has layout {header.layout}, this ROSE reads {LAYOUT}",
            hint="install the same version of rose-rl on both sides and restart the older one",
        )
    return header


def _open_process(header: SegmentHeader) -> int:
    """Return a descriptor that becomes readable when the process ends."""
    gone = Unavailable(f"the serving engine that wrote this status segment (process {header.process_id}) is gone")
    try:
        process = os.pidfd_open(header.process_id)
    except OSError as error:
        raise gone from error
    if started_ticks(header.process_id) != header.started:
        os.close(process)
        raise gone
    return process


def _view(header: SegmentHeader, values: Sequence[float], arrivals: list[WaitingRequest]) -> ServingView:
    middle = FIXED_VALUES + int(values[3])
    end, together, in_step_s = middle + int(values[4]), values[6], values[8]
    waiting = [WaitingRequest(values[i], int(values[i + 1])) for i in range(FIXED_VALUES, middle, 2)]
    waiting.sort(key=lambda one: one.arrival_s)
    running = [
        RunningRequest(
            values[i] or in_step_s,
            int(values[i + 1] + together),
            values[i + 2],
            values[i + 3],
            int(values[i + 4] + together),
        )
        for i in range(middle, end, RUNNING_VALUES)
    ]
    shape = StepFeatures(*map(int, values[9:FIXED_VALUES]))
    used, total = int(values[2]) * header.block_bytes, header.kv_blocks * header.block_bytes
    seconds = in_step_s - values[7]
    return ServingView(int(values[5]), (*waiting, *arrivals), tuple(running), used, total, shape, seconds)
