"""An environment that fails, hangs or answers as a script says, for tests of what plays it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from rose.envs.environment import EnvironmentTimeouts, Outcome

QUICK = EnvironmentTimeouts(reset_s_max=0.05, step_s_max=0.05, resets_max=3)


def answer_text(action: str) -> str:
    """Return an action of FrozenLake as an agent writes it."""
    return f"<answer>{action}</answer>"


@dataclass
class Scripted:
    """An environment that fails, hangs or answers, call by call."""

    script: list[str]
    is_quick: bool = False
    release: threading.Event = field(default_factory=threading.Event)

    def _act(self) -> None:
        deed = self.script.pop(0) if self.script else "answer"
        if deed == "hang":
            self.release.wait()
        elif deed == "raise":
            raise ValueError("no such room")

    def reset(self, seed: int) -> str:
        self._act()
        return f"seed {seed}"

    def step(self, action: str) -> Outcome:
        self._act()
        return Outcome(f"did {action}", reward=1.0, is_done=True, is_success=True)

    def close(self) -> None:
        self.release.set()
