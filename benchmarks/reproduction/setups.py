"""The paper's two set-ups, the workload, and every constant. Constants are stated once; no cell has one of its own.

No lengths of the paper's trajectories are published. What is published decides the workload: contexts to 32K tokens,
75 % of trajectories end within 30 % of the time of the longest, and the longest take five to ten times as long as most.
So turns have these quantiles: three quarters of them up to 15 of 50, the median seven, and 50 turns fill the context.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from scheduling.trajectories import Source

from rose.core.slo import Budgets
from rose.engines.profiles import StepProfile, load_profile
from rose.engines.roofline import H800, MODELS
from rose.plan.job import JobInputs, TaskLengths, draw
from rose.sim.batch_cluster import PlannedTrajectory
from rose.sim.prompt_difficulty import Difficulty, PromptSource
from rose.sim.step_costs import StepCosts

GROUP = 16  # published
LOAD = 0.2  # of what serving alone can do; the paper's trace has 18.9 % of compute
MFU = 0.3  # assumed
TRAINING_PASSES = 5  # forward, backward, and log-probabilities of the old and the reference policy
DELTA = 0.1  # of the weights' bytes, sent per version; the paper has more than 95 % of them unchanged
LINK_GBPS, LINK_LATENCY_S = 200.0, 0.001  # published; assumed
COLD_START_S = 5.0  # of a serverless turn: the paper's time to load a model from host memory
RELOAD_BYTES_S = 48e9  # per GPU from host memory: PCIe 5 x16 (64 GB/s) x 0.75, assumed
SPOT_BOOT_S = 120.0  # assumed: a machine, its engine and the weights
SPOT_UP_S = SPOT_BOOT_S / 0.07  # so that booting takes 7 % of the time: published, 6.8 to 7.3
SPOT_DOWN_S = 60.0  # until a preempted instance may boot again, assumed
STALENESS_MAX = 4  # versions, of asynchronous jobs; assumed
DEMAND_LOGIT = 6.8  # over a job: trajectories per step then vary 5.7x, as published, from Beta(0.6, 0.9)
LENGTHS = TaskLengths(
    turns=(3, 4, 5, 7, 15, 30, 50, 50), failed_turns=0, first_prompt_tokens=(400,) * 8,
    output_tokens=(100, 250, 400, 550, 750, 1000, 1600, 2000), added_tokens=(20, 25, 30, 40, 50, 60, 80, 100),
    env_s=(0.05,) * 8, source="published facts about the tail", assumed="tokens of a turn; games answer in 50 ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PaperSetup:
    """One of the paper's set-ups; `workers` are groups of `degree` GPUs. `groups` are trained on in a step."""

    name: str
    serving: StepProfile
    rollout: StepProfile
    budgets: Budgets
    model: str
    dedicated: int
    borrowed: int
    train_gpus: int
    groups: int
    dapo_steps: int  # of a whole DAPO job
    shrunk_by: int = 1

    def shrunk(self, by: int) -> PaperSetup:
        """Return a part of the set-up: fewer workers, trainers and groups in the same proportion."""
        return replace(
            self, dedicated=self.dedicated // by, borrowed=self.borrowed // by, train_gpus=self.train_gpus // by,
            groups=self.groups // by, shrunk_by=by,
        )  # fmt: skip

    @property
    def costs(self) -> StepCosts:
        model = MODELS[self.model]
        return StepCosts(
            model.parameters, self.train_gpus, H800.compute_flops, MFU, TRAINING_PASSES, model.weights_bytes * DELTA,
            LINK_GBPS, LINK_LATENCY_S,
        )  # fmt: skip

    @property
    def reload_s(self) -> float:
        return MODELS[self.model].weights_bytes / (self.rollout.tensor_parallel * RELOAD_BYTES_S)


SETUPS = (
    PaperSetup(
        "8b", load_profile("h800-qwen2.5-7b"), load_profile("h800-qwen3-8b"), Budgets(0.5, 0.15), "qwen3-8b", 8, 16, 8,
        16, 50,
    ),
    PaperSetup(
        "32b", load_profile("h800-qwen2.5-32b"), load_profile("h800-qwen3-32b"), Budgets(1.0, 0.45), "qwen3-32b", 4, 16,
        32, 64, 25,
    ),
)  # fmt: skip
SHRUNK_BY = {"8b": 2, "32b": 4}


def shrunk_setups() -> tuple[PaperSetup, ...]:
    return tuple(setup.shrunk(SHRUNK_BY[setup.name]) for setup in SETUPS)


def tail_group(name: str, chance: random.Random) -> list[PlannedTrajectory]:
    """Return one group of the stated workload."""
    drawn = draw(LENGTHS, JobInputs(batch=GROUP, group=GROUP), 32_768, chance.getrandbits(32))
    return [replace(one, name=f"{name}-{member}", group=name) for member, one in enumerate(drawn)]


def prompts(setup: PaperSetup, seed: int) -> PromptSource:
    return PromptSource(tail_group, Difficulty(gain=DEMAND_LOGIT / setup.dapo_steps), seed)


def recorded_prompts(source: Source, setup: PaperSetup, seed: int) -> PromptSource:
    """Return groups of recorded agents, with their recorded environment times."""

    def recorded_group(name: str, chance: random.Random) -> list[PlannedTrajectory]:
        picked = [source.played[chance.randrange(len(source.played))] for _ in range(GROUP)]
        return [PlannedTrajectory(f"{name}-{member}", name, turns) for member, turns in enumerate(picked)]

    return PromptSource(recorded_group, Difficulty(gain=DEMAND_LOGIT / setup.dapo_steps), seed)
