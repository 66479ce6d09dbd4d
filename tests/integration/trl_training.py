"""A run of TRL's AsyncGRPOTrainer on a gateway, in TRL's own environment; test_trl.py starts it and reads its lines.

python tests/support/trl_on_cpu.py trl_training.py REQUEST, where REQUEST is JSON. Every line is an object, one per step
and one at the end with what the test compares. Nothing of TRL's trainer is changed: its model and queue are watched.
"""

from __future__ import annotations

import functools
import json
import queue
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from rose.adapters.trl import RosePool, TrlWeights, TrlWorker
from rose.api.requests import TurnAnswer, TurnSampling
from rose.client import GatewayClient
from rose.weights.manifest import folder_hash

PROBE = list(range(40, 70))
TRIES_MAX = 120
PATIENCE_S = 5.0  # of the trainer with its gateway
COLUMNS = ("reward", "sample/staleness_max", "batch/samples_per_step", "sample/dropped_stale_total")


class WatchedQueue(queue.Queue):
    """Notes every sample that goes in, and every one that comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.came, self.taken = [], []

    def put_nowait(self, sample: Any) -> None:
        self.came.append(sample)
        super().put_nowait(sample)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        sample = super().get(*args, **kwargs)
        self.taken.append(sample)
        return sample


class Lines(TrainerCallback):
    """Prints what TRL logs, one line per step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "reward" in logs:
            say(step=state.global_step, **{name: logs.get(name) for name in COLUMNS})


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def main(request: dict[str, Any]) -> None:
    folder = Path(request["folder"])
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Number {n}."}]} for n in range(16)])
    args = AsyncGRPOConfig(output_dir=str(folder / "trl"), **request["config"])
    where = {"gateway": request["gateway"], "relay": str(folder / "relay"), "run": "trl-test"}
    pool = RosePool(request["model"], **where, patience_s=PATIENCE_S)
    worker = TrlWorker(pool, args, dataset, even_share)
    worker.rollout_buffer = watched = WatchedQueue()
    trainer = AsyncGRPOTrainer(
        model=request["model"],
        args=args,
        train_dataset=dataset,
        reward_funcs=even_share,
        callbacks=[Lines()],
        rollout_worker=worker,
        weight_transfer=TrlWeights(pool),
    )
    differences = watch_first_step(trainer)
    trainer.train()
    mine = hash_of(trainer.model, Path(request["model"]), folder / "final")
    groups = Counter(sample.group_id for sample in watched.came)
    say(
        hash=mine,
        counts=worker.counts,
        unfinished=worker._unfinished,
        group_sizes=sorted(set(groups.values())),
        came=len(watched.came),
        distinct=len({id(sample) for sample in watched.came}),
        taken=len(watched.taken),
        left=watched.qsize(),
        versions=sorted({sample.model_version for sample in watched.came}),
        first_difference=differences[0],
        last_difference=difference_at_the_end(pool, folder / "final"),
        rounding=difference_by_rounding(trainer.model, request["model"], folder / "final"),
    )


def watch_first_step(trainer: AsyncGRPOTrainer) -> list[float]:
    """Return where the largest difference between trainer's and worker's log-probabilities in the first step will be.

    Later steps train on samples of older weights too.
    """
    differences: list[float] = []
    outputs: list[Any] = []
    compute = trainer.compute_loss
    trainer.model.register_forward_hook(lambda module, arguments, output: outputs.append(output))

    def watched(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute(model, inputs, *args, **kwargs)
        selected = inputs["token_index"] >= 0
        mine = outputs.pop().log_probs.flatten()[inputs["token_index"][selected]]
        differences.append(float((mine - inputs["old_log_probs"][selected]).abs().max()))
        return loss

    trainer.compute_loss = watched
    return differences


def difference_at_the_end(pool: RosePool, final: Path) -> float:
    """Return the largest difference for an answer that a worker gives with the last version."""
    model = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    label = max(pool.numbers, key=pool.numbers.get)
    for seed in range(TRIES_MAX):
        sampling = TurnSampling(max_tokens=16, seed=seed)
        answer = pool.ask(functools.partial(answered, f"end-{seed}", sampling))
        if all(span.version == label for span in answer.spans):
            ids = torch.tensor([[*PROBE, *answer.token_ids]])
            mine = logprobs_of(model, ids)[-len(answer.token_ids) :]
            return float((mine - torch.tensor(answer.logprobs)).abs().max())
        time.sleep(0.5)
    raise AssertionError(f"no worker runs {label}")


async def answered(name: str, sampling: TurnSampling, client: GatewayClient) -> TurnAnswer:
    return await client.trajectory(name)(PROBE, sampling)


def difference_by_rounding(trained: torch.nn.Module, model: str, final: Path) -> float:
    """Return by how much log-probabilities differ between the trainer's fp32 weights and the same in bf16."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    whole.load_state_dict(trained.state_dict())
    rounded = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    ids = torch.tensor([[*PROBE, *PROBE]])
    return float((logprobs_of(whole, ids) - logprobs_of(rounded, ids)).abs().max())


def logprobs_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token but the first."""
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def hash_of(model: torch.nn.Module, source: Path, folder: Path) -> str:
    """Return the hash of the trainer's weights in bf16, by torch's own rounding."""
    shutil.copytree(source, folder)
    weights = {name: value.detach().bfloat16().contiguous() for name, value in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder_hash(folder)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
