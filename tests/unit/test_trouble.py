"""Trouble on purpose: distributions, seeds, and what episodes and agents make of it."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import threading
from collections import Counter

import pytest

from rose.config.load import load_settings
from rose.envs.base import EnvironmentFailed, Guarded, Outcome, Patience
from rose.envs.frozenlake import FrozenLake
from rose.envs.openai_agent import AgentFailed, AgentTask, Door, Verdict, run_agent
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


def test_trouble_comes_as_often_as_wanted_and_by_the_seed():
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
def test_latencies_are_drawn_as_named(spec, median_s):
    dice = trouble_dice(TroubleSettings(), "")
    drawn = [parse_distribution(spec)(dice) for _ in range(4000)]
    assert min(drawn) > 0 and statistics.median(drawn) == pytest.approx(median_s, rel=0.1)


def test_every_example_is_one():
    assert all(parse_distribution(kind.example) for kind in DISTRIBUTIONS.values())


@pytest.mark.parametrize(
    "spec, word",
    [
        ("lognorml:median=1,sigma=1", "did you mean lognormal:median"),
        ("lognormal:median=1", "needs sigma"),
        ("lognormal:mean=1", "has no setting `mean`"),
        ("constant:seconds=-1", "not a number above 0"),
        ("constant:seconds=nan", "not a number above 0"),
        ("zipf", "there are constant:seconds"),
    ],
)
def test_bad_latencies_are_refused_in_words(spec, word):
    with pytest.raises(ConfigError) as refused:
        TroubleSettings(latency=spec)
    assert word in str(refused.value)


def test_settings_are_checked_and_can_be_given_as_any_others():
    found = load_settings(TroubleSettings, None, ["latency=constant:seconds=0.1", "failure_rate=0.5"])
    assert found == TroubleSettings("constant:seconds=0.1", 0.5) and found.is_any
    with pytest.raises(ConfigError):
        load_settings(TroubleSettings, None, ["failure_rate=1.5"])
    with pytest.raises(ConfigError, match="at most 1 together"):
        TroubleSettings(failure_rate=0.6, hang_rate=0.6)


def test_no_trouble_is_no_wrapper():
    lake = FrozenLake()
    assert troubled(lake, TroubleSettings(), trouble_dice(TroubleSettings(), "")) is lake


def test_an_episode_in_trouble_is_played_in_the_end():
    trouble = TroubleSettings(
        failure_rate=0.15, hang_rate=0.1, nonsense_rate=0.1, hang_s=60.0, latency="constant:seconds=0.0001"
    )

    async def play(key: str) -> tuple[Outcome, int]:
        dice, made = trouble_dice(trouble, key), []
        guarded = Guarded(lambda: made.append(1) or troubled(FrozenLake(), trouble, dice), Patience(0.05, 0.05, 50))
        while True:
            try:
                await guarded.reset(3)
                await guarded.step(RIGHT)
                return await guarded.step(RIGHT), len(made)
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


# Agents written against the OpenAI client. A client that makes no request needs no gateway.

DOOR = Door("http://127.0.0.1:9", "a-token", "frozenlake-1m")


def run(agent, task: AgentTask | None = None, seconds_max: float = 20.0) -> Verdict:
    return asyncio.run(run_agent(agent, DOOR, "run/0/1", task or AgentTask(3, "m"), seconds_max))


def walks(client, task: AgentTask) -> None:
    while not task.is_over:
        task.step(RIGHT)


async def walks_slowly(client, task: AgentTask) -> None:
    while not task.is_over:
        await asyncio.sleep(0)
        task.step("<answer>Down</answer>" if task.verdict.turns < 3 else RIGHT)


def test_an_agent_is_any_function_of_a_client_and_a_task():
    assert run(walks, AgentTask(3, "m", FrozenLake())) == Verdict(0.0, False, 2, 0)
    assert run(walks_slowly, AgentTask(3, "m", FrozenLake())) == Verdict(1.0, True, 6, 0)
    assert run(lambda client, task: task.seed / 2) == Verdict(1.5)
    assert run(lambda client, task: Verdict(0.25, True)) == Verdict(0.25, True)


def test_the_client_carries_the_trajectory():
    seen = []
    run(lambda client, task: seen.append((str(client.base_url), client.api_key, dict(client.default_headers))))
    [(url, token, headers)] = seen
    assert (url, token, headers["X-Session-ID"]) == ("http://127.0.0.1:9/v1/", "a-token", "run/0/1")


def test_agents_that_misbehave_lose_their_own_episode_in_words():
    released = threading.Event()

    def raises(client, task):
        raise ValueError("no idea")

    def hangs(client, task):
        released.wait()

    with pytest.raises(AgentFailed, match="agent raises failed: ValueError: no idea"):
        run(raises)
    with pytest.raises(AgentFailed, match=r"agent hangs took over 0\.05 s"):
        run(hangs, seconds_max=0.05)
    released.set()
    with pytest.raises(AgentFailed, match="returned 'won'"):
        run(lambda client, task: "won")
    with pytest.raises(AgentFailed, match="its reward is nan"):
        run(lambda client, task: float("nan"))


def test_an_environment_that_fails_ends_the_episode_even_if_the_agent_swallows_it():
    def swallows(client, task: AgentTask) -> float:
        with contextlib.suppress(EnvironmentFailed):
            task.step(RIGHT)
        return 1.0

    class Breaking(FrozenLake):
        def step(self, action: str) -> Outcome:
            raise OSError("thin ice")

    with pytest.raises(EnvironmentFailed, match="Breaking failed: OSError: thin ice"):
        run(swallows, AgentTask(3, "m", Breaking()))
