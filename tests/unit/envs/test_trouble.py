"""Trouble on purpose: distributions, seeds, and what episodes and agents make of it."""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections import Counter

import pytest

from rose.config.loading import load_settings
from rose.envs.environment import EnvironmentFailed, EnvironmentTimeouts, Outcome, TimedEnvironment
from rose.envs.frozenlake import FrozenLake
from rose.envs.trouble import DISTRIBUTIONS, Troubled, TroubleSettings, parse_distribution, trouble_dice, troubled
from rose.errors import ConfigError

RIGHT = "<answer>Right</answer>"


def fates(trouble: TroubleSettings, key: str, calls: int) -> list[str]:
    """What each of so many calls meets; a hang is over at once."""
    environment = Troubled(FrozenLake(), trouble, trouble_dice(trouble, key))
    return [fate_of(environment) for _ in range(calls)]


def fate_of(environment: Troubled) -> str:
    try:
        return "well" if isinstance(environment.reset(3), str) else "nonsense"
    except ConnectionError as error:
        return "hang" if "hung" in str(error) else "failure"


def test_faults_come_at_their_rates_and_by_the_seed():
    trouble = TroubleSettings(failure_rate=0.2, hang_rate=0.1, nonsense_rate=0.1, hang_s=1e-6)
    found = fates(trouble, "run/0/1", 1000)
    assert found == fates(trouble, "run/0/1", 1000)
    assert found != fates(trouble, "run/0/2", 1000)
    assert found != fates(TroubleSettings("", 0.2, 0.1, 0.1, 1e-6, seed=1), "run/0/1", 1000)
    shares = {fate: count / 1000 for fate, count in Counter(found).items()}
    assert shares["failure"] == pytest.approx(0.2, abs=0.04) and shares["hang"] == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize(
    "spec, median_s",
    [
        ("constant:seconds=0.2", 0.2),
        ("uniform:low=0.1,high=0.5", 0.3),
        ("exponential:mean=0.2", 0.1386),
        ("lognormal:median=0.2,sigma=1", 0.2),
        ("pareto:least=0.05,alpha=1.5", 0.0794),
    ],
)
def test_latencies_have_the_median_of_their_distribution(spec, median_s):
    dice = trouble_dice(TroubleSettings(), "")
    drawn = [parse_distribution(spec)(dice) for _ in range(4000)]
    assert min(drawn) > 0 and statistics.median(drawn) == pytest.approx(median_s, rel=0.1)


def test_every_example_of_a_distribution_parses():
    assert all(parse_distribution(kind.example) for kind in DISTRIBUTIONS.values())


@pytest.mark.parametrize(
    "spec, word",
    [
        ("lognorml:median=1,sigma=1", "did you mean `lognormal:median"),
        ("lognormal:median=1", "needs sigma"),
        ("lognormal:mean=1", "has no setting `mean`"),
        ("constant:seconds=-1", "not a number above 0"),
        ("constant:seconds=nan", "not a number above 0"),
        ("zipf", "there are constant:seconds"),
    ],
)
def test_bad_latencies_are_refused_with_the_reason(spec, word):
    with pytest.raises(ConfigError) as refused:
        TroubleSettings(latency=spec)
    assert word in str(refused.value)


def test_trouble_settings_are_loaded_and_checked():
    found = load_settings(TroubleSettings, None, ["latency=constant:seconds=0.1", "failure_rate=0.5"])
    assert found == TroubleSettings("constant:seconds=0.1", 0.5) and found.is_any
    with pytest.raises(ConfigError):
        load_settings(TroubleSettings, None, ["failure_rate=1.5"])
    with pytest.raises(ConfigError, match="at most 1 together"):
        TroubleSettings(failure_rate=0.6, hang_rate=0.6)


def test_an_environment_without_faults_is_not_wrapped():
    lake = FrozenLake()
    assert troubled(lake, TroubleSettings(), trouble_dice(TroubleSettings(), "")) is lake


def test_an_episode_with_faults_is_played_in_the_end():
    trouble = TroubleSettings(
        failure_rate=0.15, hang_rate=0.1, nonsense_rate=0.1, hang_s=60.0, latency="constant:seconds=0.0001"
    )

    async def play(key: str) -> tuple[Outcome, int]:
        dice, made = trouble_dice(trouble, key), []
        timed = TimedEnvironment(
            lambda: made.append(1) or troubled(FrozenLake(), trouble, dice), EnvironmentTimeouts(0.05, 0.05, 50)
        )
        while True:
            try:
                await timed.reset(3)
                await timed.step(RIGHT)
                return await timed.step(RIGHT), len(made)
            except EnvironmentFailed:
                continue

    found = [asyncio.run(play(f"episode-{number}")) for number in range(6)]
    assert all(outcome.is_done and outcome.observation == "0,2 L_D_R_U#" for outcome, _ in found)
    assert sum(made for _, made in found) > 6, "some had to begin again"


def test_closing_wakes_a_call_that_hangs():
    environment = Troubled(FrozenLake(), TroubleSettings(hang_rate=1.0, hang_s=3600.0))
    raised: list[BaseException] = []

    def call() -> None:
        try:
            environment.reset(1)
        except ConnectionError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    environment.close()
    thread.join(20)
    assert not thread.is_alive() and len(raised) == 1
