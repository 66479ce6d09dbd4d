"""TRL trains on ROSE's pool: weight transfer and rollout worker of its AsyncGRPOTrainer, and a rollout function.

    pool = RosePool("models/qwen3-0.6b", gateway="http://gw:8002", relay="http://relay:7070", run="my-run")
    AsyncGRPOTrainer(..., rollout_worker=TrlWorker(pool, args, dataset, reward), weight_transfer=TrlWeights(pool))
    GRPOTrainer(..., rollout_func=TrlRollouts(pool))

TRL's protocols are structural, so nothing of TRL is imported here. `TrlWorker` runs an event loop in a thread. It
begins a group only while the samples ahead of it, unfinished or in the buffer, leave it time to be trained on within
`max_staleness` versions. TRL's `max_inflight_tasks` is so many samples if the workers run the newest version; each
version that they are behind takes one step's samples off. The samples come from the gateway's batches, are compared
with what was played, and carry the version of their oldest token. A batch is confirmed once its samples are in the
buffer. Groups that another trainer began, and tokens of weights that this trainer did not publish, are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from rose.adapters.group_players import EnvironmentPlayer, GroupPlayer, PlayedMember, Prompt, PromptPlayer
from rose.adapters.rose_pool import TURN_PATIENCE_S, shortage
from rose.adapters.rose_pool import RosePool as RosePool
from rose.adapters.trl_rollouts import TrlRollouts as TrlRollouts
from rose.adapters.trl_rollouts import sampling_of
from rose.adapters.trl_weights import TrlWeights as TrlWeights
from rose.api.trajectories import BeginBody, FinishBody, FinishedGroup
from rose.client import GatewayClient
from rose.core.trajectory import Trajectory
from rose.errors import RoseError, Unavailable

LOOK_S = 0.02  # between two looks whether the trainer has taken samples from the buffer
POOL_LOOK_S = 0.25  # between two looks which version the workers run, while they are behind
QUIET_S = 30.0  # without an ended rollout, after which the log says why
DIAGNOSIS_S = 5.0  # for the gateway to answer what its pool lacks
STOP_S = 15.0  # for the rollout thread to end; TRL allows its own worker as much
STD_MIN = 1e-8  # TRL divides by the deviation of a group's rewards plus this
BRANCH = re.compile(r"~[0-9]+\Z")  # the end of the name of a trajectory's further branch

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TrlSample:
    """One row for TRL's trainer, with the fields of its RolloutSample."""

    prompt: Prompt
    completion: Prompt
    input_ids: np.ndarray
    completion_mask: np.ndarray
    old_log_probs: np.ndarray
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None


