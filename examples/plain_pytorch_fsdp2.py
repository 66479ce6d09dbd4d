"""Your own loop with FSDP2: several ranks train one model, and each publishes its own shard; docs/integrations.md.

Each `rose` in a terminal of its own, all with the same ROSE_RELAY_SECRET (openssl rand -hex 32):
    rose model new --preset qwen3-3m --out models/qwen3-3m
    rose gateway models/qwen3-3m --port 8002
    rose serve --lend models/qwen3-3m --gateway http://127.0.0.1:8002      # a worker; start as many as you like
    torchrun --nproc-per-node 2 examples/plain_pytorch_fsdp2.py models/qwen3-3m   # gateway, relay, steps may follow

The lines marked with (ROSE) are all that another loop needs. The task: answer with tokens of even id; on CPUs, by gloo.
"""

import asyncio
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import rose
from rose.adapters.fsdp import ShardedPublisher  # (ROSE)
from rose.adapters.rose_pool import RosePool  # (ROSE)
from rose.gateway.auth import token_for

RELAY = os.path.abspath("relay")  # a folder that all ranks and workers see; else http://host:port of `rose relay up`
MEMBERS, ANSWER_TOKENS = 8, 4
PROMPT = list(b"Give even numbers: ")  # this preset's token ids are bytes


async def play(pool, rank, step):
    """Play one group of this rank through the gateway, and return its answers."""

    async def member(client, number):
        name = f"{pool.prefix}/{step}/{rank}/{number}"
        await client.begin(rose.BeginBody(id=name))
        sampling = rose.TurnSampling(max_tokens=ANSWER_TOKENS, seed=step * 10_000 + rank * 100 + number)
        answer = await client.trajectory(name)(PROMPT, sampling)
        await client.finish(name, rose.FinishBody())
        return answer

    async with pool.client() as client:
        return await asyncio.gather(*(member(client, number) for number in range(MEMBERS)))


def loss_of(model, answers, rewards):
    """Return the policy-gradient loss of one group: every token of an answer has the answer's advantage."""
    ids = pad_sequence([torch.tensor([*PROMPT, *answer.token_ids]) for answer in answers], batch_first=True)
    own = pad_sequence([torch.ones(len(answer.token_ids)) for answer in answers], batch_first=True)
    logprobs = model(ids).logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return -(advantages[:, None] * logprobs[:, len(PROMPT) - 1 :] * own).sum() / own.sum()


def main(model_folder, gateway="http://127.0.0.1:8002", relay=RELAY, steps=20):
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    token = token_for("trainer", gateway)  # ROSE_TRAINER_TOKEN, or that of your own gateway on this machine
    pool = RosePool(model_folder, gateway=gateway, relay=relay, run="fsdp2", token=token)  # (ROSE)
    publisher = ShardedPublisher(model, pool)  # (ROSE) on every rank: each pushes its own shard
    for step in range(1, int(steps) + 1):
        new = publisher.publish(step, wait_s=60)  # (ROSE) on every rank; rank 0 tells the gateway
        answers = asyncio.run(play(pool, rank, step))
        rewards = torch.tensor([sum(i % 2 == 0 for i in a.token_ids) / len(a.token_ids) for a in answers])
        optimizer.zero_grad()
        loss_of(model, answers, rewards).backward()
        optimizer.step()
        print(f"step {step}, rank {rank}: reward {rewards.mean():.2f}, pushed {new.pushed_bytes} bytes", flush=True)
    publisher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
