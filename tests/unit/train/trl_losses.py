"""What TRL makes of a batch: its losses, its advantages, and the gradient of every weight.

    python trl_losses.py REQUEST.json ANSWER_FOLDER

It runs in an environment of its own, with TRL and without ROSE. The batch comes in by TRL's own door for rollouts of
others (`rollout_func`), and everything between that and the loss is TRL's code: masks, advantages within groups,
log-probabilities of the older weights and of the reference, the correction for what the engine said. Then the weights
are changed to the newer ones, as several updates on one batch would, and the loss is taken.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": ""}

import numpy as np
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

Request = dict[str, Any]


class EngineElsewhere:
    """TRL corrects for what an engine said only where it believes to have one."""

    def sync_weights(self) -> None: ...


def answer(request: Request, folder: Path) -> None:
    """losses.json, and the gradients of every case beside it."""
    found = {}
    for name, settings in request["cases"].items():
        trainer = make_trainer(request, settings, folder)
        inputs = trainer._generate_and_score_completions([{"prompt": "x"} for _ in request["rewards"]])
        load(trainer.model, request["models"]["new"])
        trainer.model.zero_grad()
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        gradients = {key: weight.grad.numpy() for key, weight in trainer.model.named_parameters()}
        np.savez(folder / f"{name}.npz", **gradients)
        found[name] = {"loss": float(loss), "advantages": inputs["advantages"].tolist()}
    (folder / "losses.json").write_text(json.dumps(found))


def make_trainer(request: Request, settings: Request, folder: Path) -> trl.GRPOTrainer:
    """With the older weights, which are those that a batch is drawn under."""
    models = request["models"]
    tokenizer = AutoTokenizer.from_pretrained(models["old"])
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(models["old"], dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=lambda completions, reward, **_: reward,
        rollout_func=lambda prompts, trainer: {key: request[key] for key in request["columns"]},
        train_dataset=Dataset.from_list([{"prompt": "x"}]),
        args=configured(request, settings, folder),
    )
    trainer.use_vllm = settings["is_corrected"]
    trainer.vllm_generation, trainer._last_loaded_step = EngineElsewhere(), -1
    trainer.current_gradient_accumulation_steps = 1
    if trainer.ref_model is not None:
        load(trainer.ref_model.float(), models["reference"])  # TRL makes it as precise as the model's file says
    trainer.model.train()
    return trainer


def configured(request: Request, settings: Request, folder: Path) -> trl.GRPOConfig:
    rows = len(request["rewards"])
    return trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        per_device_train_batch_size=rows,
        num_generations=request["group_size"],
        num_iterations=2,  # so that older log-probabilities are kept
        **settings["config"],
    )


def load(model: torch.nn.Module, folder: str) -> None:
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(other.state_dict())


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
