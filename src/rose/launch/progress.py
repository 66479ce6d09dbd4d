"""What a run shows while it goes: one line per step that stays, and on a terminal one that moves.

Into a file or a pipe only lines that stay are written, and during long phases one now and then, so that nobody has to
wonder whether it still runs.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

from rose.load.table import duration

QUIET_S_MAX = 20.0  # a file gets a sign of life at least this often


@dataclass(slots=True)
class Live:
    """What is going on now."""

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
        self._steps, self._stream = steps, stream or sys.stdout
        self._is_terminal = self._stream.isatty()
        self._width, self._said_s = 0, time.monotonic()

    @property
    def every_s(self) -> float:
        return 0.5 if self._is_terminal else 5.0

    def say(self, words: str) -> None:
        """A line that stays."""
        self._clear()
        self._write(words + "\n")
        self._said_s = time.monotonic()

    def show(self) -> None:
        """The line that moves."""
        if self._is_terminal:
            line = live_line(self.live, self._steps)
            self._write("\r" + line.ljust(self._width))
            self._width = len(line)
        elif time.monotonic() - self._said_s > QUIET_S_MAX:
            self.say(f"  ... {live_line(self.live, self._steps)}")

    def _clear(self) -> None:
        if self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # nobody reads any more; the run goes on
            self._is_terminal = False


def live_line(live: Live, steps: int) -> str:
    parts = [f"step {live.step} of {steps}: {live.phase}" if live.step else live.phase]
    if live.under_way:
        parts.append(f"{live.ended} trajectories done, {live.under_way} under way")
        parts.append(f"turns/s: {live.dedicated_turns_per_s:.0f} dedicated, {live.borrowed_turns_per_s:.0f} borrowed")
    if live.attainment is not None:
        parts.append(f"serving {live.attainment:.1%} in budget")
    if live.left_s is not None:
        parts.append(f"{duration(live.left_s)} left")
    return " | ".join(parts)


def step_line(line: dict[str, Any], steps: int, attainment: float | None, left_s: float) -> str:
    """One step in one line."""
    turns, rate = max(1, line["turns"]), line["trajectories"] / line["rollout_s"]
    by_pool = {kind: rate * count / turns for kind, count in line["turns_by_pool"].items()}
    success = f"{line['successes'] / line['trajectories']:.0%}" if line["trajectories"] else "-"
    verdict = "" if line["verdict"] == "updated" else f"  [{line['verdict'].replace('_', ' ')}]"
    serving = "-" if attainment is None else f"{attainment:.1%}"
    return (
        f"step {line['step']:>3}/{steps}  success {success:>4}  "
        f"groups {line['groups_kept']}/{line['groups_total']}  "
        f"rollout {line['rollout_s']:.1f} s  train {line['train_s']:.1f} s  "
        f"trajectories/s {by_pool.get('dedicated', 0):.1f} dedicated + {by_pool.get('borrowed', 0):.1f} borrowed  "
        f"serving {serving} in budget  {duration(left_s)} left{verdict}"
    )
