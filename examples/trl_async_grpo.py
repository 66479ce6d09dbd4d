"""TRL's AsyncGRPOTrainer as it is, with its rollouts on the devices of a ROSE gateway; docs/integrations.md.

Each `rose` in a terminal of its own, all with the same ROSE_RELAY_SECRET (openssl rand -hex 32):
    rose model new --preset qwen3-3m --out models/qwen3-3m
    rose gateway models/qwen3-3m --port 8002 --set max_staleness=1
    rose serve --lend models/qwen3-3m --gateway http://127.0.0.1:8002      # a worker; start as many as you like
    python examples/trl_async_grpo.py models/qwen3-3m                      # may be followed by gateway, relay and steps

The lines marked with (ROSE) are all that another script of TRL needs. The task: answer with tokens of even id.
"""

import os
import sys

from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from rose.adapters.trl import RosePool, TrlWeights, TrlWorker  # (ROSE)
from rose.gateway.auth import token_for

RELAY = os.path.abspath("relay")  # a folder; http://host:port of `rose relay up` between machines


def even_share(completion_ids, **_):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def main(model, gateway="http://127.0.0.1:8002", relay=RELAY, steps=12):
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Number {n}."}]} for n in range(64)])
    args = AsyncGRPOConfig(
        output_dir="trl-output",
        max_steps=int(steps),
        per_device_train_batch_size=32,
        gradient_accumulation_steps=1,
        num_generations=8,
        max_completion_length=2,
        learning_rate=1e-3,
        max_staleness=4,
        token_budget=-1,  # else TRL asks a vLLM server for its longest sequence
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    pool = RosePool(
        model, gateway=gateway, relay=relay, run="trl-example", token=token_for("trainer", gateway)
    )  # (ROSE)
    trainer = AsyncGRPOTrainer(
        model=model,
        args=args,
        train_dataset=dataset,
        reward_funcs=even_share,
        rollout_worker=TrlWorker(pool, args, dataset, even_share),  # (ROSE)
        weight_transfer=TrlWeights(pool),  # (ROSE)
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print("mean reward of each step:", ", ".join(f"{reward:.2f}" for reward in rewards))


if __name__ == "__main__":
    main(*sys.argv[1:])
