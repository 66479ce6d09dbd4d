"""A process that can be stopped, as by SIGSTOP, and continued: what reaches it meanwhile waits, in order."""

from __future__ import annotations

from collections.abc import Callable


class Gate:
    """Whatever enters or leaves a process goes through its gate."""

    def __init__(self) -> None:
        self.is_stopped = False
        self._held: list[Callable[[], None]] = []

    def enter(self, do: Callable[[], None]) -> None:
        if self.is_stopped or self._held:
            self._held.append(do)
        else:
            do()

    def stop(self) -> None:
        self.is_stopped = True

    def go_on(self) -> None:
        self.is_stopped = False
        while self._held and not self.is_stopped:
            self._held.pop(0)()

    def clear(self) -> None:
        """The process has died; what waited dies with it."""
        self.is_stopped = False
        self._held.clear()
