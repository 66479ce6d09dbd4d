"""`rose play`: the model of a run plays one game in the terminal, move by move.

The newest checkpoint runs on the embedded engine in this process. The games are held-out ones of the run's evaluations;
`--game 3` is always the same, so two runs can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from rose.api.requests import TurnAnswer, TurnSampling
    from rose.engines.embedded.engine import EmbeddedEngine
    from rose.envs.environment import Environment, Outcome
    from rose.run.past_runs import PastRun

SUMMARY = "watch the model of a run play one game, move by move"
KV_MEMORY_MB = 64  # one game of a small model
CHECKPOINTS = "checkpoints"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", help="its name or folder; the newest if left out")
    parser.add_argument("--game", type=int, default=0, metavar="N", help="which held-out game (0)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (0)")
    parser.add_argument("--pause", type=float, default=0.4, metavar="S", help="between two moves (0.4)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where the runs are (runs)")


def run(arguments: argparse.Namespace) -> int:
    from rose.run.past_runs import find_run, past_runs

    if arguments.game < 0 or arguments.temperature < 0 or arguments.pause < 0:
        raise ConfigError("--game, --temperature and --pause must not be negative")
    runs = [find_run(arguments.runs, arguments.run)] if arguments.run else past_runs(arguments.runs)
    if not runs:
        raise ConfigError(f"there are no runs in {arguments.runs} yet", hint="rose run")
    played = runs[-1]
    if played.settings.get("agent"):
        raise ConfigError(f"{played.name} is played by an agent of its own", hint="start the agent: docs/tasks.md")
    asyncio.run(_play(played, newest_checkpoint(played.path), arguments))
    return 0


def newest_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint of a run. Raises ConfigError without one."""
    found = sorted((folder / CHECKPOINTS).glob("step-*"))
    if not found:
        raise ConfigError(f"{folder} has no checkpoint", hint="a run writes one every checkpoint.every_steps (5) steps")
    return found[-1]


async def _play(played: PastRun, checkpoint: Path, arguments: argparse.Namespace) -> None:
    from rose.api.requests import TurnSampling
    from rose.config.server_settings import EngineSettings
    from rose.engines.embedded.engine import EmbeddedEngine
    from rose.envs.environment import TimedEnvironment
    from rose.envs.environment_registry import find_environment, make_environment
    from rose.envs.play import ChatFrame, Episode, play
    from rose.models.model_folder import load_model_folder
    from rose.run.run_rollouts import HELD_OUT_SEEDS, MAPS_PER_SEED

    name = str(played.settings.get("environment", "frozenlake"))
    entry, options = find_environment(name), played.settings.get("environment_options") or {}
    model = load_model_folder(checkpoint)
    engine = EmbeddedEngine.load(checkpoint, EngineSettings(kv_memory_mb=KV_MEMORY_MB))
    frame = ChatFrame(model.tokenizer, model.spec.eos_token_ids)
    seed = HELD_OUT_SEEDS + int(played.settings.get("seed", 0)) * MAPS_PER_SEED + arguments.game
    sampling = TurnSampling(arguments.temperature, entry.answer_tokens_max, seed=arguments.game)
    print(f"{played.name}, {checkpoint.name}: game {arguments.game} of {name} ({entry.summary})")
    environment = TimedEnvironment(lambda: _Shown(make_environment(name, **options), arguments.pause))
    episode = Episode("game", "", seed, sampling, model.spec.max_context_tokens)
    try:
        trajectory = await play(episode, environment, frame, _Turns(engine))
    finally:
        environment.close()
    ending = "won" if trajectory.is_success else "not won"
    print(f"\n{ending} after {trajectory.turns} turns; reward {trajectory.reward:g}")


class _Turns:
    """Generates turns on an engine of this process."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine, self._turns = engine, 0

    async def __call__(self, token_ids: Sequence[int], sampling: TurnSampling) -> TurnAnswer:
        from rose.api.requests import TurnAnswer, VersionSpan
        from rose.engines.base import Budget, Request, Sampling

        self._turns += 1
        wanted = Sampling(max_tokens=sampling.max_tokens, temperature=sampling.temperature, seed=sampling.seed)
        self._engine.add(Request(f"turn {self._turns}", tuple(token_ids), wanted))
        made: list[int] = []
        logprobs: list[float] = []
        while (plan := self._engine.plan(Budget(512, 1))) is not None:
            for event in self._engine.step(plan):
                made += event.token_ids
                logprobs += event.logprobs or [0.0] * len(event.token_ids)
        if not made:
            raise Unavailable("the engine generated nothing", hint="rose doctor")
        return TurnAnswer(tuple(made), tuple(logprobs), (VersionSpan("0", 0, len(made)),), "stop")


class _Shown:
    """An environment that prints what is seen and done."""

    is_quick = False  # pauses for its reader

    def __init__(self, environment: Environment, pause_s: float) -> None:
        self._environment, self._pause_s, self._moves = environment, pause_s, 0

    def reset(self, seed: int) -> str:
        observation = self._environment.reset(seed)
        self._print("", observation)
        return observation

    def step(self, action: str) -> Outcome:
        time.sleep(self._pause_s)
        outcome = self._environment.step(action)
        self._moves += 1
        self._print(f"move {self._moves}: {action.strip() or '(nothing)'}", outcome.observation)
        return outcome

    def close(self) -> None:
        self._environment.close()

    def _print(self, title: str, observation: str) -> None:
        board: Any = getattr(self._environment, "board", None)
        seen = board() if board is not None else observation
        print(f"\n{title}" if title else "")
        print("\n".join(f"    {line}" for line in seen.splitlines()), flush=True)
