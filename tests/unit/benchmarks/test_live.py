"""What benchmarks/live.py rests on: scripts that fit the context, and books that notice what is lost or doubled."""

from __future__ import annotations

import gzip
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rose.core.trajectory import Trajectory

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from living.playing import Played, compare
from living.scripts import RECORDED, load_scripts

CONTEXT = 4096
SEEN = [Played(f"agent-{number}", (1, 2, number), 2, (0.1, 0.1)) for number in range(3)]


def taken(played: Played, **changes: object) -> Trajectory:
    size = len(played.token_ids)
    known = Trajectory(
        played.name, "g", played.token_ids, (True,) * size, (0.0,) * size, ("0",) * size, 0.0, False, played.turns, 0
    )
    return replace(known, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "story, got, lost, doubled",
    [
        ("all of them", [taken(one) for one in SEEN], 0, 0),
        ("one is missing", [taken(one) for one in SEEN[1:]], 1, 0),
        ("one lacks a turn", [taken(SEEN[0], turns=1), *map(taken, SEEN[1:])], 1, 0),
        ("one has other tokens", [taken(SEEN[0], token_ids=(1, 9, 0)), *map(taken, SEEN[1:])], 1, 0),
        ("one comes twice", [taken(one) for one in (*SEEN, SEEN[0])], 0, 1),
        ("one has two branches", [*map(taken, SEEN), taken(SEEN[2], trajectory_id="agent-2~1")], 0, 1),
        ("one has a turn too many", [taken(SEEN[0], turns=3), *map(taken, SEEN[1:])], 0, 1),
    ],
)
def test_the_comparison(story: str, got: list[Trajectory], lost: int, doubled: int) -> None:
    assert compare(SEEN, got) == (lost, doubled), story


def test_scripts_are_made_up_without_data_and_say_so() -> None:
    scripts, source = load_scripts(None, 40, CONTEXT, seed=1)
    assert source.startswith("made up") and len(scripts) == 40
    assert scripts == load_scripts(None, 40, CONTEXT, seed=1)[0] != load_scripts(None, 40, CONTEXT, seed=2)[0]
    lengths = [sum(turn.added_tokens + turn.answer_tokens for turn in script) for script in scripts]
    assert all(0 < length <= CONTEXT for length in lengths)


def test_recorded_ones_are_scaled_by_one_factor(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    rows = ["traj,turn,prompt_tokens,output_tokens,env_s", "0,0,1000,100,1.0", "0,1,2000,50,", "0,2,4000,10,400"]
    with gzip.open(tmp_path / "trajectories" / f"{RECORDED[0]}.csv.gz", "wt") as file:
        file.write("\n".join(rows) + "\n")
    [script], source = load_scripts(tmp_path, 1, 16_000, seed=0)
    assert RECORDED[0] in source
    factor = float(source.rsplit(" ", 1)[1])
    assert [turn.answer_tokens for turn in script] == [round(factor * tokens) for tokens in (100, 50, 10)]
    assert sum(turn.added_tokens for turn in script) + sum(turn.answer_tokens for turn in script[:-1]) == round(
        4000 * factor
    )
    assert script[1].wait_s == 0.0 and script[2].wait_s == 2.0
