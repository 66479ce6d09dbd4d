"""What an environment is: a task in turns, in text, with a seed.

    reset(seed) -> what the agent sees first
    step(action text) -> what it sees next, the reward of this step, whether the episode is over

The same seed and the same actions give the same episode. An environment is a foreign program: it may be slow, raise,
hang, or answer with nonsense. `Guarded` stands between it and the loop that plays: a call runs apart from the event
loop, with a time-out; what it answers is looked at before anybody learns from it (text that is text, a reward that is a
number); what goes wrong becomes `EnvironmentFailed`, and a failed reset is tried again on a fresh environment. A failed
step is not: nobody knows what state it left, so the caller plays the episode anew or gives it up.

A thread that hangs cannot be stopped, only left behind. It does not keep the process from ending, and too many of
them that are overdue are an error of their own. While a call runs, nobody else touches its environment: one that was
left behind is closed by its own thread, if that ever comes back. An environment that computes for microseconds says so
(`is_quick`) and is called in place. Making one must be quick: what takes time belongs into `reset`.
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
"""Where seeds begin: episodes that are trained on and those that are only evaluated on never share one."""

HUNG_THREADS_MAX = 64
"""A hung call costs a thread for ever; an environment that hangs this often is broken, not slow."""

OBSERVATION_CHARACTERS_MAX = 1 << 20
"""No model reads more than this; tokenising it would hold up every other episode."""

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
    """An environment raised, answered nonsense or did not answer in time."""


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
                self._environment = self._environment or self._made()
                limit_s = self._patience.reset_s_max
                return await self._ask(f"reset({seed})", lambda it: it.reset(seed), sensible_text, limit_s)
            except EnvironmentFailed:
                if not tries_left:
                    raise
        raise AssertionError("resets_max is at least one")

    async def step(self, action: str) -> Outcome:
        """What the action led to. After EnvironmentFailed only `reset` may follow."""
        return await self._ask("step", lambda it: it.step(action), sensible_outcome, self._patience.step_s_max)

    def close(self) -> None:
        """Whatever the environment makes of it; one that takes its time does so apart."""
        if self._environment is not None:
            _close(self._environment)
            self._environment = None

    def _made(self) -> Environment:
        try:
            return self._make()
        except RoseError:
            raise
        except (Exception, SystemExit) as error:
            raise EnvironmentFailed(f"an environment could not be made: {_shown(error)}") from error

    async def _ask(
        self, what: str, call: Callable[[Environment], Any], sensible: Callable[[Any], Result], seconds_max: float
    ) -> Result:
        """The answer, if it makes sense. From the call until then the environment is nobody's but the call's."""
        environment, self._environment = self._environment, None
        assert environment is not None, "step before reset, or after a failure"
        who = type(environment).__name__
        try:
            if environment.is_quick:
                answer = sensible(call(environment))
            else:
                answer = sensible(await ApartCall(environment, lambda: call(environment)).answer(seconds_max))
        except TookTooLong as error:
            raise EnvironmentFailed(f"{who}: {what} took over {seconds_max:g} s", hint=SLOW_HINT) from error
        except (ConfigError, EnvironmentFailed):
            _close(environment)
            raise
        except (Exception, SystemExit) as error:
            _close(environment)
            raise EnvironmentFailed(f"{who}: {what} failed: {_shown(error)}") from error
        self._environment = environment
        return answer


SLOW_HINT = "see what it waits for, or raise the time it may take"


def sensible_text(answer: Any) -> str:
    """An observation that can be shown to a model. Raises TypeError, ValueError."""
    if not isinstance(answer, str):
        raise TypeError(f"it answered {answer!r:.80}, which is no text")
    if len(answer) > OBSERVATION_CHARACTERS_MAX:
        raise ValueError(f"it answered with {len(answer)} characters; {OBSERVATION_CHARACTERS_MAX} are allowed")
    answer.encode()  # half a surrogate pair is no text: no tokenizer takes it
    return answer


def sensible_outcome(answer: Any) -> Outcome:
    """An outcome that can be learnt from. Raises TypeError, ValueError."""
    if not isinstance(answer, Outcome):
        raise TypeError(f"it answered {answer!r:.80}, which is no Outcome")
    reward = answer.reward
    if not isinstance(reward, numbers.Real) or isinstance(reward, bool):
        raise TypeError(f"its reward is {reward!r:.80}, which is no number")
    if not math.isfinite(reward):
        raise ValueError(f"its reward is {float(reward)}, which nothing can be learnt from")
    flags = (answer.is_done, answer.is_success, answer.is_valid)
    if not all(isinstance(flag, (bool, np.bool_)) for flag in flags):
        raise TypeError(f"is_done, is_success and is_valid are {flags!r:.80}, not true or false")
    return Outcome(sensible_text(answer.observation), float(reward), *map(bool, flags))


class TookTooLong(Exception):
    """Nobody waits for it any more; it may still be running."""


_left: dict[threading.Thread, float] = {}
"""Calls that nobody waits for any more, and when each should have come back."""


class Closable(Protocol):
    is_quick: bool

    def close(self) -> None: ...


class ApartCall:
    """One call, in a thread that does not keep the process alive. `owned` is what it works on, and nobody else."""

    def __init__(self, owned: Closable, call: Callable[[], Any]) -> None:
        self._owned, self._call = owned, call
        self._lock = threading.Lock()
        self._is_over = self._is_left = False

    async def answer(self, seconds_max: float) -> Any:
        """What the call returns or raises, or TookTooLong. Whoever stops waiting leaves what it owns to it."""
        overdue = _overdue()
        if overdue >= HUNG_THREADS_MAX:
            hint = "see what the environment waits for; the calls are still waiting"
            raise EnvironmentFailed(f"{overdue} calls to environments never came back", hint=hint)
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        thread = threading.Thread(target=self._run, args=(loop, waiting), daemon=True, name="environment")
        due_s = time.monotonic() + seconds_max
        thread.start()
        try:
            async with asyncio.timeout(seconds_max):
                result, error = await waiting
        except TimeoutError as late:
            self._leave(thread, time.monotonic())
            raise TookTooLong from late
        except asyncio.CancelledError:
            self._leave(thread, due_s)
            raise
        if isinstance(error, Exception):
            raise error
        if error is not None:  # such as SystemExit, which is no word for the loop to hear
            raise RuntimeError(_shown(error)) from error
        return result

    def _run(self, loop: asyncio.AbstractEventLoop, waiting: asyncio.Future[Any]) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = self._call()
        except BaseException as raised:
            error = raised
        with self._lock:
            self._is_over = True
            is_left = self._is_left
        if is_left:
            _close_quietly(self._owned)
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits for this any more
            loop.call_soon_threadsafe(_settle, waiting, (result, error))

    def _leave(self, thread: threading.Thread, due_s: float) -> None:
        with self._lock:
            self._is_left = True
            is_over = self._is_over
        if is_over:
            _close(self._owned)
        else:
            _left[thread] = due_s


def _overdue() -> int:
    for thread in [thread for thread in _left if not thread.is_alive()]:
        del _left[thread]
    now_s = time.monotonic()
    return sum(due_s <= now_s for due_s in _left.values())


def _settle(waiting: asyncio.Future[Any], answer: tuple[Any, BaseException | None]) -> None:
    if not waiting.done():
        waiting.set_result(answer)


def _close(environment: Closable) -> None:
    if environment.is_quick:
        _close_quietly(environment)
    else:
        threading.Thread(target=_close_quietly, args=(environment,), daemon=True, name="closing").start()


def _close_quietly(environment: Closable) -> None:
    with contextlib.suppress(Exception, SystemExit):  # it is not wanted any more: how it ends changes nothing
        environment.close()


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
