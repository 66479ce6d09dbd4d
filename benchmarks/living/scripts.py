"""Scripts of multi-turn trajectories: how many tokens each turn adds to the prompt, draws, and waits for.

Recorded agents have prompts of a hundred thousand tokens and wait for compilers; one factor brings all their lengths
and times down, so that the P99 of the prompts is a quarter of the context. Trajectories are drawn with replacement.
Without the data they are made up, with the shape of the recorded ones: log-normal numbers of turns, prompts that begin
long and grow, answers with a tail.
"""

from __future__ import annotations

import csv
import gzip
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

RECORDED = ("swerebench_claudecode_glm47flash", "swebench_claudecode_deepseek_kimi")
WAIT_S_MAX = 2.0


@dataclass(frozen=True, slots=True)
class Turn:
    added_tokens: int  # since the answer before
    answer_tokens: int
    wait_s: float  # in the environment, after it


Script = tuple[Turn, ...]
_Call = tuple[int, int, float]  # prompt tokens, output tokens, seconds in the environment


def load_scripts(data: Path | None, count: int, context_tokens: int, seed: int) -> tuple[list[Script], str]:
    """So many scripts, and in words where they are from."""
    recorded = [calls for name in RECORDED for calls in _recorded(data, name)] if data is not None else []
    source = " and ".join(RECORDED) if recorded else "made up: no trajectories/ in --data or ROSE_DATA"
    dice = random.Random(seed)
    known = recorded or [_made_up(dice) for _ in range(max(100, count))]
    prompts = [prompt for calls in known for prompt, _, _ in calls]
    factor = context_tokens / 4 / float(np.percentile(prompts, 99))
    drawn = [dice.choice(known) for _ in range(count)]
    return [_script(calls, factor, context_tokens) for calls in drawn], f"{source}, times {factor:.4f}"


def _recorded(data: Path, name: str) -> Iterator[list[_Call]]:
    path = data / "trajectories" / f"{name}.csv.gz"
    if not path.exists():
        return
    found: dict[str, list[_Call]] = defaultdict(list)
    with gzip.open(path, "rt", newline="") as file:
        for row in csv.DictReader(file):
            call = (int(row["prompt_tokens"]), int(row["output_tokens"]), float(row["env_s"] or 0.0))
            found[row["traj"]].append(call)
    yield from found.values()


def _made_up(dice: random.Random) -> list[_Call]:
    turns = max(2, min(140, round(dice.lognormvariate(math.log(45), 0.55))))
    prompt, calls = dice.uniform(12_000, 18_000), []
    for _ in range(turns):
        output = min(9000.0, dice.lognormvariate(math.log(145), 1.0))
        calls.append((round(prompt), max(1, round(output)), dice.lognormvariate(math.log(0.1), 2.0)))
        prompt += output + dice.lognormvariate(math.log(500), 1.0)
    return calls


def _script(calls: Sequence[_Call], factor: float, context_tokens: int) -> Script:
    """Prompts only grow here: an agent that shortened its own goes on from what it had."""
    turns: list[Turn] = []
    length = 0
    for prompt, output, wait_s in calls:
        added = max(1, round(prompt * factor) - length)
        answer = max(1, round(output * factor))
        if length + added + answer > context_tokens:
            break
        turns.append(Turn(added, answer, min(WAIT_S_MAX, wait_s * factor)))
        length += added + answer
    return tuple(turns)
