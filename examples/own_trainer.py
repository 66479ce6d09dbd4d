"""Your own trainer: a plain PyTorch loop that learns to cross a frozen lake, wherever a gateway has workers.

Each `rose` in a terminal of its own, all with the same ROSE_RELAY_SECRET (openssl rand -hex 32); docs/trainer.md:
    MODEL=$(python -c 'from rose.train.warmstart import warm_start; print(warm_start())')
    rose gateway $MODEL --port 8002
    rose serve --lend $MODEL --gateway http://127.0.0.1:8002      # a worker; start as many as you like
    python examples/own_trainer.py $MODEL                         # may be followed by gateway, relay and steps
"""

import asyncio
import os
import sys

import torch
from torch.nn.utils.rnn import pad_sequence

import rose
from rose.envs.environment import TimedEnvironment
from rose.gateway.auth import token_for
from rose.train.policy_model import CausalModel

RUN, GROUPS, MEMBERS, ROWS = f"own-trainer-{os.getpid()}", 8, 8, 16
RELAY = os.path.abspath("relay")  # a folder; http://host:port of `rose relay up` between machines


async def play_member(client, frame, group, member):
    """All members of a group play the same map, each with its own dice; the gateway is told what came of it."""
    name, sampling = f"{RUN}/{group}/{member}", rose.TurnSampling(max_tokens=8, seed=1000 * group + member)
    await client.begin(rose.BeginBody(id=name, group=f"{RUN}/{group}", group_size=MEMBERS, seed=group))
    lake = TimedEnvironment(lambda: rose.make_environment("frozenlake"))
    played = await rose.play(rose.Episode(name, str(group), group, sampling), lake, frame, client.trajectory(name))
    await client.finish(name, rose.FinishBody(reward=played.reward, is_success=played.is_success))


def learn(model, optimizer, groups):
    """One update: every token of a trajectory is made likelier by how much better it went than its group."""
    rows = []
    for group in groups:
        rewards = torch.tensor([member.reward for member in group.trajectories])
        rows += zip(group.trajectories, (rewards - rewards.mean()) / (rewards.std() + 1e-4))
    rows = sorted((row for row in rows if row[1]), key=lambda row: len(row[0].token_ids))
    tokens = sum(trajectory.generated_tokens for trajectory, _ in rows)
    optimizer.zero_grad()
    for begin in range(0, len(rows), ROWS):
        members, advantages = zip(*rows[begin : begin + ROWS])
        token_ids = pad_sequence([torch.tensor(member.token_ids) for member in members], batch_first=True)
        own = pad_sequence([torch.tensor(member.loss_mask) for member in members], batch_first=True)
        logprobs, _ = model.logprobs(token_ids, own)
        (-(torch.stack(advantages).repeat_interleave(own.sum(1)) * logprobs).sum() / tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


async def main(model_folder, gateway="http://127.0.0.1:8002", relay=RELAY, steps=12):
    torch.set_num_threads(1)
    folder, model = rose.load_model_folder(model_folder), CausalModel.load(model_folder)
    frame = rose.ChatFrame(folder.tokenizer, folder.spec.eos_token_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    publisher, batch = rose.Publisher(model.weights, relay, run=RUN, optimizer=optimizer), 0
    async with rose.GatewayClient(gateway, token_for("trainer", gateway)) as client:
        for step in range(int(steps)):
            new = publisher.publish(step).result()
            await client.publish(new.label, relay=relay, run=RUN, hash=new.hash, wait_s=60)
            numbers = range(step * GROUPS, (step + 1) * GROUPS)
            await asyncio.gather(*(play_member(client, frame, g, m) for g in numbers for m in range(MEMBERS)))
            found = await client.next_batch(GROUPS, after=batch)
            batch, members = found.batch, [member for group in found.groups for member in group.trajectories]
            print(f"step {step + 1}: {sum(m.is_success for m in members) / len(members):.0%} of games won", flush=True)
            learn(model, optimizer, found.groups)
    publisher.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
