"""What to change first: one sentence by rules, from the figures of a plan.

The rules go from what makes lending pointless to what limits it: serving that misses its budgets alone, users that
lose, time that is not lent, a trainer or a long tail that more devices cannot help, and devices that bring nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rose.plan.curve import Curve
from rose.plan.fleet import Fleet
from rose.plan.job import RlJob
from rose.plan.windows import WindowResult, attainment, held_back, lost_share

ATTAINMENT_MIN, LOST_MAX = 0.99, 0.005
LENT_MIN, KV_MAX = 0.3, 0.8
LAST_QUARTER_MIN = 0.03  # of more steps, for the last quarter of the devices
TRAIN_SHARE_MAX, TAIL_SHARE_MAX = 0.5, 0.6

# What admission says (a part of it), and what to change then.
REMEDIES = (
    ("slack between decode steps", "raise --tpot-ms if your users allow it: too little time is left between tokens"),
    ("slack before the next request", "raise --ttft-ms if your users allow it"),
    ("a prompt waits", "lend more devices or spread traffic: prompts wait most of the time"),
    ("prompts take most", "add serving capacity: prompts alone keep the devices busy"),
    ("slots are kept free", "raise the number of sequences that an engine runs at once: bursts need the slots"),
    ("KV memory", "give the engines more KV memory, by a higher degree: bursts need it"),
    ("serving has work", "use --mode decode: in idle mode any request that runs stops lending"),
    ("taken long", "raise the time that users wait for an answer, if they do"),
)


def advice_of(fleet: Fleet, job: RlJob, results: Sequence[WindowResult], curve: Curve) -> str:
    """Return the sentence."""
    if not sum(result.requests for result in results):
        return "No request arrived in any window: borrow these devices whole, or give a trace with traffic."
    alone, lost, share = attainment(results, lent=False), lost_share(results), fmean(r.lent_share for r in results)
    if alone.value < ATTAINMENT_MIN:
        return (
            f"Mend serving first: alone it keeps only {alone.value:.1%} of requests within {fleet.budgets.ttft_s:g} s "
            f"and {fleet.budgets.tpot_s * 1000:g} ms a token; give it larger budgets or more devices."
        )
    if lost.value > LOST_MAX:
        return f"Do not lend at these budgets: {lost.value:.1%} of requests would miss them because of it."
    if max(result.peak_kv_share for result in results) > KV_MAX:
        return "Give serving more KV memory beside both models (a higher degree): its peak nearly fills it."
    if share < LENT_MIN:
        reason = next(iter(held_back(results)), "")
        remedy = next((text for part, text in REMEDIES if part in reason), f"look into `{reason}`")
        return f"Only {share:.0%} of the time is lent, mostly because of `{reason}`: {remedy}."
    return _of_the_job(job, curve)


def _of_the_job(job: RlJob, curve: Curve) -> str:
    last, before = curve.points[-1], curve.points[-2] if len(curve.points) > 1 else curve.points[-1]
    if not last.steps_per_day.value:
        return "Give the job devices of its own: what is lent is too little to end a step."
    if (job.train_s + job.sync_s) / last.step_s > TRAIN_SHARE_MAX:
        return (
            f"Speed up training: it takes {job.train_s / last.step_s:.0%} of a step on all devices; add training GPUs, "
            "or let it overlap with rollouts (overlap=yes)."
        )
    if curve.longest_s / last.rollout_s > TAIL_SHARE_MAX:
        return (
            f"Shorten the longest trajectories: one alone takes {curve.longest_s:.0f} of the {last.rollout_s:.0f} s of "
            "rollouts, and no further device helps."
        )
    gain = last.steps_per_day.value / before.steps_per_day.value - 1 if before.steps_per_day.value else 1.0
    if last.workers > before.workers and gain < LAST_QUARTER_MIN:
        rest = last.devices - before.devices
        return f"Borrow {before.devices} devices: the other {rest} add {max(0.0, gain):.1%} steps."
    return f"Borrow all {last.devices} devices: the last quarter of them still adds {max(0.0, gain):.0%} steps."
