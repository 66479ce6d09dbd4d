"""The trainer of a run on several ranks, without devices: the run's own learner, processes and folder.

    python -m tests.integration.ranked_trainer RUNS MODEL RANKS STEPS [--resume] [--kill STEP MOMENT]

It learns from drawn trajectories, publishes and writes a checkpoint in every step, and prints a line of JSON for each.
With `--kill` rank 1 is killed in that step, while it learns or while it writes its part of the checkpoint, or its disk
is full from then on, or it stops for ever.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path

from rose.core.groups import StepGroups
from rose.core.trajectory import Trajectory
from rose.errors import RoseError
from rose.run.cpu_affinity import Placement
from rose.run.learning import Learner, TrainerThread
from rose.run.process_specs import trainer_ranks
from rose.run.processes import Died, Processes
from rose.run.resuming import ResumePoint, start_of
from rose.run.run_folder import RunFolder
from rose.run.run_settings import RunSettings, load_run_settings
from rose.run.trajectory_ledger import Balance
from rose.train.train_settings import TrainSettings

FILE_BYTES = 3 << 20  # what a rank publishes fits, its part of the trainer's state does not
NAME, GROUPS, MEMBERS, VOCABULARY = "it", 3, 4, 110


def drawn_groups(step: int) -> list[list[Trajectory]]:
    """Groups of sequences of very different lengths, about a third of whose tokens the model wrote."""
    dice = random.Random(step)

    def trajectory(group: int, member: int) -> Trajectory:
        length = dice.randint(20, 120)
        mask = tuple(at > 8 and (dice.random() < 0.3 or at == length - 1) for at in range(length))
        tokens = tuple(dice.randrange(VOCABULARY) for _ in mask)
        logprobs = tuple(-4.5 if is_own else 0.0 for is_own in mask)
        versions = tuple("0" if is_own else "" for is_own in mask)
        reward = float(member == 0 or (member > 1 and dice.random() < 0.4))
        return Trajectory(f"{step}/{group}/{member}", f"{step}/{group}", tokens, mask, logprobs, versions, reward)

    return [[trajectory(group, member) for member in range(MEMBERS)] for group in range(GROUPS)]


def settings_of(runs: Path, model: Path, ranks: int) -> RunSettings:
    train = TrainSettings(ranks=ranks, rows_max=3, rank_patience_s=float(os.environ.get("ROSE_TEST_PATIENCE_S", "60")))
    return replace(load_run_settings(), runs=str(runs), name=NAME, rollout_model=str(model), train=train)


class RankedRun:
    """One attempt of a run."""

    def __init__(self, settings: RunSettings, *, is_resumed: bool, kill: tuple[int, str] | None) -> None:
        self.folder = RunFolder(settings, is_resumed=is_resumed)
        self.start = start_of(self.folder)[0] if is_resumed else ResumePoint()
        cores = tuple(os.sched_getaffinity(0))
        self.learner = Learner(TrainerThread(0, cores), settings, self.folder, self.start)
        self.processes = Processes(self.folder.logs, {}, self.on_death)
        place, secret = Placement("cpu:0", None, cores), self.learner.publishing.secret
        self.specs = trainer_ranks(settings, place, self.learner.meeting, secret)
        self.kill = kill

    def on_death(self, died: Died) -> None:
        print(f"{died.role} died (code {died.code})", flush=True)

    async def run(self, steps: int) -> None:
        await self.learner.prepare()
        await asyncio.gather(self.learner.load(), *map(self.processes.start, self.specs))
        print(json.dumps({"step": self.start.step, "hash": self.learner.published.hash}), flush=True)
        for step in range(self.start.step + 1, steps + 1):
            work = asyncio.create_task(self.step(step))
            if self.kill is not None and self.kill[0] == step:
                await self.kill_rank(step)
            print(json.dumps(await work), flush=True)
        await self.learner.finish()

    async def step(self, step: int) -> dict[str, object]:
        counts = StepGroups(drawn=GROUPS, kept=GROUPS)
        report = await self.learner.learn(drawn_groups(step), counts)
        published = await self.learner.publish()
        state = {"next_group": GROUPS * step, "balance": asdict(Balance())}
        await self.learner.write_checkpoint(step, state)
        figures = {"loss": report.loss, "norm": report.gradient_norm, "tokens": report.trained_tokens}
        bytes_of = {"bytes": published.size_bytes}
        return {"step": step, "verdict": report.verdict, "hash": published.hash, **figures, **bytes_of}

    async def kill_rank(self, step: int) -> None:
        assert self.kill is not None
        process_id = self.processes.process_ids()["rank-1"]
        if self.kill[1] == "disk":
            resource.prlimit(process_id, resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
            return
        if self.kill[1] == "checkpoint":  # some of its files are there under another name, and the last one is not
            while not list(self.folder.checkpoints.glob(f".*{step:06d}*/model-00002-of-*")):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(0)  # the step begins: its order is sent, or under way
        os.kill(process_id, signal.SIGSTOP if self.kill[1] == "stop" else signal.SIGKILL)

    async def close(self) -> None:
        await self.processes.close()
        await self.learner.close()
        self.folder.close()


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("ranks", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--kill", nargs=2, metavar=("STEP", "MOMENT"))
    given = parser.parse_args()
    kill = (int(given.kill[0]), given.kill[1]) if given.kill else None
    run = RankedRun(settings_of(given.runs, given.model, given.ranks), is_resumed=given.resume, kill=kill)
    try:
        await run.run(given.steps)
    except RoseError as error:
        print(error, flush=True)
        return 1
    finally:
        await run.close()
    return 0


if __name__ == "__main__":
    code = asyncio.run(main())
    sys.stdout.flush()
    os._exit(code)
