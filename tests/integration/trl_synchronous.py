"""A run of TRL's GRPOTrainer with ROSE's rollout function, in TRL's own environment; test_trl.py starts it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rose.adapters.trl import RosePool, TrlRollouts


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def main(request: dict[str, Any]) -> None:
    folder = Path(request["folder"])
    pool = RosePool(request["model"], gateway=request["gateway"], relay=str(folder / "relay"), run="trl-test")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32),
        args=GRPOConfig(output_dir=str(folder / "trl"), **request["config"]),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": f"Number {n}."}]} for n in range(16)]),
        reward_funcs=even_share,
        rollout_func=TrlRollouts(pool),
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(json.dumps({"rewards": rewards, "versions": len(pool.numbers)}), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
