"""vLLM's CPU build in one process, as `benchmarks/engine.py` runs it, in an environment of its own."""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="0", VLLM_NO_USAGE_STATS="1",
)  # fmt: skip

from lines import Work, serve


def load(first: dict[str, Any]) -> Work:
    from vllm import LLM, SamplingParams

    # One prefill step for the whole batch, so that every later step decodes the whole batch.
    llm = LLM(first["model"], dtype="float32", max_model_len=512, max_num_batched_tokens=16384, max_num_seqs=64,
              enable_prefix_caching=False)  # fmt: skip

    def work(order: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(temperature=0.0, max_tokens=order["new_tokens"], ignore_eos=True, detokenize=False)
        return {"tok_s": decode(llm.llm_engine, sampling, order)}

    return work


def decode(engine: Any, sampling: Any, order: dict[str, Any]) -> float:
    import numpy as np

    rng = np.random.default_rng(order["seed"])
    for number in range(order["batch"]):
        ids = rng.integers(0, 256, order["prompt_tokens"]).tolist()
        engine.add_request(f"{time.monotonic_ns()}-{number}", {"prompt_token_ids": ids}, sampling)
    tokens, elapsed_s = 0, 0.0
    while engine.has_unfinished_requests():
        begun = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == order["batch"] and all(len(output.outputs[0].token_ids) > 1 for output in outputs):
            elapsed_s += time.perf_counter() - begun
            tokens += len(outputs)
    return tokens / elapsed_s


if __name__ == "__main__":
    serve(load)
