"""The board: what a serving engine shows of itself, so that rollouts beside it can be decided on.

It is `ServingView` in a mapped file, and two rings beside it: every finished step with its shape and times, from which
step times are learnt, and every milestone of a request (came, first token, ended, gone), from which prompts are known
at once, deadlines are judged and a view is completed: a request that came after the newest view waits, whatever that
view says. Times are CLOCK_MONOTONIC, which all processes of a machine share.

A board belongs to one boot of one process. Its reader holds the process by a descriptor, so that a dead boot is known
for dead at once and a reused process id is not taken for it. An idle engine writes nothing, so silence proves nothing;
but an engine that has work and is silent is *stale*. A writer that met an error says so and never writes again.
"""

from __future__ import annotations

import math
import os
import secrets
import select
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rose.core.facts import RunningRequest, ServingView, StepFeatures, WaitingRequest
from rose.core.passive import FinishedStep, Milestone, MilestoneKind
from rose.engines.vllm.mapped import WORD, MappedFile, Ring, Slots, Torn
from rose.errors import Unavailable

LAYOUT = 1
HEAD_BYTES = 4096
OFF_WORD, OFF_BYTES = 256, 1024  # where in the head the writer says that it has stopped, and why
BUSY_WORD = 255  # since when the step runs that has not ended; 0 if none does
WAITING_SHOWN = 64  # admission closes long before this many wait
RUNNING_SHOWN = 1024
STEPS_KEPT, STEP_VALUES = 512, 6
MILESTONES_KEPT, MILESTONE_VALUES = 2048, 4
FIXED_VALUES = 12  # of a view, before its requests
STALE_S = 5.0  # no step takes that long where anybody has a latency objective

_VIEW_BYTES = WORD * (FIXED_VALUES + 2 * WAITING_SHOWN + 3 * RUNNING_SHOWN)
_VIEW_AT = HEAD_BYTES
_STEPS_AT = _VIEW_AT + Slots.size_bytes(_VIEW_BYTES)
_MILESTONES_AT = _STEPS_AT + Ring.size_bytes(STEPS_KEPT, STEP_VALUES)
BOARD_BYTES = _MILESTONES_AT + Ring.size_bytes(MILESTONES_KEPT, MILESTONE_VALUES)


