"""What the users of the borrowed device got, as their traffic tells it, request by request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from rose.launch.traffic import Served

_decoder = msgspec.json.Decoder(Served)
RECENT = 500  # what a running figure is taken over


class ServingLog:
    """Keeps what is needed for a running figure, and hands every line on."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.requests = 0
        self._write = write
        self._verdicts: deque[bool] = deque(maxlen=RECENT)

    def heard(self, line: bytes) -> None:
        """One line of the traffic's."""
        served = _decoder.decode(line)
        if served.outcome == "cut":  # the run ended, not the request
            return
        self.requests += 1
        if served.attained is not None:
            self._verdicts.append(served.attained)
        self._write(line)

    def attainment(self) -> float | None:
        return sum(self._verdicts) / len(self._verdicts) if self._verdicts else None
