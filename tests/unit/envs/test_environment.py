"""The timeouts and checks around any environment."""

from __future__ import annotations

import asyncio
import math
import threading

import numpy as np
import pytest
from tests.unit.scripted_environment import QUICK, Scripted

from rose.envs import environment
from rose.envs.environment import EnvironmentFailed, EnvironmentTimeouts, Outcome, TimedEnvironment


@pytest.mark.parametrize("trouble", ["raise", "hang"])
@pytest.mark.parametrize("is_quick", [False, True])
def test_a_failed_reset_is_tried_again(trouble, is_quick):
    if is_quick and trouble == "hang":
        return  # an environment that says it never waits is taken at its word
    scripted = Scripted([trouble, trouble], is_quick)
    timed = TimedEnvironment(lambda: scripted, QUICK)
    assert asyncio.run(timed.reset(5)) == "seed 5"
    assert scripted.script == []
    timed.close()
    assert scripted.release.wait(10), "closing is done apart, and done"


def test_resets_are_bounded_and_the_error_says_what_failed():
    scripted = Scripted(["raise"] * 9)
    with pytest.raises(EnvironmentFailed, match=r"Scripted: reset\(5\) failed: ValueError: no such room"):
        asyncio.run(TimedEnvironment(lambda: scripted, QUICK).reset(5))
    assert len(scripted.script) == 6


def test_a_failed_step_is_not_repeated():
    async def run() -> None:
        timed = TimedEnvironment(lambda: scripted, QUICK)
        await timed.reset(1)
        await timed.step("a")

    scripted = Scripted(["answer", "hang"])
    with pytest.raises(EnvironmentFailed, match=r"step took over 0.05 s"):
        asyncio.run(run())
    assert scripted.script == []
    scripted.release.set()


def test_an_environment_that_cannot_be_made_is_environment_failed():
    def make() -> Scripted:
        raise OSError("no display")

    with pytest.raises(EnvironmentFailed, match="no display"):
        asyncio.run(TimedEnvironment(make, QUICK).reset(1))


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize(
    "answer, word",
    [
        (None, "it answered None, which is no Outcome"),
        (("text", 1.0, True), "which is no Outcome"),
        (Outcome("x", math.nan), "its reward is nan"),
        (Outcome("x", -math.inf), "its reward is -inf"),
        (Outcome("x", "1.0"), "its reward is '1.0', which is no number"),
        (Outcome("x", True), "which is no number"),
        (Outcome("x", 1.0, is_done="yes"), "not true or false"),
        (Outcome(b"bytes", 1.0), "which is no text"),
        (Outcome("\ud800", 1.0), "UnicodeEncodeError"),
        (Outcome("x" * (environment.OBSERVATION_CHARACTERS_MAX + 1)), "characters"),
        (SystemExit(3), "SystemExit: 3"),
        (StopIteration(), "StopIteration"),
        (asyncio.CancelledError(), "CancelledError"),
        (TimeoutError("of its own"), "of its own"),
    ],
)
def test_a_bad_outcome_is_environment_failed_with_its_reason(answer, word, is_quick):
    if is_quick and isinstance(answer, asyncio.CancelledError):
        return  # in place nobody can tell it from the loop's own word
    closed = threading.Event()

    class Nonsense(Scripted):
        def step(self, action: str) -> Outcome:
            if isinstance(answer, BaseException):
                raise answer
            return answer

        def close(self) -> None:
            closed.set()

    async def run() -> None:
        timed = TimedEnvironment(lambda: Nonsense([], is_quick), EnvironmentTimeouts(step_s_max=10.0))
        await timed.reset(1)
        await timed.step("a")

    with pytest.raises(EnvironmentFailed, match="Nonsense: step failed") as failed:
        asyncio.run(run())
    assert word in failed.value.what and closed.wait(10)


def test_a_reset_that_returns_no_text_is_tried_again():
    class Mute(Scripted):
        def reset(self, seed: int) -> str:
            return self.script.pop(0)

    mute = Mute([None, 7, "hello"])
    assert asyncio.run(TimedEnvironment(lambda: mute, QUICK).reset(1)) == "hello"


def test_numpy_rewards_and_flags_are_accepted():
    given = Outcome("x", np.float32(0.5), np.bool_(True), np.bool_(False))
    assert environment.checked_outcome(given) == Outcome("x", 0.5, True, False)


def test_a_cancelled_step_leaves_closing_to_the_call_that_runs():
    entered, closed = threading.Event(), threading.Event()

    class Slow(Scripted):
        def step(self, action: str) -> Outcome:
            entered.set()
            self.release.wait()
            assert not closed.is_set(), "closed under its feet"
            return Outcome("late")

        def close(self) -> None:
            closed.set()

    async def run() -> bool:
        timed = TimedEnvironment(lambda: slow, EnvironmentTimeouts())
        await timed.reset(1)
        playing = asyncio.create_task(timed.step("a"))
        await asyncio.to_thread(entered.wait)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        timed.close()
        return closed.is_set()

    slow = Slow([])
    assert asyncio.run(run()) is False
    slow.release.set()
    assert closed.wait(10), "it closes once the call has come back"


@pytest.mark.parametrize("is_quick", [False, True])
def test_an_error_in_close_is_ignored(is_quick):
    called = threading.Event()

    class Stubborn(Scripted):
        def close(self) -> None:
            called.set()
            raise OSError("no")

    async def run() -> str:
        timed = TimedEnvironment(lambda: Stubborn([], is_quick), QUICK)
        seen = await timed.reset(1)
        timed.close()
        return seen

    assert asyncio.run(run()) == "seed 1" and called.wait(10)


def test_too_many_hung_calls_are_an_error_of_their_own(monkeypatch):
    monkeypatch.setattr(environment, "_abandoned", {})
    monkeypatch.setattr(environment, "HUNG_THREADS_MAX", 2)
    scripted = Scripted(["hang"] * 3)
    with pytest.raises(EnvironmentFailed, match="2 calls to environments never came back"):
        asyncio.run(TimedEnvironment(lambda: scripted, QUICK).reset(1))
    scripted.release.set()
