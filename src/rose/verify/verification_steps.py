"""The steps of the kit as a table: what each one shows, what it needs, and how long it takes on a GPU.

A step's function is named and not imported, so that the list can be shown in a moment. The order matters: what needs
no engine comes first, what measures users comes before what breaks things, and what restarts both engines comes last.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.verify.step_context import StepContext

Need = Literal["gpu", "driver", "vllm", "pool", "mps"]
ON_GPU_ONLY: frozenset[Need] = frozenset({"gpu", "driver"})  # a trial on a CPU does without these


@dataclass(frozen=True, slots=True)
class VerificationStep:
    """One step. With `is_for_cpu` it can be tried on a CPU device too, where its figures say nothing about GPUs."""

    name: str
    shows: str
    needs: tuple[Need, ...]
    minutes: float
    function: str
    is_for_cpu: bool = True

    def needs_on(self, *, is_cpu: bool) -> tuple[str, ...]:
        """Return what must be there to run the step on a device of this kind."""
        if is_cpu and self.is_for_cpu:
            return tuple(need for need in self.needs if need not in ON_GPU_ONLY)
        return self.needs

    def load(self) -> Callable[[StepContext], Awaitable[None]]:
        """Return the function of this step."""
        module, _, name = self.function.partition(":")
        return cast("Callable[[StepContext], Awaitable[None]]", getattr(importlib.import_module(module), name))


_ENGINES: tuple[Need, ...] = ("gpu", "vllm")

STEPS = (
    VerificationStep(
        "machine",
        "driver, CUDA, torch, vLLM, GPU, MIG, MPS and compute mode; and that two processes may use the GPU",
        (),
        0.3,
        "rose.verify.machine_steps:machine",
    ),
    VerificationStep(
        "page-calls",
        "how long the driver takes to make, share, map, unmap and wipe a page of KV memory",
        ("gpu", "driver"),
        0.3,
        "rose.verify.page_steps:page_calls",
    ),
    VerificationStep(
        "page-owner-killed",
        "pages of a killed process are free at once, and hold nothing of it",
        ("gpu", "driver"),
        0.3,
        "rose.verify.page_steps:page_owner_killed",
    ),
    VerificationStep(
        "page-burst",
        "pages move to serving while a burst needs half of the pool and rollouts hold 70 %",
        ("gpu", "driver"),
        0.3,
        "rose.verify.page_steps:page_burst",
    ),
    VerificationStep(
        "wrong-scheduler",
        "vLLM refuses the scheduler for the other kind of scheduling, and names the right one",
        _ENGINES,
        0.8,
        "rose.verify.load_steps:wrong_scheduler",
    ),
    VerificationStep(
        "plain",
        "latencies of vLLM without ROSE's scheduler",
        _ENGINES,
        2.7,
        "rose.verify.load_steps:plain",
    ),
    VerificationStep(
        "serving-alone",
        "latencies with ROSE's scheduler and without rollouts, twice: what it costs, and the spread of this machine",
        _ENGINES,
        4.1,
        "rose.verify.load_steps:serving_alone",
    ),
    VerificationStep(
        "page-calls-busy",
        "the calls of `page-calls` while users are served, and what users see of them",
        ("gpu", "driver", "vllm"),
        0.4,
        "rose.verify.page_steps:page_calls_busy",
    ),
    VerificationStep(
        "idle",
        "the same requests while rollouts run in mode `idle`",
        _ENGINES,
        2.9,
        "rose.verify.load_steps:idle",
    ),
    VerificationStep(
        "decode",
        "the same requests while rollouts run in mode `decode`",
        _ENGINES,
        1.7,
        "rose.verify.load_steps:decode",
    ),
    VerificationStep(
        "kill-rollouts",
        "kill -9 of the rollout engine under load: users notice nothing, the agent restarts it",
        _ENGINES,
        2.0,
        "rose.verify.failure_steps:kill_rollouts",
    ),
    VerificationStep(
        "stop-rollouts",
        "the same with SIGSTOP: a rollout engine that hangs and holds memory",
        _ENGINES,
        2.0,
        "rose.verify.failure_steps:stop_rollouts",
    ),
    VerificationStep(
        "kill-agent",
        "kill -9 of `rose lend vllm`: its rollout engine ends, users notice nothing",
        _ENGINES,
        1.5,
        "rose.verify.failure_steps:kill_agent",
    ),
    VerificationStep(
        "weight-swap",
        "new weights in a running engine: tokens equal those of an engine started with them",
        _ENGINES,
        2.5,
        "rose.verify.weight_steps:weight_swap",
    ),
    VerificationStep(
        "time-slices",
        "what users pay if rollouts run whenever the GPU lets them, by time slices",
        _ENGINES,
        1.8,
        "rose.verify.load_steps:time_slices",
        is_for_cpu=False,
    ),
    VerificationStep(
        "pool-burst",
        "both engines on one pool of KV memory: a burst of users gets pages that rollouts hold",
        ("gpu", "driver", "vllm", "pool"),
        3.0,
        "rose.verify.pool_steps:pool_burst",
    ),
    VerificationStep(
        "mps",
        "what they pay under MPS, where its daemon runs already; and what a fault does there",
        ("gpu", "vllm", "mps"),
        2.7,
        "rose.verify.load_steps:mps",
        is_for_cpu=False,
    ),
)


def steps_named(names: Sequence[str]) -> tuple[VerificationStep, ...]:
    """Return the steps of these names in their usual order, or all of them. Raises ConfigError for an unknown name."""
    known = [step.name for step in STEPS]
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no step `{name}`", hint=f"there are {', '.join(known)}")
    return tuple(step for step in STEPS if not names or step.name in names)
