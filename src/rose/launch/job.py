"""The synchronous loop of a run: play groups, learn from them, publish the weights, go on.

A step begins when its first group is drawn and ends when the workers have the new weights. Evaluations, checkpoints and
the switching of a comparison happen between steps and are not part of any. Where a turn is computed, and what became of
the worker that had it before, this loop does not know; it waits until the gateway has the answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rose.errors import RoseError, Unavailable
from rose.launch.folder import RunFolder
from rose.launch.learning import CHANGES, Learner, shown
from rose.launch.lending import Lending
from rose.launch.notes import commonest
from rose.launch.progress import Screen, step_line
from rose.launch.rollouts import Played, Rollouts
from rose.launch.serving import ServingLog
from rose.launch.settings import RunSettings
from rose.launch.start import Start
from rose.launch.watching import PoolSample, PoolWatch
from rose.rollout.client import GatewayClient

if TYPE_CHECKING:
    from rose.train.step import StepReport
    from rose.weights.publish import Published

PUBLISH_S_MAX = 60.0  # a worker that has not taken a version by then is left behind; it gets no turns until it has
WITH_AND_WITHOUT = (True, False, False, True)
MEND = "mend the environment, or give it more time (patience.reset_s_max, patience.step_s_max)"


@dataclass(slots=True)
class Job:
    """What the loop works with. `costs` tells the processor time by role so far."""

    settings: RunSettings
    folder: RunFolder
    client: GatewayClient
    learner: Learner
    rollouts: Rollouts
    pool: PoolWatch
    lending: Lending | None
    serving: ServingLog
    screen: Screen
    costs: Callable[[], dict[str, float]]
    start: Start = field(default_factory=Start)
    steps_s: list[float] = field(default_factory=list)

    async def run(self) -> None:
        """To the last step. Raises what ends a run early."""
        begun, last = self.start.step, self.settings.steps
        if not self.start.is_evaluated and (not begun or _is_due(begun, self.settings.evaluation.every_steps, last)):
            await self._evaluate(begun)
        await self._keep_costs("begin")
        for step in range(begun + 1, last + 1):
            await self._step(step)
            await self._keep_breaches(step)
            if _is_due(step, self.settings.checkpoint.every_steps, last):
                await self.learner.write_checkpoint(step, self._rollouts_state())
            if _is_due(step, self.settings.evaluation.every_steps, last):
                await self._keep_costs("pause")
                await self._evaluate(step)
                await self._keep_costs("resume")
        await self._keep_costs("end")
        await self.compare_weights()
        await self._keep_breaches(last)
        self.folder.record("finished", step=last)

    def _rollouts_state(self) -> dict[str, Any]:
        return self.rollouts.state()

    async def _step(self, step: int) -> None:
        is_borrowed = await self._lend(step)
        live = self.screen.live
        live.step, live.phase = step, "rollouts"
        before, costs_before = await self.pool.look(), self.costs()
        began_s, tokens_before = time.monotonic(), self.pool.counts.get("tokens", 0)
        played = await self.rollouts.play_step()
        played_s, after = time.monotonic(), await self.pool.look()
        pool_tokens = grown(tokens_before, self.pool.counts.get("tokens", 0))
        live.phase = "learning"
        report = await self.learn(played)
        learnt_s = time.monotonic()
        live.phase = "publishing"
        changed = report.verdict in CHANGES
        weights = await self.publish(await self.learner.publish()) if changed else {}
        ended_s = time.monotonic()
        spent = {role: round(now - costs_before.get(role, 0.0), 3) for role, now in self.costs().items()}
        line = {
            "step": step,
            "is_borrowed": is_borrowed,
            "began_s": round(began_s, 4),
            "rollout_s": round(played_s - began_s, 4),
            "train_s": round(learnt_s - played_s, 4),
            "publish_s": round(ended_s - learnt_s, 4),
            "step_s": round(ended_s - began_s, 4),
            "version": self.learner.published.label,
            **weights,
            **shown_played(played),
            "pool_tokens": pool_tokens,
            "turns_by_pool": turns_between(before, after),
            "cpu_s": spent,
            **shown(report),
        }
        self._tell(line)

    def _tell(self, line: dict[str, Any]) -> None:
        self.folder.record("step", **line)
        self.folder.record("balance", step=line["step"], **asdict(self.rollouts.ledger.balance()))
        self.steps_s.append(line["step_s"])
        left_s = self._left_s(line["step"])
        self.screen.live.left_s = left_s
        self.screen.say(step_line(line, self.settings.steps, self.serving.attainment(), left_s))
        for reason, count in line["failures"].items():
            self.screen.say(f"  {episodes(count)} given up: {reason}")

    async def learn(self, played: Played) -> StepReport:
        """Raises TrainingStarved; it says so if episodes failed, and if most did they are to blame."""
        try:
            return await self.learner.learn(played.kept, played.counts)
        except RoseError as error:
            if played.kept or not played.failures:
                raise
            reason, count = next(iter(commonest(played.failures).items()))
            what = f"{error.what}; in the last one {episodes(count)} given up: {reason}"
            is_to_blame = len(played.failures) > played.trajectories
            raise type(error)(what, hint=MEND if is_to_blame else error.hint) from error

    async def publish(self, published: Published, wait_s: float = PUBLISH_S_MAX) -> dict[str, Any]:
        """Until every worker that is there runs it, if anybody waits; what it took, for the step's line."""
        version, relay = published.label, self.learner.publishing
        told = await self.client.publish(
            version, relay=relay.address, run=relay.run, hash=published.hash, wait_s=wait_s
        )
        for name, why in told.behind.items() if wait_s else ():
            self._tell_behind(name, version, why)
        return {
            "weights_hash": published.hash,
            "weights_kind": published.kind,
            "weights_bytes": published.size_bytes,
            "weights_ratio": round(published.ratio, 3),
            "weights_s": {phase: round(seconds, 5) for phase, seconds in published.seconds.items()},
            "weights_lag": await self._lag(published) if told.behind else 0,
            "weight_sync_s": round(max(told.sync_s.values()), 5) if told.sync_s else None,
            "pause_s": round(max(told.pause_s.values()), 5) if told.pause_s else None,
        }

    async def _lag(self, published: Published) -> int:
        """By how many versions the slowest worker is behind."""
        members = (await self.client.pool())["members"]
        return max((published.version.version - _number(member["version"]) for member in members), default=0)

    async def compare_weights(self) -> None:
        """At the end: every worker runs the trainer's weights, by hash."""
        mine, members = self.learner.published, (await self.client.pool())["members"]
        hashes = {member["name"]: member.get("hash", "") for member in members}
        self.folder.record("weights", version=mine.label, hash=mine.hash, workers=hashes)
        for member in members:
            if member["version"] != mine.label:
                self._tell_behind(member["name"], mine.label, f"it runs version {member['version']}")
            elif hashes[member["name"]] not in ("", mine.hash):
                self._tell_behind(member["name"], mine.label, f"its weights have the hash {hashes[member['name']]}")

    def _tell_behind(self, worker: str, version: str, why: str) -> None:
        self.folder.record("behind", at_s=time.monotonic(), worker=worker, version=version, why=why)
        self.screen.say(f"  worker {worker} does not run version {version}: {why}")

    async def _evaluate(self, step: int) -> None:
        if not self.settings.evaluation.every_steps:
            return
        if self.lending is not None and not self._is_owner_restless:
            await self._switch(self.lending, is_lent=True)
        self.screen.live.phase = "evaluating"
        began_s = time.monotonic()
        rate = await self.rollouts.evaluate(self.settings.evaluation.episodes)
        took_s, failures = time.monotonic() - began_s, self.rollouts.held_out_failures
        self.folder.record("evaluation", step=step, success_rate=rate, began_s=round(began_s, 4), took_s=took_s,
                           episodes_failed=len(failures), failures=commonest(failures))  # fmt: skip
        self.screen.say(f"held-out success after {step} steps: {rate:.1%} of {self.settings.evaluation.episodes} games")
        for reason, count in commonest(failures).items():
            self.screen.say(f"  {count} of them could not be played: {reason}")

    async def _lend(self, step: int) -> bool:
        """Whether this step has the borrowed device."""
        if self.lending is None:
            return False
        if self._is_owner_restless:
            return True
        is_wanted = not self.settings.compare or WITH_AND_WITHOUT[(step - 1) % len(WITH_AND_WITHOUT)]
        return await self._switch(self.lending, is_lent=is_wanted)

    async def _switch(self, lending: Lending, *, is_lent: bool) -> bool:
        """Whether the device is lent now. One that cannot be told counts as what it was before, and ends no run."""
        try:
            if is_lent:
                return await lending.lend()
            await lending.hold_back()
            return False
        except Unavailable as error:
            self.screen.say(f"  the device could not be {'borrowed' if is_lent else 'held back'} for now: {error.what}")
            return not is_lent

    @property
    def _is_owner_restless(self) -> bool:
        """Then it is he who lends the device and takes it back, whatever step it is."""
        return self.settings.serving.owner_lends_s > 0

    async def _keep_costs(self, when: str) -> None:
        """Processor time and turns so far, so that what lies between two of them can be told."""
        turns = sum((await self.pool.look()).turns.values())
        self.folder.record("costs", when=when, at_s=time.monotonic(), turns=turns, roles=self.costs())

    async def _keep_breaches(self, step: int) -> None:
        """Of the lent device so far; one that cannot be asked now is asked with the next step."""
        if self.lending is None:
            return
        try:
            breaches = await self.lending.breaches()
        except Unavailable:
            return
        self.folder.record("lending", step=step, breaches=breaches)

    def _left_s(self, step: int) -> float:
        recent = sorted(self.steps_s[-8:])
        usual_s = recent[len(recent) // 2]
        return (self.settings.steps - step) * usual_s


def shown_played(played: Played) -> dict[str, Any]:
    counts = asdict(played.counts)
    return {
        "trajectories": played.trajectories,
        "successes": played.successes,
        "reward_mean": round(played.reward_mean, 4),
        "turns": played.turns,
        "invalid_turns": played.invalid_turns,
        "generated_tokens": played.generated_tokens,
        "episodes_failed": len(played.failures),
        "failures": commonest(played.failures),
        "groups": counts,
    }


def episodes(count: int) -> str:
    return f"{count} episode{' was' if count == 1 else 's were'}"


def turns_between(before: PoolSample, after: PoolSample) -> dict[str, int]:
    return {kind: after.turns[kind] - before.turns[kind] for kind in after.turns}


def grown(before: int, after: int) -> int:
    """Of a counter that begins anew when its process does."""
    return after - before if after >= before else after


def _number(label: str) -> int:
    """Of a version, by its label; workers begin with one of their own."""
    return int(label.partition("-")[0])


def _is_due(step: int, every: int, last: int) -> bool:
    return bool(every) and (step % every == 0 or step == last)


async def beside(work: asyncio.Task[None], *ends: asyncio.Future[Any]) -> None:
    """The work to its end, unless one of these comes first; what they hold is raised."""
    await asyncio.wait([work, *ends], return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        for end in ends:
            if end.done():
                raise end.result()
    await work
