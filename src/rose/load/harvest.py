"""Watches how many tokens the rollouts on a device have had so far, if the device shows it.

A lending device counts `rose_rollout_tokens_total` among its metrics. It is read about once a second during a run, so
that the picture can set what was harvested against the load it was harvested under.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

COUNTER = "rose_rollout_tokens_total"
EVERY_S = 1.0
PATIENCE_S = 5.0
_SAMPLE = re.compile(rb"^" + COUNTER.encode() + rb"(?:\{.*\})? (\S+)", re.MULTILINE)


@dataclass(slots=True)
class Harvest:
    """What the counter said and when; empty if there is no such counter."""

    at_s: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)

    @property
    def total(self) -> float | None:
        """Tokens between the first look and the last. A counter that fell began again, with its process."""
        if len(self.tokens) < 2:
            return None
        return sum(max(0.0, later - earlier) for earlier, later in zip(self.tokens, self.tokens[1:]))

    @property
    def tokens_per_s(self) -> float | None:
        total, span_s = self.total, self.at_s[-1] - self.at_s[0] if self.at_s else 0.0
        return None if total is None or span_s <= 0 else total / span_s


def counted(exposition: bytes) -> float | None:
    """The counter in a page of metrics, summed over its labels; None if it is not there."""
    found = _SAMPLE.findall(exposition)
    return sum(map(float, found)) if found else None


async def watch(session: aiohttp.ClientSession, url: str, now_s: Callable[[], float], harvest: Harvest) -> None:
    """Until cancelled; only once if the device does not show the counter."""
    await look(session, url, now_s, harvest)
    while harvest.tokens:
        await asyncio.sleep(EVERY_S)
        await look(session, url, now_s, harvest)


async def look(session: aiohttp.ClientSession, url: str, now_s: Callable[[], float], harvest: Harvest) -> None:
    """Read the counter once. A device that does not answer leaves a hole, no error."""
    try:
        async with asyncio.timeout(PATIENCE_S), session.get(url) as response:
            tokens = counted(await response.read()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return
    if tokens is not None:
        harvest.at_s.append(now_s())
        harvest.tokens.append(tokens)
