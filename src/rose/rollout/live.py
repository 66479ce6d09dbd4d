"""One turn under way, as the scheduler knows it, and what became of all of them, counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rose.core.router import TurnView
from rose.engines.base import Request, TokenEvent
from rose.errors import RoseError
from rose.rollout.pool import Member
from rose.rollout.produced import Produced


class Sink(Protocol):
    """Who is told what becomes of a turn: events, the last with a finish reason, or an error instead of the rest."""

    def put(self, event: TokenEvent) -> None: ...

    def fail(self, error: RoseError) -> None: ...


@dataclass(slots=True, eq=False)
class LiveTurn:
    """One turn that has not ended. Without a member it waits, since `waiting_since_s`."""

    request: Request
    affinity: str
    group: str | None
    sink: Sink
    produced: Produced
    order: int
    began_s: float
    waiting_since_s: float
    member: Member | None = None
    ticket: int = 0
    is_over: bool = False
    is_rerouted: bool = False
    progress_s: float = 0.0  # this and the following are of its present place
    is_first: bool = True  # it has shown no token there
    had_tokens: int = 0
    predicted_s: float = 0.0
    version: str = ""  # that its member ran
    oldest: int | None = None  # number of the oldest version that it could be placed on
    asked_back_s: float | None = None

    @property
    def tokens_max(self) -> int:
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens

    @property
    def prompt_there(self) -> int:
        """Tokens that its present place had to compute before the first new one."""
        return len(self.request.prompt_ids) + self.had_tokens

    def view(self) -> TurnView:
        """What it has produced elsewhere must be computed again like a prompt, and is not produced again."""
        produced = len(self.produced)
        return TurnView(
            trajectory=self.affinity,
            group=self.group,
            prompt_tokens=len(self.request.prompt_ids) + produced,
            max_tokens=max(1, self.request.sampling.max_tokens - produced),
        )


@dataclass(slots=True)
class Counts:
    """They only grow. begun = ended + failed + cancelled + those under way."""

    begun: int = 0
    ended: int = 0
    failed: int = 0
    cancelled: int = 0
    placed: int = 0
    evicted: int = 0  # handed back by a worker
    refused: int = 0
    lost: int = 0  # with the worker that ran them
    stalled: int = 0  # taken from a worker that did not get on with them
    off_version: int = 0  # taken from a worker whose weights were outside the bound
    late: int = 0  # pieces of turns that had been taken from the worker
    tokens: int = 0
