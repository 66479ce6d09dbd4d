"""What happened to one request, as the client saw it. Times are seconds from the start of the run.

There is one time stamp for every token. Tokens that come in one event came at the same moment for whoever reads them:
the gaps between them are 0, and the gap before them is whole.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    DONE = "done"
    REJECTED = "rejected"  # the server said 429 or 503
    TIMED_OUT = "timed_out"
    FAILED = "failed"  # anything else that went wrong
    CUT = "cut"  # the run was stopped while it was under way


class Rejected(Exception):
    """The server is busy and says so."""


class Failed(Exception):
    """The request came to nothing for another reason."""


@dataclass(slots=True)
class Record:
    """One request. `scheduled_s` is when it should have been sent: that is where its latency begins."""

    index: int
    scheduled_s: float
    prompt_tokens: int
    wanted_tokens: int
    sent_s: float = math.nan
    ended_s: float = math.nan
    token_s: array[float] = field(default_factory=lambda: array("d"))
    tokens_counted: int = 0  # by the server, when it does not send one event per token
    outcome: Outcome | None = None
    detail: str = ""
    was_held: bool = False  # it waited for one of the places that bound how many run at once

    def saw(self, tokens: int, now_s: float) -> None:
        self.token_s.extend([now_s] * tokens)

    @property
    def tokens(self) -> int:
        return max(len(self.token_s), self.tokens_counted)
