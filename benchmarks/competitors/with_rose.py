"""The embedded engine, as `benchmarks/engine.py` runs it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from lines import Work, serve
from msgspec.structs import replace
from numba import njit

from rose.config.server_settings import EngineSettings
from rose.engines.base import Budget, Request, Sampling
from rose.engines.embedded import engine_kernels as kernels
from rose.engines.embedded.engine import EmbeddedEngine
from rose.engines.embedded.vector import call_at


def load(first: dict[str, Any]) -> Work:
    engine = EmbeddedEngine.load(first["model"], EngineSettings(kv_memory_mb=1024), device=f"cpu:{first['core']}")
    runner, model_s = engine._runner, [0.0]
    run = runner.run

    def timed(*arguments: Any) -> Any:
        begun = time.perf_counter()
        try:
            return run(*arguments)
        finally:
            model_s[0] += time.perf_counter() - begun

    runner.run = timed  # type: ignore[method-assign]

    def work(order: dict[str, Any]) -> dict[str, Any]:
        if order["what"] == "products":
            return {"products_s": products_s(order["linears"], order["batch"])}
        if order["what"] == "differing":
            return {"differing": differing_tokens(engine, order), "tokens": order["batch"] * order["new_tokens"]}
        return decode(engine, order, model_s)

    return work


@njit
def product(address: int, a: Any, w: Any, size: int, panels: int, zeros: Any, c: Any) -> None:
    call_at(address, 1, a.ctypes.data, a.strides[0], a.shape[0], w.ctypes.data, size, panels, zeros.ctypes.data, 0,
            c.ctypes.data, c.strides[0], 0)  # fmt: skip


def products_s(linears: list[tuple[int, int]], batch: int, repeats: int = 10) -> float:
    """Every linear layer of a step by our batch-invariant product, over weights of its own each."""
    rng = np.random.default_rng(0)
    work = []
    for size_in, size_out in linears:
        panels = -(-size_out // 16)
        weight = rng.integers(0, 1 << 14, (panels, size_in // 2, 16)).astype(np.uint32)
        rows = rng.standard_normal((batch, size_in), dtype=np.float32)
        work.append((rows, weight, size_in, panels, np.zeros(panels * 16, np.float32)))
    out = {size_out: np.zeros((batch, -(-size_out // 16) * 16), np.float32) for _, size_out in linears}
    best = [float("inf")] * len(work)
    for _ in range(repeats):
        for number, (rows, weight, size, panels, zeros) in enumerate(work):
            begun = time.perf_counter()
            product(kernels.PRODUCT, rows, weight, size, panels, zeros, out[linears[number][1]])
            best[number] = min(best[number], time.perf_counter() - begun)
    return sum(best)


def differing_tokens(engine: EmbeddedEngine, order: dict[str, Any]) -> int:
    """Sampled tokens that depend on the batch: each request alone, and all together."""
    rng = np.random.default_rng(order["seed"])
    prompts = [tuple(rng.integers(0, 256, order["prompt_tokens"]).tolist()) for _ in range(order["batch"])]
    requests = [
        Request(f"{number}", prompt, Sampling(max_tokens=order["new_tokens"], ignore_eos=True, seed=number))
        for number, prompt in enumerate(prompts)
    ]
    alone = {}
    for request in requests:
        alone |= generate(engine, [replace(request, tenant="alone")])
    together = generate(engine, [replace(request, tenant="together") for request in requests])
    return sum(a != b for name in alone for a, b in zip(alone[name], together[name], strict=True))


def generate(engine: EmbeddedEngine, requests: list[Request]) -> dict[str, list[int]]:
    made: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while (plan := engine.plan(Budget(1 << 30, 1 << 30))) is not None:
        for event in engine.step(plan):
            made[event.request_id] += event.token_ids
    return made


def decode(engine: EmbeddedEngine, order: dict[str, Any], model_s: list[float]) -> dict[str, Any]:
    """Only steps in which the whole batch decodes are counted."""
    batch, sampling = order["batch"], Sampling(temperature=0.0, max_tokens=order["new_tokens"], ignore_eos=True)
    rng = np.random.default_rng(order["seed"])
    for number in range(batch):
        engine.add(Request(f"request-{number}", tuple(rng.integers(0, 256, order["prompt_tokens"]).tolist()), sampling))
    step_s, steps, in_model_s = 0.0, 0, 0.0
    while True:
        begun, model_before = time.perf_counter(), model_s[0]
        plan = engine.plan(Budget(1 << 30, 1 << 30))
        if plan is None:
            break
        engine.step(plan)
        if len(plan.items) == batch and plan.features.new_tokens == batch:
            step_s += time.perf_counter() - begun
            in_model_s += model_s[0] - model_before
            steps += 1
    return {"tok_s": batch * steps / step_s, "step_s": step_s / steps, "model_s": in_model_s / steps}


if __name__ == "__main__":
    serve(load)
