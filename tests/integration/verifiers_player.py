"""A small game as an environment of `verifiers`, played offline against any server of token ids.

    python verifiers_player.py URL TOKENIZER EPISODES SEED      (the key comes in the variable PLAYER_KEY)

It runs in an environment of its own, with verifiers and without ROSE, and prints one JSON line per episode. The
environment plays the user; the harness is in this process and talks to verifiers' own interception server, as the
programs of real harnesses do.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import httpx
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.dialects.chat import message_to_wire

ME = "verifiers_player"  # verifiers finds tasks and harnesses by the name of their module
SIGHTS = ("a hole", "a wall", "ice", "the goal")
MODEL_TOKENS = 8


class LakeTasks(vf.TasksetConfig):
    pass


class LakeData(vf.TaskData):
    number: int


class LakeTask(vf.Task[LakeData, vf.State, vf.TaskConfig]):
    pass


class LakeTaskset(vf.Taskset[LakeTask, LakeTasks]):
    INFINITE = True

    def load(self) -> Any:
        for number in itertools.count():
            data = LakeData(name=f"lake {number}", prompt=f"Lake {number}. Where to?", number=number)
            yield LakeTask(data, self.config.task)


class HereConfig(vf.HarnessConfig):
    pass


class HereHarness(vf.Harness[HereConfig]):
    """One call of the model per segment, from this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **more: Any
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
        body = {"model": ctx.model, "messages": messages}
        async with httpx.AsyncClient(timeout=120) as client:
            headers = {"Authorization": f"Bearer {secret}"}
            reply = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        return vf.ProgramResult(0 if reply.status_code == 200 else 1, reply.text[:200], reply.text[:2000])


class LakeConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig(), max_turns=10)


class LakeEnv(vf.Env[LakeConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            for sight in SIGHTS[: 2 + task.data.number % 3]:
                if segment.terminated:
                    break
                segment = await talk.turn(f"You see {sight}.")
        talk.trace.record_reward("turns", float(talk.trace.num_turns), 1.0)


__all__ = ["HereHarness", "LakeEnv", "LakeTaskset"]


async def play(url: str, tokenizer: str, episodes: int, seed: int) -> None:
    agent = vf.AgentConfig(harness=HereConfig(id=ME), runtime=vf.SubprocessConfig(), max_turns=10)
    environment = LakeEnv(LakeConfig(taskset=LakeTasks(id=ME), player=agent))
    client = vf.TrainClientConfig(base_url=f"{url}/v1", api_key_var="PLAYER_KEY", renderer_model_name=tokenizer)
    sampling = vf.SamplingConfig(temperature=1.0, max_tokens=MODEL_TOKENS, seed=seed)
    context = ModelContext(model=os.path.basename(tokenizer), client=client, sampling=sampling)
    tasks = list(environment.taskset.take(episodes))
    async with environment.serving():
        played = await asyncio.gather(*(environment.run_episode(task, context) for task in tasks))
    for episode in played:
        print(json.dumps(_told(episode)), flush=True)


def _told(episode: Any) -> dict[str, Any]:
    [trace] = episode.traces
    branches = [
        {"ids": list(branch.token_ids), "mask": list(branch.sampled_mask), "logprobs": list(branch.logprobs)}
        for branch in trace.branches
    ]
    errors = [str(error)[:500] for error in (*episode.errors, *(trace.errors or []))]
    return {"trace": trace.id, "turns": trace.num_turns, "branches": branches, "errors": errors}


if __name__ == "__main__":
    import verifiers_player

    asyncio.run(verifiers_player.play(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
