"""vLLM's own weight transfer, as a trainer uses it, through a gateway: the real factory, client and weight source.

The trainer is a process of the environment that has vLLM; the gateway and its workers are ROSE's.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration import devices, gateways
from tests.vllm.engines import PYTHON, environment

from rose.models.presets import write_preset
from rose.weights.keys import SECRET
from rose.weights.manifest import folder_hash

TRAINER_S = 300.0
RUN_SECRET = "a-secret-of-these-tests-and-no-other"
TRAINER = r"""
import json, os, sys
import torch
from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory
from rose.adapters.vllm_trainer import RoseTrainerInitInfo

model, url, relay, out = sys.argv[1:]
weights = load_file(f"{model}/model.safetensors")

class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = torch.nn.ParameterList(torch.nn.Parameter(each.float()) for each in weights.values())
    def named_parameters(self, *args, **kwargs):
        return zip(weights, self.kept)

module = Holder()
client = HTTPVLLMWeightSyncClient(url)
told = []
post = client._post
client._post = lambda path, json=None: (told.append(path), post(path, json))[1]
def engine_of(rank):
    init_info = RoseTrainerInitInfo(model, relay, "my-run", rank=rank)
    return WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=ModuleSource(module))
engine, other = engine_of(0), engine_of(1)
for step in (1, 2, 3):
    with torch.no_grad():
        for parameter in module.kept:
            parameter.view(-1)[:: 5 + step] += 0.01 * step
    engine.send_weights()
    other.send_weights()
engine.shutdown()
save_file({name: p.detach().bfloat16() for name, p in module.named_parameters()}, f"{out}/model.safetensors")
try:
    WeightTransferTrainerFactory.trainer_init(RoseTrainerInitInfo(model, relay, "my-run", rank=0), client=client)
except Exception as error:
    told.append(str(error))
print(json.dumps(told))
"""


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, gateways.RunningGateway]]:
    monkeypatch.setenv(SECRET, RUN_SECRET)
    model = write_preset("qwen3-3m", tmp_path / "qwen3-3m", seed=0)
    with (
        gateways.gateway(model, "control.api=vllm", "beat_s=0.2") as found,
        gateways.worker(model, found.url, "a"),
        gateways.worker(model, found.url, "b"),
    ):
        found.has_open(2)
        yield model, found


def test_the_real_factory_and_client_train_the_pool(
    running: tuple[Path, gateways.RunningGateway], tmp_path: Path
) -> None:
    model, found = running
    out = tmp_path / "out"
    out.mkdir()
    url = found.url.replace("http://", f"http://:{gateways.TRAINER}@")
    words: list[Any] = [PYTHON, "-c", TRAINER, model, url, tmp_path / "relay", out]
    variables = devices.environment() | environment() | {SECRET: RUN_SECRET}
    trainer = subprocess.run(words, capture_output=True, text=True, env=variables, timeout=TRAINER_S)
    assert trainer.returncode == 0, trainer.stderr[-4000:]
    *told, error = json.loads(trainer.stdout.splitlines()[-1])
    steps = ["start_weight_update", "update_weights", "finish_weight_update"]
    assert told == ["init_weight_transfer_engine", *steps * 3] and "source" in error
    wanted = folder_hash(out)
    assert found.members(hash=wanted) == ["a", "b"]
    assert found.ask("GET", "/weight_info").json == {"weight_version": f"3-{wanted[:8]}"}
