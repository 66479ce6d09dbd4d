"""What happened in a simulated world, line by line, and one digest of all of it.

Two runs of one seed tell the same story to the last character; the digest is how a test sees that. The last lines are
always kept, since they are what somebody who looks at a violation reads first.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable

LINES_KEPT = 60


class Story:
    """`listen` is given every line as it is told."""

    def __init__(self, now_s: Callable[[], float], listen: Callable[[str], None] | None = None) -> None:
        self.last: deque[str] = deque(maxlen=LINES_KEPT)
        self._now_s, self._listen = now_s, listen
        self._digest = hashlib.blake2b(digest_size=16)

    def tell(self, who: str, what: str) -> None:
        line = f"{self._now_s():10.4f}  {who:<12} {what}"
        self.last.append(line)
        self._digest.update(line.encode())
        if self._listen is not None:
            self._listen(line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


class Violation(AssertionError):
    """Something that must always hold did not."""
