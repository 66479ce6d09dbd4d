"""Trouble on purpose: calls that are slow, fail, hang or answer nonsense, as often as wanted and by a seed.

    trouble = TroubleSettings(latency="lognormal:median=0.2,sigma=1", failure_rate=0.01, hang_rate=0.001)
    dice = trouble_dice(trouble, "run/3/5")
    environment = Guarded(lambda: troubled(make_environment("frozenlake"), trouble, dice))

Real environments are simulators, browsers and shells behind a network: their latency has a long tail and some of their
calls are lost. With this a run meets the same on one machine. What a call meets depends on the settings' seed, the
episode's key and how many calls the episode has made: the same episode meets the same trouble every time, and playing
it anew meets other trouble, since the dice are thrown further, not again.

A call that hangs does come back, after `hang_s`: nobody can tell that from for ever who has less patience, and the
thread is not lost.
"""

from __future__ import annotations

import difflib
import math
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rose.config.schema import setting
from rose.config.spec import read_settings
from rose.envs.base import Environment, Outcome
from rose.errors import ConfigError

Draw = Callable[[random.Random], float]


@dataclass(frozen=True, slots=True)
class Distribution:
    """How a latency is drawn. Every setting must be given."""

    draw: Callable[[Mapping[str, float], random.Random], float]
    example: str
    settings: tuple[str, ...]


DISTRIBUTIONS = {
    "constant": Distribution(lambda given, dice: given["seconds"], "constant:seconds=0.2", ("seconds",)),
    "uniform": Distribution(
        lambda given, dice: dice.uniform(given["low"], given["high"]), "uniform:low=0.1,high=0.5", ("low", "high")
    ),
    "exponential": Distribution(
        lambda given, dice: dice.expovariate(1 / given["mean"]), "exponential:mean=0.2", ("mean",)
    ),
    "lognormal": Distribution(
        lambda given, dice: dice.lognormvariate(math.log(given["median"]), given["sigma"]),
        "lognormal:median=0.2,sigma=1",
        ("median", "sigma"),
    ),
    "pareto": Distribution(
        lambda given, dice: given["least"] * dice.paretovariate(given["alpha"]),
        "pareto:least=0.05,alpha=1.5",
        ("least", "alpha"),
    ),
}


@dataclass(frozen=True, slots=True)
class TroubleSettings:
    """Shares are of calls, resets and steps alike."""

    latency: str = setting("", "seconds added to every call, such as lognormal:median=0.2,sigma=1; empty adds none")
    failure_rate: float = setting(0.0, "share of calls that fail", minimum=0, maximum=1)
    hang_rate: float = setting(0.0, "share of calls that hang", minimum=0, maximum=1)
    nonsense_rate: float = setting(0.0, "share of calls that answer nonsense", minimum=0, maximum=1)
    hang_s: float = setting(300.0, "how long a call hangs; more than the patience", minimum=0.01, maximum=1e6)
    seed: int = setting(0, "of the trouble", minimum=0)

    def __post_init__(self) -> None:
        rates = (self.failure_rate, self.hang_rate, self.nonsense_rate)
        if not all(0 <= rate <= 1 for rate in rates) or sum(rates) > 1:
            raise ConfigError(f"shares of trouble are from 0 to 1 and at most 1 together, not {rates}")
        if self.latency:
            parse_distribution(self.latency)

    @property
    def is_any(self) -> bool:
        return bool(self.latency) or self.failure_rate + self.hang_rate + self.nonsense_rate > 0


def trouble_dice(trouble: TroubleSettings, key: str) -> random.Random:
    """The dice of one episode, to be used by every environment that plays it."""
    return random.Random(f"{trouble.seed}/{key}")


def troubled(environment: Environment, trouble: TroubleSettings, dice: random.Random) -> Environment:
    """The environment in trouble; itself, if there is none."""
    return Troubled(environment, trouble, dice) if trouble.is_any else environment


class Troubled:
    """An environment whose calls meet trouble before they are made."""

    is_quick = False

    def __init__(self, environment: Environment, trouble: TroubleSettings, dice: random.Random | None = None) -> None:
        self._environment, self._trouble = environment, trouble
        self._dice = dice or trouble_dice(trouble, "")
        self._latency = parse_distribution(trouble.latency) if trouble.latency else None
        self._closed = threading.Event()

    def reset(self, seed: int) -> str:
        nonsense = self._meet()
        return nonsense[0] if nonsense else self._environment.reset(seed)

    def step(self, action: str) -> Outcome:
        nonsense = self._meet()
        return nonsense[1] if nonsense else self._environment.step(action)

    def close(self) -> None:
        self._closed.set()
        self._environment.close()

    def _meet(self) -> tuple[Any, Any] | None:
        """Waits, raises or hangs, as the dice fall; returns the nonsense to answer with, if any."""
        trouble, dice = self._trouble, self._dice
        latency_s = self._latency(dice) if self._latency else 0.0
        fate, nonsense = dice.random(), dice.choice(NONSENSE)
        self._closed.wait(latency_s)
        if fate < trouble.failure_rate:
            raise ConnectionError("the call was lost (trouble on purpose)")
        if fate < trouble.failure_rate + trouble.hang_rate:
            self._closed.wait(trouble.hang_s)
            raise ConnectionError("the call hung (trouble on purpose)")
        if fate < trouble.failure_rate + trouble.hang_rate + trouble.nonsense_rate:
            return nonsense
        return None


# What a broken environment may answer to reset and to step.
NONSENSE: tuple[tuple[Any, Any], ...] = (
    (None, None),
    (b"bytes", ("text", 1.0, True)),
    ("\ud800", Outcome("\ud800")),
    (17, Outcome("not a number", math.nan)),
    ([], Outcome("a text", "1.0", is_done=True)),  # type: ignore[arg-type]
)


def parse_distribution(spec: str) -> Draw:
    """`lognormal:median=0.2,sigma=1` -> what draws a number of seconds; ConfigError says how to write it."""
    name = spec.partition(":")[0]
    if name not in DISTRIBUTIONS:
        raise ConfigError(f"there is no distribution `{name}`", hint=_nearest(name))
    distribution = DISTRIBUTIONS[name]
    wanted = dict.fromkeys(distribution.settings, math.nan)
    given = read_settings("distribution", name, spec, wanted, distribution.example)
    return lambda dice: distribution.draw(given, dice)


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, DISTRIBUTIONS, n=1)
    if near:
        return f"did you mean {DISTRIBUTIONS[near[0]].example}?"
    return "there are " + ", ".join(distribution.example for distribution in DISTRIBUTIONS.values())
