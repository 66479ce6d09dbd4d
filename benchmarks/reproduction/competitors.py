"""Every competitor as a router, a loop and a supply of devices, in the same simulator, and its runs."""

from __future__ import annotations

from dataclasses import dataclass

from reproduction.setups import (
    COLD_START_S,
    SPOT_BOOT_S,
    SPOT_DOWN_S,
    SPOT_UP_S,
    STALENESS_MAX,
    PaperSetup,
)
from reproduction.sharing import Shared, spread
from rose.config.server_settings import GatewaySettings
from rose.core.router import Router
from rose.sim.job_loop import Algorithm, JobPool, JobResult, JobShape, play_job
from rose.sim.prompt_difficulty import PromptSource
from rose.sim.supply_terms import SupplyTerms, spot_offers, unshared_timeline
from rose.sim.trajectory_router import TrajectoryRouter

ASYNC_WARM_STEPS = 2  # not counted: all trajectories begin at once
DAPO_MORE_STEPS = 1  # the steps are the first, the last and those between at equal distances
SPOT_SPAN_S = 1e6


@dataclass(frozen=True, slots=True)
class Competitor:
    """One way to run a job. `supply` names a way of sharing, `spot`, `serverless` or nothing."""

    name: str
    algorithm: Algorithm
    router: str  # `paper`: 16 trajectories on each worker and a stall of 2 s; `cost`: ours
    supply: str = ""


COMPETITORS = (
    Competitor("ROLL GRPO, fixed pool", "grpo", "paper"),
    Competitor("ROLL DAPO, fixed pool", "dapo", "paper"),
    Competitor("AReaL, fixed pool", "asynchronous", "paper"),
    Competitor("RLBoost, spot", "grpo", "paper", "spot"),
    Competitor("serverless", "grpo", "paper", "serverless"),
    Competitor("Prism, no admission", "grpo", "paper", "prism"),
    Competitor("ServerlessLLM, reloads", "grpo", "paper", "reload"),
    Competitor("paper's rules 1.0 GRPO", "grpo", "paper", "paper_1.0"),
    Competitor("paper's rules 0.7 GRPO", "grpo", "paper", "paper_0.7"),
    Competitor("paper's rules 1.0 DAPO", "dapo", "paper", "paper_1.0"),
    Competitor("paper's rules 1.0 asynchronous", "asynchronous", "paper", "paper_1.0"),
    Competitor("ours GRPO, fixed pool", "grpo", "cost"),
    Competitor("ours GRPO", "grpo", "cost", "decode"),
    Competitor("ours DAPO", "dapo", "cost", "decode"),
    Competitor("ours asynchronous", "asynchronous", "cost", "decode"),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run gave."""

    trained_per_s: float
    rollout_s: float
    train_s: float
    rollout_share: float
    allocation_share: float
    demand_ratio: float
    evictions: int


def run(
    competitor: Competitor, setup: PaperSetup, shared: dict[str, Shared], prompts: PromptSource, steps: int, seed: int
) -> Figures:
    """Play a job of so many steps; those of DAPO are spread over the whole job."""
    is_asynchronous = competitor.algorithm == "asynchronous"
    steps += {"grpo": 0, "dapo": DAPO_MORE_STEPS, "asynchronous": ASYNC_WARM_STEPS + 1}[competitor.algorithm]
    stride = (setup.dapo_steps - 1) // (steps - 1) if competitor.algorithm == "dapo" else 1
    shape = JobShape(competitor.algorithm, setup.groups, steps, setup.dedicated, stride, STALENESS_MAX)
    patience_s = GatewaySettings().gated_s
    router = Router("cost", blocked_patience_s=patience_s) if competitor.router == "cost" else TrajectoryRouter()
    result = play_job(shape, setup.rollout, router, prompts, setup.costs, pool_of(competitor, setup, shared, seed))
    rate = result.steady_per_s(ASYNC_WARM_STEPS) if is_asynchronous else result.trained_per_s
    return figures_of(result, rate)


def figures_of(result: JobResult, rate: float) -> Figures:
    count = len(result.steps)
    return Figures(
        rate, result.rollout_s, sum(step.train_s for step in result.steps) / count,
        result.rollout_s * count / result.seconds, result.allocation_share, result.demand_ratio,
        sum(step.evictions for step in result.steps),
    )  # fmt: skip


def pool_of(competitor: Competitor, setup: PaperSetup, shared: dict[str, Shared], seed: int) -> JobPool:
    if not competitor.supply:
        return JobPool()
    if competitor.supply in ("spot", "serverless"):
        lines = (unshared_timeline(setup.rollout),) * setup.borrowed
        terms = SupplyTerms(cold_start_s=COLD_START_S)
        if competitor.supply == "spot":
            offers = spot_offers(setup.borrowed, SPOT_UP_S, SPOT_DOWN_S, SPOT_SPAN_S, seed)
            terms = SupplyTerms(SPOT_BOOT_S, offers=offers, is_kept=True)
        return JobPool(lambda now_s: lines, terms)
    usable = [line for line in shared[competitor.supply].timelines if max(line.kv_tokens) > 0 and line.lent_s > 0]
    lent = spread(usable, setup.borrowed) if usable else ()
    return JobPool(lambda now_s: lent)
