"""Progress of a run: one line per step that stays, and on a terminal one that moves.

A file or a pipe gets only lines that stay, and during long phases one now and then, as a sign of life.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TextIO

from rose.observe.progress_line import Part, ProgressLine, duration
from rose.run.run_records import StepRecord

QUIET_S_MAX = 20.0  # a file gets a sign of life at least this often


@dataclass(slots=True)
class Live:
    """State of the run, as the moving line shows it."""

    phase: str = "starting"
    step: int = 0
    ended: int = 0
    under_way: int = 0
    dedicated_turns_per_s: float = 0.0
    borrowed_turns_per_s: float = 0.0
    attainment: float | None = None
    left_s: float | None = None


class Screen:
    def __init__(self, steps: int, stream: TextIO | None = None) -> None:
        self.live = Live()
        self._steps, self._said_s = steps, time.monotonic()
        self._line = ProgressLine(stream or sys.stdout, " | ")
        self._step = ProgressLine(stream or sys.stdout, "  ")

    @property
    def every_s(self) -> float:
        return 0.5 if self._line.is_terminal else 5.0

    def say(self, line: str) -> None:
        """Write a line that stays."""
        self._line.say(line)
        self._said_s = time.monotonic()

    def say_step(self, line: StepRecord, attainment: float | None, left_s: float) -> None:
        """Write the line of a step, which stays; a narrow terminal gets its most important parts."""
        self.say(self._step.fitted(step_parts(line, self._steps, attainment, left_s)))

    def show(self) -> None:
        """Write the line that moves."""
        parts = live_parts(self.live, self._steps)
        if self._line.is_terminal:
            self._line.show(parts)
        elif time.monotonic() - self._said_s > QUIET_S_MAX:
            self.say(f"  ... {self._line.whole(parts)}")


def live_parts(live: Live, steps: int) -> list[Part]:
    parts = [Part(f"step {live.step} of {steps}: {live.phase}" if live.step else live.phase)]
    if live.under_way:
        parts.append(Part(f"{live.ended} trajectories done, {live.under_way} under way", 3))
        speeds = f"{live.dedicated_turns_per_s:.0f} dedicated, {live.borrowed_turns_per_s:.0f} borrowed"
        parts.append(Part(f"turns/s: {speeds}", 2))
    if live.attainment is not None:
        parts.append(Part(f"serving {live.attainment:.1%} in budget", 1))
    if live.left_s is not None:
        parts.append(Part(f"{duration(live.left_s)} left", 1))
    return parts


def step_parts(line: StepRecord, steps: int, attainment: float | None, left_s: float) -> list[Part]:
    """Return the line of a step in its parts."""
    turns, rate = max(1, line.turns), line.trajectories / line.rollout_s
    by_pool = {kind: rate * count / turns for kind, count in line.turns_by_pool.items()}
    success = f"{line.successes / line.trajectories:.0%}" if line.trajectories else "-"
    verdict = [] if line.verdict == "updated" else [Part(f"[{line.verdict.replace('_', ' ')}]")]
    serving = "-" if attainment is None else f"{attainment:.1%}"
    speeds = f"{by_pool.get('dedicated', 0):.1f} dedicated + {by_pool.get('borrowed', 0):.1f} borrowed"
    return [
        Part(f"step {line.step:>3}/{steps}"),
        Part(f"success {success:>4}"),
        Part(f"groups {line.groups_kept}/{line.groups_total}", 4),
        Part(f"rollout {line.rollout_s:.1f} s", 2),
        Part(f"train {line.train_s:.1f} s", 2),
        Part(f"trajectories/s {speeds}", 5),
        Part(f"serving {serving} in budget", 1),
        Part(f"{duration(left_s)} left", 3),
        *verdict,
    ]
