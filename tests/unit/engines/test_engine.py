"""The embedded engine computes what transformers computes, and the same bits however the work is cut.

Tiny checkpoints of the three families with awkward sizes (nothing a multiple of sixteen), run through every way a
request can go: any chunking, any batch, with and without prefix hits, before and after preemption, on one thread and
on two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rose.config.server_settings import EngineSettings
from rose.engines.base import Budget, Request, Sampling
from rose.engines.embedded.engine import EmbeddedEngine

VOCABULARY = 131
WIDE = Budget(512, 64)
LENGTHS = (1, 2, 15, 16, 17, 33, 100, 333, 1000)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 1100, "initializer_range": 0.15,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

CHECKPOINTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3-untied-bf16": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": False}, "bfloat16"),
    "qwen3-tied-fp32-yarn": (
        "Qwen3",
        {"head_dim": 20, "tie_word_embeddings": True, "rope_parameters": YARN},
        "float32",
    ),
    "qwen2-tied-fp16": ("Qwen2", {"tie_word_embeddings": True}, "float16"),
    "qwen2-untied-bf16": ("Qwen2", {"tie_word_embeddings": False}, "bfloat16"),
    "llama-llama3-bf16": ("Llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3}, "bfloat16"),
    "llama-biases-linear-fp32": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "rope_parameters": LINEAR},
        "float32",
    ),
}


@dataclass
class Checkpoint:
    folder: Path
    reference: Any  # the transformers model, in float32

    def logits(self, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
        with torch.inference_mode():
            return self.reference(torch.tensor([list(token_ids)])).logits[0].numpy()


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    family, extra, dtype = CHECKPOINTS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **extra)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases are ones and zeros by default, which would hide mistakes
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name else 0.0))
    folder = tmp_path_factory.mktemp("checkpoint")
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1, "the checkpoint should be sharded"
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Checkpoint(folder, reference)


@dataclass
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logits: list[np.ndarray[Any, Any]] = field(default_factory=list)
    cached_tokens: int = 0


def load(checkpoint: Checkpoint, *, device: str = "cpu:0", kv_tokens: int = 0, **settings: Any) -> EmbeddedEngine:
    engine = EmbeddedEngine.load(checkpoint.folder, EngineSettings(kv_memory_mb=64, **settings), device=device)
    if kv_tokens:
        engine.limit_kv(kv_tokens // 16)
    return engine


def run(engine: EmbeddedEngine, requests: Sequence[Request], budget: Budget = WIDE) -> dict[str, Outcome]:
    """Run to the end, keeping the logits each token was drawn from."""
    outcomes = {request.request_id: Outcome() for request in requests}
    draw = engine._sampler.draw

    def recording(live: Any, logits: Any) -> Any:
        for row, one in enumerate(live):
            outcomes[one.request.request_id].logits.append(logits[row, :VOCABULARY].copy())
        return draw(live, logits)

    engine._sampler.draw = recording  # type: ignore[method-assign]
    for request in requests:
        engine.add(request)
    while (plan := engine.plan(budget)) is not None:
        for event in engine.step(plan):
            outcome = outcomes[event.request_id]
            outcome.token_ids += event.token_ids
            outcome.logprobs += event.logprobs
            outcome.cached_tokens = max(outcome.cached_tokens, event.cached_tokens or 0)
        engine.scheduler.check()
    engine._sampler.draw = draw  # type: ignore[method-assign]
    return outcomes


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng((length, seed)).integers(0, VOCABULARY, length).tolist())


def requests_of(lengths: Sequence[int], temperature: float = 0.0, tag: str = "", max_tokens: int = 12) -> list[Request]:
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=7)
    return [Request(f"{tag}{length}", prompt(length), sampling) for length in lengths]


def assert_equal_to_transformers(checkpoint: Checkpoint, request: Request, outcome: Outcome) -> None:
    ids = [*request.prompt_ids, *outcome.token_ids[:-1]]
    expected = checkpoint.logits(ids)[len(request.prompt_ids) - 1 :]
    assert np.abs(np.stack(outcome.logits) - expected).max() < 1e-3
    best = np.sort(expected, axis=-1)
    clear = best[:, -1] - best[:, -2] > 1e-3
    assert clear.any()
    assert (expected.argmax(-1) == outcome.token_ids)[clear].all()


@pytest.mark.parametrize("budget", [Budget(512, 64), Budget(64, 64), Budget(7, 3)], ids=str)
def test_equals_transformers_alone_and_chunked(checkpoint: Checkpoint, budget: Budget) -> None:
    engine = load(checkpoint)
    for request in requests_of(LENGTHS if budget.tokens > 7 else LENGTHS[:7]):
        outcome = run(engine, [request], budget)[request.request_id]
        assert_equal_to_transformers(checkpoint, request, outcome)


def test_equals_transformers_batched(checkpoint: Checkpoint) -> None:
    requests = requests_of(LENGTHS)
    outcomes = run(load(checkpoint), requests)
    for request in requests:
        assert_equal_to_transformers(checkpoint, request, outcomes[request.request_id])


def same_bits(one: Outcome, other: Outcome) -> bool:
    same_logits = all(np.array_equal(a, b) for a, b in zip(one.logits, other.logits, strict=True))
    return one.token_ids == other.token_ids and one.logprobs == other.logprobs and same_logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_bits_however_the_work_is_cut(checkpoint: Checkpoint, temperature: float) -> None:
    lengths = (1, 16, 33, 100, 333)
    requests = requests_of(lengths, temperature)
    alone = {request.request_id: run(load(checkpoint), [request])[request.request_id] for request in requests}
    ways = {
        "batched": run(load(checkpoint), requests),
        "in small chunks": run(load(checkpoint), requests, Budget(5, 64)),
        "in small batches": run(load(checkpoint), requests, Budget(64, 2)),
        "on two threads": run(load(checkpoint, device="cpu:0-1"), requests),
        "cut on two threads": run(load(checkpoint, device="cpu:0-1"), requests[-1:], Budget(101, 2)),
    }
    for way, outcomes in ways.items():
        for name, outcome in outcomes.items():
            assert same_bits(outcome, alone[name]), f"{name} {way}"


def test_the_same_bits_after_a_prefix_hit(checkpoint: Checkpoint) -> None:
    engine, request = load(checkpoint), requests_of([333])[0]
    first = run(engine, [request])[request.request_id]
    again = run(engine, [request], Budget(50, 4))[request.request_id]
    assert (first.cached_tokens, again.cached_tokens) == (0, 320)
    assert engine.facts().prefix_hit_tokens == 320
    assert same_bits(first, again)
    longer = Request("longer", (*request.prompt_ids, *first.token_ids[:8], 5, 6, 7), request.sampling)
    outcome = run(engine, [longer])["longer"]
    assert outcome.cached_tokens == 336, "generated tokens are found again too"
    assert same_bits(outcome, run(load(checkpoint), [longer])["longer"])


def test_the_same_bits_after_preemption(checkpoint: Checkpoint) -> None:
    lengths = (100, 101, 102, 103, 104, 105)
    requests = requests_of(lengths, temperature=1.0, max_tokens=40)
    engine = load(checkpoint, kv_tokens=640)
    outcomes = run(engine, requests, Budget(128, 64))
    assert engine.facts().preemptions > 0
    for request in requests:
        alone = run(load(checkpoint), [request])[request.request_id]
        # What was put back is recomputed under the same random numbers; its logits are drawn once per token.
        assert same_bits(outcomes[request.request_id], alone)


def test_evicted_and_resumed_elsewhere(checkpoint: Checkpoint) -> None:
    request = requests_of([50], temperature=1.0, max_tokens=30)[0]
    alone = run(load(checkpoint), [request])[request.request_id]
    first, second = load(checkpoint), load(checkpoint)
    first.add(request)
    for _ in range(9):
        plan = first.plan(Budget(20, 4))
        assert plan is not None
        first.step(plan)
    partial = first.evict(request.request_id)
    assert partial.token_ids == tuple(alone.token_ids[: len(partial.token_ids)])
    assert 0 < len(partial.token_ids) < 30
    resumed = Request("resumed", request.prompt_ids, request.sampling, partial=partial)
    rest = run(second, [resumed])["resumed"]
    assert [*partial.token_ids, *rest.token_ids] == alone.token_ids
    assert [*partial.logprobs, *rest.logprobs] == alone.logprobs


def test_swapped_weights_equal_a_fresh_engine(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.02
    model.save_pretrained(tmp_path)
    engine, request = load(checkpoint), requests_of([100])[0]
    old = run(engine, [request])[request.request_id]
    engine.swap(engine.stage("1", tmp_path))
    new = run(engine, [request])[request.request_id]
    fresh = run(EmbeddedEngine.load(tmp_path, EngineSettings(kv_memory_mb=64)), [request])[request.request_id]
    assert new.cached_tokens == 0, "KV of the old weights was found under the new ones"
    assert same_bits(new, fresh)
    assert not same_bits(new, old)


def test_more_requests_than_declared_get_the_same_tokens(checkpoint: Checkpoint) -> None:
    """Spare sequences have rows of their own in every buffer."""
    requests = requests_of(LENGTHS[:6], temperature=1.0)
    expected = run(load(checkpoint), requests)
    settings = EngineSettings(kv_memory_mb=64, max_sequences=2, max_step_tokens=16)
    engine = EmbeddedEngine.load(checkpoint.folder, settings, spare_sequences=4)
    engine.scheduler.uses_spare = True
    found = run(engine, requests, Budget(64, 64))
    assert {name: outcome.token_ids for name, outcome in found.items()} == {
        name: outcome.token_ids for name, outcome in expected.items()
    }
