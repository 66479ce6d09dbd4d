"""transformers' `generate`, and the bare matrix products of a step, as `benchmarks/engine.py` runs them."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from lines import Work, serve
from torch.nn import functional


class Stamps(transformers.StoppingCriteria):
    """Notes the time after every token; never stops."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def load(first: dict[str, Any]) -> Work:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(first["model"], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    linears = [
        (module.in_features, module.out_features) for module in model.modules() if isinstance(module, torch.nn.Linear)
    ]

    def work(order: dict[str, Any]) -> dict[str, Any]:
        if order["what"] == "bare":
            return {"bare_s": bare_products_s(linears, order["batch"]), "linears": linears}
        return {"tok_s": decode(model, order)}

    return work


def decode(model: Any, order: dict[str, Any]) -> float:
    generator = torch.Generator().manual_seed(order["seed"])
    ids = torch.randint(0, 256, (order["batch"], order["prompt_tokens"]), generator=generator)
    stamps = Stamps()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=order["new_tokens"], do_sample=False,
                       pad_token_id=0, stopping_criteria=transformers.StoppingCriteriaList([stamps]))  # fmt: skip
    elapsed_s = stamps.times_s[-1] - stamps.times_s[0]
    return float(order["batch"] * (len(stamps.times_s) - 1) / elapsed_s)


def bare_products_s(linears: list[tuple[int, int]], batch: int, repeats: int = 10) -> float:
    """Every linear layer of a step, each by the faster of the plain and the prepacked product."""
    rows = [(torch.randn(batch, size_in), torch.randn(size_out, size_in)) for size_in, size_out in linears]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, batch) for _, weight in rows]
    best = [[float("inf"), float("inf")] for _ in rows]
    with torch.inference_mode():
        for _ in range(repeats):
            times = [_seconds(lambda x=x, w=w: functional.linear(x, w)) for x, w in rows]
            times_packed = [
                _seconds(lambda x=x, p=p: torch.ops.mkldnn._linear_pointwise(x, p, None, "none", [], ""))
                for (x, _), p in zip(rows, packed, strict=True)
            ]
            for slot, plain, fast in zip(best, times, times_packed, strict=True):
                slot[0], slot[1] = min(slot[0], plain), min(slot[1], fast)
    return sum(min(slot) for slot in best)


def _seconds(work: Any) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    serve(load)