class TrlWorker:
    """TRL's RolloutWorkerProtocol: plays groups through the gateway, and gives the trainer what comes back.

    `args` is the trainer's AsyncGRPOConfig. Rollouts are one answer to each prompt of the dataset, scored by
    `reward_funcs`, or episodes of `environment`. `counts` says what became of the trajectories.
    """

    def __init__(
        self,
        pool: RosePool,
        args: Any,
        dataset: Any = None,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
        *,
        environment: str = "",
        environment_options: Mapping[str, Any] | None = None,
    ) -> None:
        sampling = sampling_of(args)
        if environment:
            self._player: GroupPlayer = EnvironmentPlayer(
                pool.folder, environment, environment_options or {}, sampling, args.token_budget or 0
            )
        else:
            functions = [reward_funcs] if callable(reward_funcs) else reward_funcs
            self._player = PromptPlayer(pool.folder, dataset, functions, sampling, args.chat_template_kwargs)
        self.rollout_buffer: queue.Queue[TrlSample] = queue.Queue(args.queue_maxsize)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.counts: Counter[str] = Counter()
        self._pool, self._args = pool, args
        self._version = self._seen = 0  # the newest version, and the one that every working device runs
        self._unfinished, self._progress_s = 0, 0.0
        self._played: dict[str, tuple[int, list[PlayedMember]]] = {}
        self._error: BaseException | None = None
        self._is_reported = self._is_stopping = False  # reported: the log says why no rollout ends
        self._thread: threading.Thread | None = None
        self._cancel: Callable[[], object] = lambda: None

    # What TRL calls

    def start(self) -> None:
        """Begin to play. Raises RequestRefused or Unavailable if the gateway cannot be used."""
        last_batch = int(self._pool.ask(lambda client: client.pool())["last_batch"])
        self._progress_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(last_batch,), daemon=True, name="rose-rollouts")
        self._thread.start()

    def stop(self) -> None:
        """End the thread. The gateway ends the trajectories that are open when they have been idle for long."""
        if self._thread is not None:
            self._is_stopping = True
            with suppress(RuntimeError):  # the loop has ended
                self._cancel()
            self._thread.join(STOP_S)

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the thread, or Unavailable if no rollout has ended for so long."""
        if self._error is not None:
            raise Unavailable(f"the rollouts have stopped: {self._error}") from self._error
        quiet_s = time.monotonic() - self._progress_s
        if quiet_s > stale_after_s:
            hint = "start workers, or raise heartbeat_stale_after_s if rollouts take longer"
            raise Unavailable(f"no rollout has ended for {quiet_s:.0f} s: {self._diagnosis()}", hint=hint)
        if quiet_s > QUIET_S and not self._is_reported:
            self._is_reported = True
            logger.warning("no rollout has ended for %.0f s: %s", quiet_s, self._diagnosis())

    # In the thread

    def _run(self, last_batch: int) -> None:
        try:
            asyncio.run(self._main(last_batch))
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self._error = error

    async def _main(self, last_batch: int) -> None:
        loop, main = asyncio.get_running_loop(), asyncio.current_task()
        assert main is not None
        self._cancel = lambda: loop.call_soon_threadsafe(main.cancel)
        async with (
            self._pool.client() as client,
            self._pool.client(TURN_PATIENCE_S) as turns,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._deliver(client, last_batch))
            tasks.create_task(self._watch_versions(client))
            for group, task in enumerate(self._player.tasks()):
                await self._wait_for_room()
                self._unfinished += self._args.num_generations
                tasks.create_task(self._play(client, turns, group, task))

    async def _watch_versions(self, client: GatewayClient) -> None:
        while True:
            if self._seen < self._version:
                members = (await client.pool())["members"]
                working = [member["version"] for member in members if member["state"] == "open" or member["turns"]]
                self._seen = min((self._pool.numbers.get(version, 0) for version in working), default=self._seen)
            await asyncio.sleep(POOL_LOOK_S)

    def _samples_max(self) -> float:
        """Return how many samples may be unfinished or in the buffer."""
        most, max_staleness = self._args.max_inflight_tasks, max(1, self._args.max_staleness)
        return max(self._args.num_generations, most - (self._version - self._seen) * most / max_staleness)

    async def _wait_for_room(self) -> None:
        size = self._args.num_generations
        while self._unfinished + self.rollout_buffer.qsize() + size > self._samples_max():
            if self._is_stopping:
                raise asyncio.CancelledError
            if not self.rollout_buffer.empty():  # the trainer has enough
                self._note_progress()
            await asyncio.sleep(LOOK_S)

    def _note_progress(self) -> None:
        self._progress_s, self._is_reported = time.monotonic(), False

    async def _play(self, client: GatewayClient, turns: GatewayClient, group: int, task: Any) -> None:
        """Play one group, and finish its trajectories with their rewards."""
        size, name = self._args.num_generations, f"{self._pool.prefix}/{group}"
        names = [f"{name}/{member}" for member in range(size)]
        await asyncio.gather(*(client.begin(BeginBody(id=own, group=name, group_size=size)) for own in names))
        self.counts["begun"] += size
        members = await self._player.play(turns, task, group, names)
        self._played[name] = group, members
        self._note_progress()
        await asyncio.gather(*(client.finish(member.trajectory_id, _end_of(member)) for member in members))

    async def _deliver(self, client: GatewayClient, last_batch: int) -> None:
        """Put what comes back from the gateway into the buffer, group by group."""
        while True:
            batch = await client.next_batch(1, last_batch)
            for group in batch.groups:
                for sample in self._samples(group):
                    while self.rollout_buffer.full():
                        await asyncio.sleep(LOOK_S)
                    sample.enqueued_at = time.time()
                    self.rollout_buffer.put_nowait(sample)
            last_batch = batch.batch

    def _samples(self, group: FinishedGroup) -> Iterator[TrlSample]:
        """Yield the rows of a finished group, and note what became of each of its trajectories."""
        if group.group not in self._played:
            self.counts["foreign"] += len(group.trajectories)
            logger.warning("group %s was begun by another trainer, and is not trained on", group.group)
            return
        number, members = self._played.pop(group.group)
        came = {(BRANCH.sub("", found.trajectory_id), found.token_ids): found for found in group.trajectories}
        rewards = [member.reward for member in members if member.reward is not None]
        mean, deviation = statistics.fmean(rewards or [0.0]), statistics.pstdev(rewards or [0.0])
        fates: Counter[str] = Counter()
        for member in members:
            trajectory = came.get((member.trajectory_id, member.token_ids))
            fate, version = self._fate(member, trajectory)
            fates[fate] += 1
            if fate == "delivered" and trajectory is not None and member.reward is not None:
                metrics = {f"rewards/{name}": value for name, value in (member.rewards or {}).items()}
                metrics |= {"reward": member.reward, "reward_std": deviation}
                advantage = (member.reward - mean) / (deviation + STD_MIN)
                yield _sample(member, trajectory, advantage, version, number, metrics)
            self._unfinished -= 1
        self.counts += fates
        self._measure(members, fates)

    def _fate(self, member: PlayedMember, trajectory: Trajectory | None) -> tuple[str, int]:
        """Return what becomes of a member, and the version of its oldest token."""
        if member.reward is None:
            return "lost", 0
        if trajectory is None:
            raise Unavailable(f"the gateway returned other tokens of {member.trajectory_id} than were played")
        numbers = [self._pool.numbers.get(label) for label in trajectory.versions_used()]
        known = [number for number in numbers if number is not None]
        if len(known) < len(numbers):
            logger.warning("%s has tokens of weights that this trainer did not publish", member.trajectory_id)
            return "unknown_version", 0
        oldest = min(known)
        return "stale" if self._version - oldest > self._args.max_staleness else "delivered", oldest

    def _measure(self, members: Sequence[PlayedMember], fates: Mapping[str, int]) -> None:
        count = float(len(members))
        values: dict[str, Any] = {f"rollout/{fate}_total": float(many) for fate, many in fates.items()}
        values["rollout/turns_mean"] = float(sum(member.turns for member in members)), count
        values["rollout/unfinished"] = float(self._unfinished)
        self.metrics_queue.put(values)

    def _diagnosis(self) -> str:
        try:
            return shortage(self._pool.ask(lambda client: client.pool(), DIAGNOSIS_S))
        except RoseError as error:
            return error.what


def _end_of(member: PlayedMember) -> FinishBody:
    if member.reward is None:
        return FinishBody(is_lost=True)
    return FinishBody(reward=member.reward, is_success=bool((member.rewards or {}).get("success")))


def _sample(
    member: PlayedMember, trajectory: Trajectory, advantage: float, version: int, group: int, metrics: dict[str, float]
) -> TrlSample:
    return TrlSample(
        member.prompt,
        member.completion,
        np.array(trajectory.token_ids, np.int64),
        np.array(trajectory.loss_mask, np.int64),
        np.array(trajectory.logprobs, np.float32),
        advantage,
        version,
        group,
        metrics,
    )
