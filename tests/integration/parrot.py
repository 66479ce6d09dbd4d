"""An engine that says what it is told to: whatever stands between BEGIN and END in the last place of its prompt.

So a test decides what "the model" answers, tool calls and all, by what it writes into a message. A prompt without such
a place is answered as the scripted engine does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.integration.scripted_engine import BLOCK_TOKENS, CONTEXT_TOKENS, VOCABULARY, ScriptedEngine, _sample

from rose.config.server_settings import EngineSettings
from rose.engines.base import StepPlan, TokenEvent
from rose.engines.batch_scheduler import BatchScheduler, SchedulerLimits
from rose.engines.blocks import BlockPool
from rose.engines.live_request import Sampled

BEGIN, END = "\x01", "\x02"
CHAT_END_ID = 258  # of the presets that spell bytes


def told(words: str) -> str:
    """A message that makes the parrot say these words, and then end."""
    return f"say {BEGIN}{words}{END}"


class ParrotEngine(ScriptedEngine):
    def __init__(self, settings: EngineSettings) -> None:
        limits = SchedulerLimits(
            block_tokens=BLOCK_TOKENS,
            block_bytes=BLOCK_TOKENS * 64,
            max_context_tokens=CONTEXT_TOKENS,
            max_sequences=settings.max_sequences,
            max_waiting=settings.max_waiting,
            vocabulary=VOCABULARY,
            eos_token_ids=frozenset({CHAT_END_ID}),
        )
        self._scheduler = BatchScheduler(limits, BlockPool(CONTEXT_TOKENS // BLOCK_TOKENS * 4), "v0")

    @classmethod
    def load(cls, folder: Path, *, settings: EngineSettings, device: str) -> ParrotEngine:
        return cls(settings)

    def step(self, plan: StepPlan) -> Sequence[TokenEvent]:
        rows = self._scheduler.begin(plan)
        return self._scheduler.complete(plan, {row.request.request_id: _next(row) for row, _ in rows})


def _next(row: object) -> Sampled:
    prompt = row.request.prompt_ids  # type: ignore[attr-defined]
    if ord(END) not in prompt:
        return _sample(row)
    end = len(prompt) - 1 - prompt[::-1].index(ord(END))
    begin = max(place for place in range(end) if prompt[place] == ord(BEGIN))
    words = [*prompt[begin + 1 : end], CHAT_END_ID]
    place = len(row.token_ids) - len(prompt)  # type: ignore[attr-defined]
    return Sampled(words[min(place, len(words) - 1)], -0.5, ())
