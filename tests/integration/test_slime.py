"""slime's two hooks at a real gateway with an embedded worker, called as slime calls them; slime itself is not run."""

from __future__ import annotations

import asyncio
import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.integration import devices, gateways
from tests.integration.slime_rank import FACTORS, Sample, Status, sampling_params, weights, write_version

from rose.adapters.slime import generate, publish
from rose.errors import ConfigError, ModelError, RequestRefused, Unavailable
from rose.models.model_folder import load_model_folder
from rose.models.presets import write_preset
from rose.models.tensors import write_tensors
from rose.weights.keys import SECRET
from rose.weights.manifest import folder_hash

RANKS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("frozenlake-1m", tmp_path_factory.mktemp("models") / "frozenlake-1m", seed=0)


@pytest.fixture(scope="module", autouse=True)
def secrets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in gateways.TOKENS.items():
            patch.setenv(name, value)
        patch.setenv(SECRET, "a-secret-of-these-tests-and-no-other")
        yield


@pytest.fixture(scope="module")
def running(model: Path, secrets: None) -> Iterator[gateways.RunningGateway]:
    """A gateway and its worker."""
    with gateways.gateway(model) as found, gateways.worker(model, found.url, "a"):
        found.has_open(1)
        yield found


def arguments(model: Path, gateway: str, folder: Path, **changes: Any) -> SimpleNamespace:
    """slime's arguments: its own, and those of the file of --custom-config-path."""
    rose = {"rose_gateway": gateway, "rose_relay": str(folder / "relay"), "rose_run": "slime-test"}
    return SimpleNamespace(hf_checkpoint=str(model), rollout_seed=42, **(rose | changes))


def hash_with(model: Path, folder: Path, factor: float) -> str:
    """Return the hash of the weights that slime wrote as a version."""
    shutil.copytree(model, folder)
    arrays = {name: tensor.float().numpy() for name, tensor in weights(model, factor).items()}
    write_tensors(folder / "model.safetensors", arrays)
    return folder_hash(folder)


@pytest.mark.timeout(300)
def test_weights_of_every_rank_reach_the_worker_and_a_group_is_played_with_them(
    model: Path, running: gateways.RunningGateway, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.integration.slime_rank"]
    environment = devices.environment() | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "USE_LIBUV": "0"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(model), str(tmp_path), running.url],
            cwd=devices.ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    errors = [process.communicate(timeout=240)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * RANKS, "\n".join(errors)[-4000:]
    expected = hash_with(model, tmp_path / "whole", FACTORS[-1])
    devices.eventually(lambda: running.members(hash=expected) == ["a"])
    assert not list(tmp_path.glob("weight_v*"))

    group = [Sample(group_index=3, index=12 + number, prompt="Where is the goal?") for number in range(4)]
    args = arguments(model, running.url, tmp_path)

    async def play() -> list[Sample]:
        return await asyncio.gather(*(generate(args, sample, sampling_params()) for sample in group))

    assert asyncio.run(play()) == group
    for sample in group:
        check(sample, model, "Where is the goal?")
        assert sample.weight_versions == [str(len(FACTORS))]
    assert len({tuple(sample.tokens) for sample in group}) > 1, "the members of a group have seeds of their own"


def check(sample: Sample, model: Path, prompt: str) -> None:
    """Check what slime's trainer relies on."""
    tokenizer = load_model_folder(model).tokenizer
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert sample.tokens[: len(prompt_ids)] == prompt_ids
    answer = sample.tokens[len(prompt_ids) :]
    assert sample.response_length == len(answer) == len(sample.rollout_log_probs or []) and len(answer) > 0
    assert sample.loss_mask == [1] * len(answer)
    assert sample.response == tokenizer.decode(answer, skip_special_tokens=False)
    assert np.all(np.array(sample.rollout_log_probs) <= 0)
    assert sample.status is (Status.TRUNCATED if len(answer) == 24 else Status.COMPLETED)


def test_slime_and_miles_call_generate_with_these_parameters() -> None:
    """slime passes `evaluation` if it is among the parameters; miles adapts three whose first is not `input`."""
    assert list(inspect.signature(generate).parameters) == ["args", "sample", "sampling_params", "evaluation"]
    assert list(inspect.signature(publish).parameters) == ["args", "version_dir", "rollout_engines"]
    assert inspect.iscoroutinefunction(generate) and not inspect.iscoroutinefunction(publish)


def test_a_sample_with_part_of_a_response_goes_on_from_it(
    model: Path, running: gateways.RunningGateway, tmp_path: Path
) -> None:
    args = arguments(model, running.url, tmp_path)
    sample = asyncio.run(generate(args, Sample(index=1, prompt="goal"), sampling_params(max_new_tokens=4)))
    first, length = list(sample.tokens), sample.response_length
    sample.loss_mask = [0] * length  # as slime's --mask-offpolicy-in-partial-rollout does
    sample.status = Status.ABORTED
    sample = asyncio.run(generate(args, sample, sampling_params(max_new_tokens=12)))
    assert sample.tokens[: len(first)] == first and length < sample.response_length <= 12
    assert sample.loss_mask == [0] * length + [1] * (sample.response_length - length)
    assert len(sample.rollout_log_probs or []) == sample.response_length
    sample = asyncio.run(generate(args, sample, sampling_params(max_new_tokens=sample.response_length)))
    assert sample.status is Status.TRUNCATED


def test_an_evaluation_may_be_drawn_from_part_of_the_distribution(
    model: Path, running: gateways.RunningGateway, tmp_path: Path
) -> None:
    args, greedy = arguments(model, running.url, tmp_path), sampling_params(top_k=1)
    with pytest.raises(ConfigError, match="drawn from the whole distribution, and top_k is 1"):
        asyncio.run(generate(args, Sample(prompt="goal"), greedy))
    found = [asyncio.run(generate(args, Sample(index=n, prompt="goal"), greedy, evaluation=True)) for n in range(2)]
    assert found[0].tokens == found[1].tokens


@pytest.mark.parametrize(
    "changes, sample, error",
    [
        pytest.param({"stop": ["###"]}, Sample(prompt="goal"), "turns do not end at texts", id="stop-text"),
        pytest.param({}, Sample(prompt="goal", multimodal_inputs={"images": ["x"]}), "images or sound", id="images"),
    ],
)
def test_what_cannot_be_played_is_refused_before_a_turn(
    model: Path, tmp_path: Path, changes: Any, sample: Any, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        asyncio.run(generate(arguments(model, "http://127.0.0.1:9", tmp_path), sample, sampling_params(**changes)))


def test_settings_come_from_the_environment_too(
    model: Path, running: gateways.RunningGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SimpleNamespace(hf_checkpoint=str(model))
    with pytest.raises(ConfigError, match="the gateway of this job is not known\n  try: write rose_gateway into"):
        asyncio.run(generate(args, Sample(prompt="goal"), sampling_params()))
    monkeypatch.setenv("ROSE_GATEWAY", running.url)
    monkeypatch.setenv("ROSE_RUN", "by-environment")
    assert asyncio.run(generate(args, Sample(prompt="goal"), sampling_params())).response_length > 0
    with pytest.raises(ConfigError, match="the relay of this job is not known"):
        publish(args, str(tmp_path), [])
    monkeypatch.setenv("RANK", "1")
    publish(args, str(tmp_path), [])  # another rank needs no settings


def vanish(folder: Path) -> None:
    shutil.rmtree(folder)


def lose_a_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def cut_a_shard(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])


def lose_the_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def hold_differences(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"metadata": {"delta_encoding": "xor"}}))


