"""What an environment is: a task in turns, in text, with a seed.

    reset(seed) -> what the agent sees first
    step(action text) -> what it sees next, the reward of this step, whether the episode is over

The same seed and the same actions give the same episode. An environment is a foreign program: it may be slow, raise
or hang. `Guarded` stands between it and the loop that plays: a call runs apart from the event loop, with a
time-out; what goes wrong becomes `EnvironmentFailed`, and a failed reset is tried again on a fresh environment. A
failed step is not: nobody knows what state it left, so the caller plays the episode anew or gives it up.

A thread that hangs cannot be stopped, only left behind. It does not keep the process from ending, and too many of
them are an error of their own. An environment that computes for microseconds says so (`is_quick`) and is called in
place.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rose.errors import RoseError, Unavailable

HUNG_THREADS_MAX = 64
"""A hung call costs a thread for ever; an environment that hangs this often is broken, not slow."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one action led to. `is_success` counts when `is_done`; an invalid action is one that was not understood."""

    observation: str
    reward: float = 0.0
    is_done: bool = False
    is_success: bool = False
    is_valid: bool = True


class Environment(Protocol):
    """One episode at a time; `reset` begins another."""

    is_quick: bool  # computes for microseconds and waits for nothing

    def reset(self, seed: int) -> str: ...

    def step(self, action: str) -> Outcome: ...

    def close(self) -> None: ...


class EnvironmentFailed(Unavailable):
    """An environment raised or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an environment may take, and how often a failed reset is tried again."""

    reset_s_max: float = 60.0
    step_s_max: float = 30.0
    resets_max: int = 3


class Guarded:
    """An environment that may misbehave. Not for two episodes at once."""

    def __init__(self, make: Callable[[], Environment], patience: Patience | None = None) -> None:
        self._make = make
        self._patience = patience or Patience()
        self._environment: Environment | None = None

    async def reset(self, seed: int) -> str:
        """The first observation. Raises EnvironmentFailed after `resets_max` tries."""
        for tries_left in reversed(range(self._patience.resets_max)):
            try:
                return await self._try_reset(seed)
            except EnvironmentFailed:
                self._environment = None
                if not tries_left:
                    raise
        raise AssertionError("resets_max is at least one")

    async def step(self, action: str) -> Outcome:
        """What the action led to. After EnvironmentFailed only `reset` may follow."""
        environment = self._environment
        assert environment is not None, "step before reset"
        try:
            return await self._call("step", lambda: environment.step(action), self._patience.step_s_max)
        except EnvironmentFailed:
            self._environment = None
            raise

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    async def _try_reset(self, seed: int) -> str:
        if self._environment is None:
            self._environment = self._made()
        environment = self._environment
        return await self._call(f"reset({seed})", lambda: environment.reset(seed), self._patience.reset_s_max)

    def _made(self) -> Environment:
        try:
            return self._make()
        except RoseError:
            raise
        except Exception as error:
            raise EnvironmentFailed(f"an environment could not be made: {_shown(error)}") from error

    async def _call(self, what: str, function: Callable[[], Result], seconds_max: float) -> Result:
        environment = self._environment
        assert environment is not None
        try:
            if environment.is_quick:
                return function()
            return await asyncio.wait_for(_in_thread(function), seconds_max)
        except TimeoutError as error:
            raise EnvironmentFailed(f"{_name(environment)}: {what} took over {seconds_max:g} s") from error
        except RoseError:
            raise
        except Exception as error:
            raise EnvironmentFailed(f"{_name(environment)}: {what} failed: {_shown(error)}") from error


_hung: set[threading.Thread] = set()


async def _in_thread(function: Callable[[], Result]) -> Result:
    """Run apart from the loop, in a thread that does not keep the process alive."""
    _hung.difference_update([thread for thread in _hung if not thread.is_alive()])
    if len(_hung) >= HUNG_THREADS_MAX:
        hint = "see what the environment waits for; the calls are still waiting"
        raise EnvironmentFailed(f"{len(_hung)} calls to environments never came back", hint=hint)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Result] = loop.create_future()
    thread = threading.Thread(target=_run, args=(function, loop, answer), daemon=True, name="environment")
    thread.start()
    try:
        return await answer
    except asyncio.CancelledError:
        _hung.add(thread)
        raise


def _run(function: Callable[[], Result], loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Result]) -> None:
    result: Result | None = None
    error: Exception | None = None
    try:
        result = function()
    except Exception as raised:
        error = raised
    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits for this any more
        loop.call_soon_threadsafe(_settle, answer, result, error)


def _settle(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)


def _name(environment: Environment) -> str:
    return type(environment).__name__


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
