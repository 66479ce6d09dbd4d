"""Two consecutive AdamW steps of a small language model: fp32 masters, their bf16 weights before and after.

A Qwen3 of 12M parameters learns to predict a random grammar. It first learns at 1e-3, so that its weights are no longer
those it was drawn with, then takes `SETTLING_STEPS` at the learning rate in question, so that the optimiser's averages
belong to it; the next step is measured. Weights are laid end to end in the model's order.

    python benchmarks/deltas/adamw_steps.py FILE.npz --learning-rates 1e-6 1e-5
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY, WORDS = 4096, 256  # most tokens are never seen, as in any one step of a real run
LEARNING_STEPS, SETTLING_STEPS = 60, 8
BATCH, TOKENS = 4, 64


def small_model() -> torch.nn.Module:
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2,
        head_dim=64, intermediate_size=1024, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def grammar(seed: int) -> Iterator[torch.Tensor]:
    """Batches of texts in which every word allows eight successors, some more than others."""
    draw = np.random.default_rng(seed)
    successors = draw.integers(0, WORDS, (WORDS, 8))
    while True:
        texts = np.empty((BATCH, TOKENS), np.int64)
        texts[:, 0] = draw.integers(0, WORDS, BATCH)
        for i in range(1, TOKENS):
            texts[:, i] = successors[texts[:, i - 1], np.minimum(draw.geometric(0.4, BATCH) - 1, 7)]
        yield torch.from_numpy(texts)


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, texts: Iterator[torch.Tensor], steps: int) -> float:
    loss = torch.zeros(())
    for _ in range(steps):
        text = next(texts)
        loss = model(input_ids=text, labels=text).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return float(loss.detach())


def weights_bf16(model: torch.nn.Module) -> NDArray[np.uint16]:
    pieces = [p.detach().to(torch.bfloat16).flatten().view(torch.int16).numpy() for p in model.parameters()]
    return np.concatenate(pieces).view(np.uint16)


def consecutive(learning_rates: list[float], seed: int) -> dict[str, NDArray[np.uint16]]:
    """`base_LR` and `new_LR` for every learning rate, all from the same learned model."""
    torch.manual_seed(seed)
    model, texts = small_model(), grammar(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = learn(model, optimizer, texts, LEARNING_STEPS)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, loss {loss:.2f} after {LEARNING_STEPS} steps")
    found = {}
    for rate in learning_rates:
        for group in optimizer.param_groups:
            group["lr"] = rate
        learn(model, optimizer, texts, SETTLING_STEPS)
        found[f"base_{rate:g}"] = weights_bf16(model)
        learn(model, optimizer, texts, 1)
        found[f"new_{rate:g}"] = weights_bf16(model)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[1e-6, 1e-5])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    np.savez(arguments.file, **consecutive(arguments.learning_rates, arguments.seed))


if __name__ == "__main__":
    main()
