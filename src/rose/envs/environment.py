"""The protocol of environments (tasks in turns, in text, with a seed), and the timeouts and checks around them.

The same seed and the same actions give the same episode. An environment is a foreign program that may be slow, raise,
hang or return garbage. `TimedEnvironment` runs each call in a daemon thread with a timeout, checks what it returns, and
turns every failure into `EnvironmentFailed`. It repeats a failed reset on a fresh environment, but no failed step,
whose effect is unknown. A thread that hangs cannot be stopped, so it is abandoned: it alone may touch its environment,
and closes it if it ever returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import numbers
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from rose.errors import ConfigError, RoseError, Unavailable

TRAINING_SEEDS, HELD_OUT_SEEDS = 0, 1 << 40
"""First seeds of both kinds: episodes that are trained on and those that are only evaluated on never share one."""

HUNG_THREADS_MAX = 64
"""A hung call costs a thread for ever; an environment that hangs this often is broken, not slow."""

OBSERVATION_CHARACTERS_MAX = 1 << 20
"""No model reads more than this; tokenising it would hold up every other episode."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one action. `is_success` counts when `is_done`; an invalid action was not understood."""

    observation: str
    reward: float = 0.0
    is_done: bool = False
    is_success: bool = False
    is_valid: bool = True


class Environment(Protocol):
    """A task that an agent plays, one episode at a time. `reset` begins another episode and returns its observation."""

    is_quick: bool  # computes for microseconds and waits for nothing, so it is called in place

    def reset(self, seed: int) -> str: ...

    def step(self, action: str) -> Outcome: ...

    def close(self) -> None: ...


class Closable(Protocol):
    is_quick: bool

    def close(self) -> None: ...


class EnvironmentFailed(Unavailable):
    """A failure of an environment: it raised, returned nonsense or did not answer in time."""


class CallTimedOut(Exception):
    """A timeout of a call, which may still be running."""


@dataclass(frozen=True, slots=True)
class EnvironmentTimeouts:
    """The timeouts of an environment, and how often a failed reset is tried again."""

    reset_s_max: float = 60.0
    step_s_max: float = 30.0
    resets_max: int = 3


class TimedEnvironment:
    """An environment behind timeouts and checks, for one episode at a time.

    Making an environment must be quick: what takes time belongs in its `reset`.
    """

    def __init__(self, make: Callable[[], Environment], timeouts: EnvironmentTimeouts | None = None) -> None:
        self._make = make
        self._timeouts = timeouts or EnvironmentTimeouts()
        self._environment: Environment | None = None

    async def reset(self, seed: int) -> str:
        """Return the first observation. Raises EnvironmentFailed after `resets_max` tries."""
        limit_s = self._timeouts.reset_s_max
        for tries_left in reversed(range(self._timeouts.resets_max)):
            try:
                self._environment = self._environment or self._new()
                return await self._call(f"reset({seed})", lambda it: it.reset(seed), checked_text, limit_s)
            except EnvironmentFailed:
                if not tries_left:
                    raise
        raise AssertionError("resets_max is at least one")

    async def step(self, action: str) -> Outcome:
        """Return the outcome of an action. After EnvironmentFailed only `reset` may follow."""
        return await self._call("step", lambda it: it.step(action), checked_outcome, self._timeouts.step_s_max)

    def close(self) -> None:
        """Close the environment, in a thread of its own if that may take time."""
        if self._environment is not None:
            _close(self._environment)
            self._environment = None

    def _new(self) -> Environment:
        try:
            return self._make()
        except RoseError:
            raise
        except (Exception, SystemExit) as error:
            raise EnvironmentFailed(f"an environment could not be made: {error_text(error)}") from error

    async def _call(
        self, what: str, call: Callable[[Environment], Any], checked: Callable[[Any], Result], seconds_max: float
    ) -> Result:
        """Return the checked result of a call. Until it ends, only the call may touch the environment."""
        environment, self._environment = self._environment, None
        assert environment is not None, "step before reset, or after a failure"
        name = type(environment).__name__
        try:
            if environment.is_quick:
                result = checked(call(environment))
            else:
                result = checked(await ThreadCall(environment, lambda: call(environment)).result(seconds_max))
        except CallTimedOut as error:
            hint = "see what it waits for, or raise the time it may take"
            raise EnvironmentFailed(f"{name}: {what} took over {seconds_max:g} s", hint=hint) from error
        except (ConfigError, EnvironmentFailed):
            _close(environment)
            raise
        except (Exception, SystemExit) as error:
            _close(environment)
            raise EnvironmentFailed(f"{name}: {what} failed: {error_text(error)}") from error
        self._environment = environment
        return result


