"""Injects faults: calls that are slow, fail, hang or return nonsense, at chosen rates and by a seed.

    trouble = TroubleSettings(latency="lognormal:median=0.2,sigma=1", failure_rate=0.01, hang_rate=0.001)
    dice = trouble_dice(trouble, "run/3/5")
    environment = TimedEnvironment(lambda: troubled(make_environment("frozenlake"), trouble, dice))

Faults depend on the settings' seed, the episode's key and how many calls the episode has made. So the same episode
meets the same faults every time, and playing it anew meets others. A call that hangs returns after `hang_s`: to a
caller with a shorter timeout it hangs for ever, and no thread is lost.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rose.config.schema import setting
from rose.config.spec_text import nearest_example, read_settings
from rose.envs.environment import Environment, Outcome
from rose.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of latencies. Every setting of the example must be given."""

    draw: Callable[[Mapping[str, float], random.Random], float]
    example: str


DISTRIBUTIONS = {
    "constant": Distribution(lambda values, dice: values["seconds"], "constant:seconds=0.2"),
    "uniform": Distribution(
        lambda values, dice: dice.uniform(values["low"], values["high"]), "uniform:low=0.1,high=0.5"
    ),
    "exponential": Distribution(lambda values, dice: dice.expovariate(1 / values["mean"]), "exponential:mean=0.2"),
    "lognormal": Distribution(
        lambda values, dice: dice.lognormvariate(math.log(values["median"]), values["sigma"]),
        "lognormal:median=0.2,sigma=1",
    ),
    "pareto": Distribution(
        lambda values, dice: values["least"] * dice.paretovariate(values["alpha"]), "pareto:least=0.05,alpha=1.5"
    ),
}


@dataclass(frozen=True, slots=True)
class TroubleSettings:
    """Rates of faults. Shares are of calls, resets and steps alike."""

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
    """Return the random stream of one episode, for every environment that plays it."""
    return random.Random(f"{trouble.seed}/{key}")


def troubled(environment: Environment, trouble: TroubleSettings, dice: random.Random) -> Environment:
    """Return the environment with faults; unchanged if the settings have none."""
    return Troubled(environment, trouble, dice) if trouble.is_any else environment


class Troubled:
    """An environment whose calls meet faults before they are made."""

    is_quick = False

    def __init__(self, environment: Environment, trouble: TroubleSettings, dice: random.Random | None = None) -> None:
        self._environment, self._trouble = environment, trouble
        self._dice = dice or trouble_dice(trouble, "")
        self._latency = parse_distribution(trouble.latency) if trouble.latency else None
        self._closed = threading.Event()

    def reset(self, seed: int) -> str:
        nonsense = self._inject()
        return nonsense[0] if nonsense else self._environment.reset(seed)

    def step(self, action: str) -> Outcome:
        nonsense = self._inject()
        return nonsense[1] if nonsense else self._environment.step(action)

    def close(self) -> None:
        self._closed.set()
        self._environment.close()

    def _inject(self) -> tuple[Any, Any] | None:
        """Wait, raise or hang, as drawn; return the nonsense to answer with, if any."""
        trouble, dice = self._trouble, self._dice
        latency_s = self._latency(dice) if self._latency else 0.0
        draw, nonsense = dice.random(), dice.choice(NONSENSE)
        self._closed.wait(latency_s)
        if draw < trouble.failure_rate:
            raise ConnectionError("the call was lost (trouble on purpose)")
        if draw < trouble.failure_rate + trouble.hang_rate:
            self._closed.wait(trouble.hang_s)
            raise ConnectionError("the call hung (trouble on purpose)")
        return nonsense if draw < trouble.failure_rate + trouble.hang_rate + trouble.nonsense_rate else None


# What a broken environment may answer to reset and to step.
NONSENSE: tuple[tuple[Any, Any], ...] = (
    (None, None),
    (b"bytes", ("text", 1.0, True)),
    ("\ud800", Outcome("\ud800")),
    (17, Outcome("not a number", math.nan)),
    ([], Outcome("a text", "1.0", is_done=True)),  # type: ignore[arg-type]
)


def parse_distribution(spec: str) -> Callable[[random.Random], float]:
    """Return a function that draws seconds: `lognormal:median=0.2,sigma=1`. ConfigError says how to write it."""
    name = spec.partition(":")[0]
    if name not in DISTRIBUTIONS:
        examples = {known: distribution.example for known, distribution in DISTRIBUTIONS.items()}
        raise ConfigError(f"there is no distribution `{name}`", hint=nearest_example(name, examples, "there are"))
    distribution = DISTRIBUTIONS[name]
    required = {part.partition("=")[0]: math.nan for part in distribution.example.partition(":")[2].split(",")}
    settings = read_settings("distribution", name, spec, required, distribution.example)
    return lambda dice: distribution.draw(settings, dice)
