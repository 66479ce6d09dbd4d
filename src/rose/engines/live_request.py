"""One request inside a step engine: how far it has come, and its place among the others."""

from __future__ import annotations

from dataclasses import dataclass, field

from rose.api.requests import PromptLogprob, VersionSpan
from rose.engines.base import Partial, Request

PRIORITY_PLACES = 64  # places in the queue that one level of priority is worth
PRIORITY_LEVELS = 128  # up and down; further ones count as the last, so at most 16,384 later requests go first
PRIORITY_TURNS = 8  # levels by which one running request goes before another that was served longer ago


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token an engine drew for one request in one step."""

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request and how far it has come. `computed` tokens are in the KV cache, in `blocks`."""

    request: Request
    order: int
    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    findable: bool = True  # False while it holds KV of older weights
    running: bool = False
    reported_cached: bool = False
    cached_tokens: int = 0
    last_planned: int = 0
    slot: int = -1  # in [0, max_sequences) and its own while running
    scores_prompt: bool = False  # the prompt's log-probabilities are to be computed: the first token brings them
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)  # of the prompt's tokens, from the second on
    prepared_blocks: int = 0  # for the engine: how many of `blocks` it has made ready
    has_moved: bool = False  # for the engine: some of those are others now, with the same content

    @property
    def key(self) -> tuple[int, int]:
        """Return the place in the queue: lower runs first."""
        level = max(-PRIORITY_LEVELS, min(PRIORITY_LEVELS, self.request.priority))
        return (self.order + PRIORITY_PLACES * level, self.order)

    @property
    def turn(self) -> tuple[int, int]:
        """Return the place among the running if a step cannot hold all of them: lower runs first."""
        level = max(-PRIORITY_TURNS, min(PRIORITY_TURNS, self.request.priority))
        return (self.last_planned + level, self.order)

    @property
    def produced(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    def partial(self) -> Partial:
        return Partial(tuple(self.token_ids[len(self.request.prompt_ids) :]), tuple(self.logprobs), tuple(self.spans))