def checked_text(value: Any) -> str:
    """Return an observation that a model can read. Raises TypeError or ValueError for any other."""
    if not isinstance(value, str):
        raise TypeError(f"it answered {value!r:.80}, which is no text")
    if len(value) > OBSERVATION_CHARACTERS_MAX:
        raise ValueError(f"it answered with {len(value)} characters; {OBSERVATION_CHARACTERS_MAX} are allowed")
    value.encode()  # no tokenizer takes half a surrogate pair
    return value


def checked_outcome(value: Any) -> Outcome:
    """Return an outcome to learn from. Raises TypeError or ValueError for any other."""
    if not isinstance(value, Outcome):
        raise TypeError(f"it answered {value!r:.80}, which is no Outcome")
    reward = value.reward
    if not isinstance(reward, numbers.Real) or isinstance(reward, bool):
        raise TypeError(f"its reward is {reward!r:.80}, which is no number")
    if not math.isfinite(reward):
        raise ValueError(f"its reward is {float(reward)}, which nothing can be learnt from")
    flags = (value.is_done, value.is_success, value.is_valid)
    if not all(isinstance(flag, (bool, np.bool_)) for flag in flags):
        raise TypeError(f"is_done, is_success and is_valid are {flags!r:.80}, not true or false")
    return Outcome(checked_text(value.observation), float(reward), *map(bool, flags))


def error_text(error: BaseException) -> str:
    """Return an error's type and text in one line of bounded length."""
    return f"{type(error).__name__}: {error}"[:300]


_abandoned: dict[threading.Thread, float] = {}
"""Threads of abandoned calls, and when each should have returned."""


class ThreadCall:
    """One call in a daemon thread. `owned` is the environment that only this call may touch meanwhile."""

    def __init__(self, owned: Closable, call: Callable[[], Any]) -> None:
        self._owned, self._function = owned, call
        self._lock = threading.Lock()
        self._is_over = self._is_abandoned = False

    async def result(self, seconds_max: float) -> Any:
        """Return or raise what the call does, or raise CallTimedOut; then the call's thread closes what it owns."""
        now_s = time.monotonic()
        for thread in [thread for thread in _abandoned if not thread.is_alive()]:
            del _abandoned[thread]
        overdue = sum(due_s <= now_s for due_s in _abandoned.values())
        if overdue >= HUNG_THREADS_MAX:
            hint = "see what the environment waits for; the calls are still waiting"
            raise EnvironmentFailed(f"{overdue} calls to environments never came back", hint=hint)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        thread = threading.Thread(target=self._run, args=(loop, future), daemon=True, name="environment")
        thread.start()
        try:
            async with asyncio.timeout(seconds_max):
                value, error = await future
        except TimeoutError as late:
            self._abandon(thread, time.monotonic())
            raise CallTimedOut from late
        except asyncio.CancelledError:
            self._abandon(thread, now_s + seconds_max)
            raise
        if isinstance(error, Exception):
            raise error
        if error is not None:  # such as SystemExit, which must not reach the loop
            raise RuntimeError(error_text(error)) from error
        return value

    def _run(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = self._function()
        except BaseException as raised:
            error = raised
        with self._lock:
            self._is_over = True
            is_abandoned = self._is_abandoned
        if is_abandoned:
            _close_quietly(self._owned)
            return

        def settle() -> None:
            if not future.done():
                future.set_result((value, error))

        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the caller
            loop.call_soon_threadsafe(settle)

    def _abandon(self, thread: threading.Thread, due_s: float) -> None:
        with self._lock:
            self._is_abandoned = True
            is_over = self._is_over
        if is_over:
            _close(self._owned)
        else:
            _abandoned[thread] = due_s


def _close(environment: Closable) -> None:
    if environment.is_quick:
        _close_quietly(environment)
    else:
        threading.Thread(target=_close_quietly, args=(environment,), daemon=True, name="closing").start()


def _close_quietly(environment: Closable) -> None:
    with contextlib.suppress(Exception, SystemExit):  # the environment is discarded: how it ends changes nothing
        environment.close()