class About(msgspec.Struct, frozen=True):
    """Who writes a board, and the sizes of its engine."""

    process_id: int
    started: int  # of the process, in the kernel's ticks: tells it from another of the same id
    boot: str
    engine: str  # "vllm 0.32.0"
    model: str
    step_tokens: int
    sequences: int
    kv_blocks: int
    block_bytes: int
    layout: int = LAYOUT


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

    def busy_since(self, began_s: float) -> None:
        """0 when no step runs."""
        self._file.floats[BUSY_WORD] = began_s

    def step(self, began_s: float, ended_s: float, features: StepFeatures) -> None:
        shape = (features.new_tokens, features.kv_read_tokens, features.new_by_context, features.sequences)
        self._steps.append((began_s, ended_s, *shape))

    def milestone(self, kind: MilestoneKind, key: int, at_s: float, tokens: int = 0) -> None:
        self._milestones.append((kind, key, at_s, tokens))

    def view(
        self, now_s: float, waiting: Sequence[float], running: Sequence[float], kv_used_blocks: int, last: FinishedStep
    ) -> None:
        """`waiting`: arrival and tokens left of each; `running`: last token, context and arrival of each.

        An array of floats is taken as it is; of anything else one is made first.
        """
        shape, used = last.features, kv_used_blocks * self.about.block_bytes
        total = self.about.kv_blocks * self.about.block_bytes
        waiting, running = waiting[: 2 * WAITING_SHOWN], running[: 3 * RUNNING_SHOWN]
        values = array("d", (now_s, self._milestones.number, used, total, len(waiting), len(running)))
        values.extend((shape.new_tokens, shape.kv_read_tokens, shape.new_by_context, shape.sequences))
        values.extend((last.began_s, last.ended_s))
        for part in (waiting, running):
            values.extend(part if isinstance(part, array) else array("d", part))
        self._views.write(memoryview(values).cast("B"))

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
    assert len(text) < BUSY_WORD * WORD - WORD
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
        self._process = _hold(self.about)
        self._views = Slots(self._file, _VIEW_AT, _VIEW_BYTES)
        self._steps = Ring(self._file, _STEPS_AT, STEPS_KEPT, STEP_VALUES)
        self._milestones = Ring(self._file, _MILESTONES_AT, MILESTONES_KEPT, MILESTONE_VALUES)
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

    @property
    def has_news(self) -> bool:
        """Whether `look` would find a record that it has not told yet; the cheapest of all questions."""
        return self._milestones.number != self._milestones_seen or self._steps.number != self._steps_seen

    def glance(self) -> bool:
        """Whether serving seems to have no work: cheap, and now and then wrong, so for hints only."""
        values = self._views.peek(FIXED_VALUES)
        return values[4] == values[5] == 0 and values[1] == self._milestones.number

    def why_dark(self, seen: Seen | None, now_s: float) -> str:
        """Why what the board shows cannot be relied on, or an empty text."""
        if not self.is_alive:
            return "the serving engine is gone"
        if off := self.off:
            return f"the serving engine shows nothing any more: {off}"
        if seen is None:
            return "the serving engine has shown nothing yet"
        if not seen.view.is_idle and now_s - seen.written_s > STALE_S:
            return f"the serving engine has work and has been silent for {now_s - seen.written_s:.0f} s"
        return ""

    def look(self) -> Seen | None:
        """None before the first view. Raises Torn, rarely: look again later."""
        number, message = self._views.read()
        milestones, lost_milestones = self._milestones.since(self._milestones_seen)
        steps, lost_steps = self._steps.since(self._steps_seen)
        self._milestones_seen += len(milestones) + lost_milestones
        self._steps_seen += len(steps) + lost_steps
        for record, (kind, _, at_s, tokens) in milestones:
            if kind == MilestoneKind.CAME:
                self._arrivals.append((record, WaitingRequest(at_s, int(tokens))))
        if number == 0:
            return None
        values = array("d", message)
        while self._arrivals and self._arrivals[0][0] <= values[1]:
            self._arrivals.popleft()
        return Seen(
            _view(number, values, [request for _, request in self._arrivals]),
            values[0],
            tuple(_step(record) for _, record in steps),
            tuple(Milestone(MilestoneKind(int(kind)), int(key), at, int(n)) for _, (kind, key, at, n) in milestones),
            lost_milestones + lost_steps,
        )

    def close(self) -> None:
        os.close(self._process)
        self._file.close()


def _about(file: MappedFile) -> About:
    length = file.words[0]
    try:
        about = msgspec.json.decode(file.bytes[WORD : WORD + min(length, BUSY_WORD * WORD)], type=About)
    except msgspec.DecodeError as error:
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


def _view(number: int, values: Sequence[float], arrivals: list[WaitingRequest]) -> ServingView:
    middle = FIXED_VALUES + int(values[4])
    end = middle + int(values[5])
    waiting = [WaitingRequest(values[i], int(values[i + 1])) for i in range(FIXED_VALUES, middle, 2)]
    running = [RunningRequest(values[i], int(values[i + 1]), values[i + 2]) for i in range(middle, end, 3)]
    shape = StepFeatures(int(values[6]), int(values[7]), int(values[8]), int(values[9]))
    used, total = int(values[2]), int(values[3])
    return ServingView(number, (*waiting, *arrivals), tuple(running), used, total, shape, values[11] - values[10])


def _step(record: tuple[float, ...]) -> FinishedStep:
    began_s, ended_s, *shape = record
    return FinishedStep(began_s, ended_s, StepFeatures(*map(int, shape)))


__all__ = ["About", "BoardReader", "BoardWriter", "Seen", "Torn", "about_me", "started_ticks"]
