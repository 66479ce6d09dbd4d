"""Trajectories of agents, recorded or generated. One factor scales all lengths; environment times stay as recorded.

A group is one task with several trajectories, and their lengths correlate. Each trajectory is drawn with replacement by
its rank in the recorded ones, sorted by output tokens. The ranks of a group come from a Gaussian copula whose
correlation is `likeness`.
"""

from __future__ import annotations

import csv
import gzip
import math
import random
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from rose.sim.batch_cluster import PlannedTrajectory, PlannedTurn

FILES = ("swerebench_claudecode_glm47flash", "swebench_claudecode_deepseek_kimi")
PROMPT_P99_TOKENS = 32_768
CHARACTERS_PER_TOKEN = 4  # about what tokenizers make of English
UNRECORDED_ENV_S = 0.5  # of an environment whose times were not recorded


@dataclass(frozen=True, slots=True)
class Source:
    """Trajectories to draw from. `what` names their origin, `factor` how their lengths were scaled."""

    what: str
    factor: float
    played: tuple[tuple[PlannedTurn, ...], ...]  # sorted by output tokens


def load(name: str, folder: Path | None, seed: int) -> Source:
    path = folder / "trajectories" / f"{name}.csv.gz" if folder is not None else None
    if path is not None and path.exists():
        return _scaled(f"recorded: {name}", _read(path))
    return _scaled("generated: the recorded trajectories are not here (--data)", _generated(seed))


def _read(path: Path) -> list[list[PlannedTurn]]:
    by_trajectory: dict[str, list[PlannedTurn]] = {}
    with gzip.open(path, "rt", newline="") as file:
        for row in csv.DictReader(file):
            if "prompt_chars" in row:
                _add_by_characters(by_trajectory.setdefault(row["traj"], []), row)
                continue
            turn = PlannedTurn(int(row["prompt_tokens"]), max(1, int(row["output_tokens"])), float(row["env_s"] or 0.0))
            by_trajectory.setdefault(row["traj"], []).append(turn)
    return list(by_trajectory.values())


def _add_by_characters(turns: list[PlannedTurn], row: dict[str, str]) -> None:
    """Add a turn of a recording that has characters and no times; every prompt is the conversation so far."""
    prompt, output = (int(row[name] or 0) // CHARACTERS_PER_TOKEN for name in ("prompt_chars", "out_chars"))
    if turns:
        prompt = max(prompt, turns[-1].prompt_tokens + turns[-1].output_tokens)
    turns.append(PlannedTurn(max(1, prompt), max(1, output), UNRECORDED_ENV_S))


def _generated(seed: int) -> list[list[PlannedTurn]]:
    """Return trajectories of about 50 turns with growing prompts, short answers and two kinds of tools."""
    chance, generated = random.Random(f"trajectories {seed}"), []
    for _ in range(120):
        prompt, turns = chance.randint(12_000, 20_000), []
        for _ in range(max(2, min(150, int(chance.lognormvariate(3.75, 0.6))))):
            answer = max(8, min(9000, int(chance.lognormvariate(4.9, 1.0))))
            env_s = chance.uniform(0.01, 0.1) if chance.random() < 0.6 else chance.lognormvariate(1.8, 0.7)
            turns.append(PlannedTurn(prompt, answer, env_s))
            prompt += answer + int(chance.lognormvariate(6.0, 0.9))
        generated.append(turns)
    return generated


def _scaled(what: str, played: list[list[PlannedTurn]]) -> Source:
    prompts = sorted(turn.prompt_tokens for turns in played for turn in turns)
    factor = PROMPT_P99_TOKENS / prompts[math.ceil(0.99 * len(prompts)) - 1]
    scaled = [tuple(_fit(turn, factor) for turn in turns) for turns in played]
    scaled.sort(key=lambda turns: sum(turn.output_tokens for turn in turns))
    return Source(what, factor, tuple(scaled))


def _fit(turn: PlannedTurn, factor: float) -> PlannedTurn:
    """Scale one turn, and keep it within the context length."""
    output = max(1, round(turn.output_tokens * factor))
    prompt = min(max(1, round(turn.prompt_tokens * factor)), PROMPT_P99_TOKENS - output)
    return PlannedTurn(prompt, output, turn.env_s)


def draw(source: Source, groups: int, size: int, likeness: float, seed: int) -> list[PlannedTrajectory]:
    chance, normal = random.Random(f"draw {seed}"), NormalDist()
    drawn = []
    for group in range(groups):
        shared = chance.gauss(0, 1)
        for member in range(size):
            place = normal.cdf(math.sqrt(likeness) * shared + math.sqrt(1 - likeness) * chance.gauss(0, 1))
            turns = source.played[min(len(source.played) - 1, int(place * len(source.played)))]
            drawn.append(PlannedTrajectory(f"{group}-{member}", str(group), turns))
    return drawn
