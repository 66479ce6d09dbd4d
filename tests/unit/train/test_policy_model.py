"""The trainer's forward pass is the engine's: log-probabilities agree to 1e-4 on the same weights, in every family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from tests.unit.engines.test_engine import CHECKPOINTS, SIZES

from rose.config.server_settings import EngineSettings
from rose.engines.base import Budget, Request, Sampling
from rose.engines.embedded.engine import EmbeddedEngine
from rose.errors import ModelError
from rose.models.presets import write_preset
from rose.train.checkpoint import export_model
from rose.train.policy_model import CausalModel, are_finite, use_threads

PRESETS = ("frozenlake-1m", "qwen3-3m", "qwen2-3m", "llama-3m")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    use_threads(1)


@pytest.fixture(scope="module", params=(*PRESETS, *CHECKPOINTS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Presets of the three families, and odd checkpoints: untied, biased, three kinds of rope, 16 and 32 bits."""
    out = tmp_path_factory.mktemp("checkpoint")
    if request.param in PRESETS:
        return write_preset(request.param, out / "model")
    family, extra, dtype = CHECKPOINTS[request.param]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**SIZES, **extra)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases are ones and zeros by default, which would hide mistakes
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name else 0.0))
    model.to(getattr(torch, dtype)).save_pretrained(out)
    return out


def rollouts(engine: EmbeddedEngine, prompts: Sequence[Sequence[int]], temperature: float):
    """(prompt, tokens, log-probabilities) of each, drawn together."""
    sampling = Sampling(temperature=temperature, max_tokens=24, ignore_eos=True, seed=3)
    for index, prompt in enumerate(prompts):
        engine.add(Request(str(index), tuple(prompt), sampling))
    found = {str(index): (list(prompt), [], []) for index, prompt in enumerate(prompts)}
    while (plan := engine.plan(Budget(64, 16))) is not None:
        for event in engine.step(plan):
            found[event.request_id][1].extend(event.token_ids)
            found[event.request_id][2].extend(event.logprobs)
    return list(found.values())


def padded(rows: Sequence[tuple[list[int], list[int], list[float]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and which of them are scored; what pads them is no token anybody drew."""
    length = max(len(prompt) + len(drawn) for prompt, drawn, _ in rows)
    token_ids = torch.full((len(rows), length), 5)
    scored = torch.zeros(len(rows), length, dtype=torch.bool)
    for row, (prompt, drawn, _) in enumerate(rows):
        end = len(prompt) + len(drawn)
        token_ids[row, :end] = torch.tensor(prompt + drawn)
        scored[row, len(prompt) : end] = True
    return token_ids, scored


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_equal_the_engines(folder: Path, temperature: float) -> None:
    model = CausalModel.load(folder)
    engine = EmbeddedEngine.load(folder, EngineSettings(kv_memory_mb=64))
    prompts = [[(7 * step + row) % 100 for step in range(length)] for row, length in enumerate((1, 2, 17, 60, 200))]
    rows = rollouts(engine, prompts, temperature)
    with torch.no_grad():
        found, entropy = model.logprobs(*padded(rows), temperature)
    reported = torch.tensor([logprob for _, _, logprobs in rows for logprob in logprobs])
    assert (found - reported).abs().max() < 1e-4
    assert (entropy > 0).all()


def test_padding_changes_nothing(folder: Path) -> None:
    model = CausalModel.load(folder)
    short, long = ([list(range(1, 9)), [3, 4, 5], [0.0] * 3], [list(range(40)), [6] * 9, [0.0] * 9])
    with torch.no_grad():
        together = model.logprobs(*padded([short, long]))[0]
        alone = torch.cat([model.logprobs(*padded([one]))[0] for one in (short, long)])
    assert torch.allclose(together, alone, atol=1e-5)


def test_gradients_are_those_of_the_log_probability(tmp_path: Path) -> None:
    model = CausalModel.load(write_preset("frozenlake-1m", tmp_path / "m"))
    token_ids, scored = padded([(list(range(20)), [30, 31, 32], [])])
    model.logprobs(token_ids, scored)[0].sum().backward()
    for name in (
        "model.embed_tokens.weight",
        "model.layers.3.mlp.down_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
    ):
        weight, step = model.weights[name], 1e-2
        index = int(weight.grad.abs().argmax())
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                weight.view(-1)[index] += sign * step
                values.append(float(model.logprobs(token_ids, scored)[0].double().sum()))
                weight.view(-1)[index] -= sign * step
        numeric = (values[0] - values[1]) / (2 * step)
        assert numeric == pytest.approx(float(weight.grad.view(-1)[index]), rel=0.03)


def test_a_first_token_cannot_be_scored(tmp_path: Path) -> None:
    model = CausalModel.load(write_preset("frozenlake-1m", tmp_path / "m"))
    with pytest.raises(AssertionError, match="first token"):
        model.logprobs(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_exported_and_loaded_again(tmp_path: Path, dtype: str) -> None:
    begin = write_preset("qwen2-3m", tmp_path / "begin")
    model = CausalModel.load(begin)
    export_model(model, begin, tmp_path / "out", dtype)  # type: ignore[arg-type]
    again = CausalModel.load(tmp_path / "out")
    for name, weight in model.weights.items():
        assert torch.allclose(weight, again.weights[name], atol=1e-3)
        assert dtype == "f16" or torch.equal(weight, again.weights[name]), "a preset's weights are bf16 numbers"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (begin / "tokenizer.json").read_bytes()
    EmbeddedEngine.load(tmp_path / "out", EngineSettings(kv_memory_mb=64))


def test_weights_that_are_not_finite_are_never_written(tmp_path: Path) -> None:
    begin = write_preset("frozenlake-1m", tmp_path / "begin")
    model = CausalModel.load(begin)
    with torch.no_grad():
        model.weights["model.norm.weight"][3] = float("nan")
    assert not model.is_finite()
    with pytest.raises(ModelError, match="not finite"):
        export_model(model, begin, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begin"], "nothing is left behind"


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_number_is_found(value: float) -> None:
    assert are_finite([torch.ones(3), torch.zeros(2, 2)])
    assert not are_finite([torch.ones(3), torch.tensor([1.0, value])])
