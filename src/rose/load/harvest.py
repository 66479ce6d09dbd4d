"""Counts the tokens that rollouts on a device produce during a run, if the device shows them.

A lending device counts `rose_rollout_tokens_total` among its metrics. It is read about once a second during a run, so
that the picture can compare harvested tokens with the load at that time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

COUNTER = "rose_rollout_tokens_total"
EVERY_S = 1.0
ANSWER_S_MAX = 5.0
_SAMPLE = re.compile(rb"^" + COUNTER.encode() + rb"(?:\{.*\})? (\S+)", re.MULTILINE)


@dataclass(slots=True)
class Harvest:
    """The samples of the counter; empty if there is no such counter."""

    at_s: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)

    @property
    def total(self) -> float | None:
        """Count the tokens between the first sample and the last. A counter that fell restarted with its process."""
        if len(self.tokens) < 2:
            return None
        return sum(max(0.0, later - earlier) for earlier, later in zip(self.tokens, self.tokens[1:]))

    @property
    def tokens_per_s(self) -> float | None:
        total, span_s = self.total, self.at_s[-1] - self.at_s[0] if self.at_s else 0.0
        return None if total is None or span_s <= 0 else total / span_s


def counted(exposition: bytes) -> float | None:
    """Return the counter in a page of metrics, summed over its labels; None if it is absent."""
    samples = _SAMPLE.findall(exposition)
    return sum(map(float, samples)) if samples else None


async def watch(session: aiohttp.ClientSession, url: str, now_s: Callable[[], float], harvest: Harvest) -> None:
    """Read the counter until cancelled; only once if the device does not show it."""
    await look(session, url, now_s, harvest)
    while harvest.tokens:
        await asyncio.sleep(EVERY_S)
        await look(session, url, now_s, harvest)


async def look(session: aiohttp.ClientSession, url: str, now_s: Callable[[], float], harvest: Harvest) -> None:
    """Read the counter once. A device that does not answer leaves a gap, no error."""
    try:
        async with asyncio.timeout(ANSWER_S_MAX), session.get(url) as response:
            tokens = counted(await response.read()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return
    if tokens is not None:
        harvest.at_s.append(now_s())
        harvest.tokens.append(tokens)