@pytest.mark.parametrize(
    "harm, error",
    [
        (vanish, "weight_v000001 of slime's weights is not there"),
        (lose_a_shard, "names model-00002-of-00002.safetensors, which is not in the folder"),
        (cut_a_shard, "model-00002-of-00002.safetensors is not a whole safetensors file"),
        (lose_the_index, "model.safetensors is missing, and so is model.safetensors.index.json"),
        (
            hold_differences,
            "weight_v000001 does not hold whole weights\n  try: start slime with --update-weight-mode full",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_and_the_next_one_is_published(
    model: Path, running: gateways.RunningGateway, tmp_path: Path, harm: Any, error: str
) -> None:
    args = arguments(model, running.url, tmp_path, rose_run=harm.__name__.replace("_", "-"))
    folder = write_version(model, tmp_path / "weight_v000001", 1.0)
    harm(folder)
    with pytest.raises((ModelError, ConfigError), match=error):
        publish(args, str(folder), [])
    before, factor = running.pool()["version"], 2.0 ** -len(harm.__name__)  # other weights in each case
    write_version(model, tmp_path / "weight_v000002", factor)
    publish(args, str(tmp_path / "weight_v000002"), [])
    assert running.pool()["version"] != before
    expected = hash_with(model, tmp_path / "whole", factor)
    devices.eventually(lambda: running.members(hash=expected) == ["a"])


def test_a_wrong_token_and_a_gateway_that_is_away_are_errors(
    model: Path, running: gateways.RunningGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_version(model, tmp_path / "weight_v000001", 1.0)
    away = arguments(model, "http://127.0.0.1:9", tmp_path, rose_patience_s=0.5)
    with pytest.raises(Unavailable, match=r"the gateway at http://127\.0\.0\.1:9 cannot be reached"):
        publish(away, str(folder), [])
    with pytest.raises(Unavailable, match=r"the gateway at http://127\.0\.0\.1:9 cannot be reached"):
        asyncio.run(generate(away, Sample(prompt="goal"), sampling_params()))
    monkeypatch.setenv("ROSE_TRAINER_TOKEN", "not-the-token-of-this-gateway")
    wrong = arguments(model, running.url, tmp_path, rose_run="wrong-token")
    with pytest.raises(RequestRefused, match="the gateway answered 401"):
        publish(wrong, str(folder), [])
    with pytest.raises(RequestRefused, match="the gateway answered 401"):
        asyncio.run(generate(wrong, Sample(prompt="goal"), sampling_params()))
    assert not (tmp_path / "relay").exists()
