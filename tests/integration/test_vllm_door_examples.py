"""The configurations in examples/ for trainers made for vLLM: what they name exists and does what they expect.

The trainers are not installed: their calls are repeated with the HTTP libraries that they use, as their sources of
prime-rl 0.8 (`utils/client.py`) and SkyRL 0.4.0 (`inference_servers/remote_inference_client.py`) make them.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import yaml
from tests.integration import devices, gateways
from tests.integration.gateways import RunningGateway
from tests.integration.test_vllm_door import PROMPT, RUN_SECRET, Trainer, check_runs, gateway

from rose.cli.gateway import configure
from rose.gateway.auth import VARIABLES
from rose.models.presets import write_preset
from rose.weights.keys import SECRET
from rose.weights.manifest import folder_hash

EXAMPLES = devices.ROOT / "examples"
TOML, YAML = EXAMPLES / "prime_rl.toml", EXAMPLES / "skyrl_external.yaml"
MARK = "# (ROSE)"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("qwen3-3m", tmp_path_factory.mktemp("models") / "qwen3-3m", seed=0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def found(model: Path, place: Path) -> Iterator[RunningGateway]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET, RUN_SECRET)
        with gateway(model, place) as running, gateways.worker(model, running.url, "a"):
            running.has_open(1)
            yield running


@pytest.mark.parametrize("example", [TOML, YAML])
def test_the_flags_in_an_example_are_those_of_the_command(example: Path) -> None:
    text = re.sub(r"\\\n#\s*", "", example.read_text())
    [command] = re.findall(r"^#\s+rose (gateway .*)$", text, re.MULTILINE)
    parser = argparse.ArgumentParser()
    configure(parser)
    assert parser.parse_args(shlex.split(command)[1:]).door == "vllm"
    assert all(len(line) <= 120 for line in example.read_text().splitlines())


def test_prime_rl_trains_with_five_lines(found: RunningGateway, model: Path, place: Path) -> None:
    config = tomllib.loads(TOML.read_text())
    marked = [line.split("#")[0].strip() for line in TOML.read_text().splitlines() if line.endswith(MARK)]
    client, broadcast = config["orchestrator"]["model"]["client"], config["weight_broadcast"]
    assert len(marked) == 5 and "inference" not in config
    assert (set(client), broadcast) == ({"base_url", "api_key_var"}, {"type": "filesystem"})
    assert client["api_key_var"] == VARIABLES["trainer"]
    base_url = client["base_url"].replace("http://gateway:8002", found.url)
    headers = {"Authorization": f"Bearer {gateways.TOKENS[client['api_key_var']]}"}
    admin = httpx.Client(base_url=base_url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=devices.PATIENCE_S)
    trainer = Trainer(model, place / "outputs")
    with admin:
        admin.get("/health").raise_for_status()
        models = admin.get("/v1/models").json()["data"]
        assert [card["id"] for card in models] == ["qwen3-3m"] and models[0]["max_model_len"] > 0
        for _ in range(2):
            folder = trainer.write(is_sharded=False)
            for path, more in (
                ("/pause", {"params": {"mode": "keep", "clear_cache": "false"}}),
                ("/update_weights", {"json": {"weight_dir": folder.as_posix()}}),
                ("/resume", {}),
            ):
                assert admin.post(path, **more).raise_for_status().status_code == 200  # type: ignore[arg-type]
            check_runs(found, folder_hash(folder))
        families = admin.get("/metrics").raise_for_status().text
    for family in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"):
        assert f"vllm:{family}{{" in families
    assert "vllm:num_preemptions_total" in families


def test_skyrl_simulates_its_training_on_the_pool(found: RunningGateway) -> None:
    config = yaml.safe_load(YAML.read_text())
    engine, trainer = config["generator"]["inference_engine"], config["trainer"]
    assert engine["run_engines_locally"] is trainer["placement"]["colocate_all"] is False
    assert trainer["fully_async"]["simulate_training"] is True
    proxy_url: str = engine["external_proxy_url"]
    assert "${oc.env:ROSE_TRAINER_TOKEN}" in proxy_url
    token = gateways.TOKENS["ROSE_TRAINER_TOKEN"]
    url = proxy_url.replace("${oc.env:ROSE_TRAINER_TOKEN}", token).replace("gateway:8002", found.url.split("//")[1])

    async def calls() -> None:
        async with aiohttp.ClientSession() as session:

            async def call(path: str, json: Any = None, method: str = "POST", **more: Any) -> Any:
                async with session.request(method, url + path, json=json, **more) as reply:
                    assert reply.status == 200, (path, await reply.text())
                    return await reply.json() if reply.content_length else None

            assert (await call("/get_world_size", {}, "GET"))["world_size"] == 1
            await call("/pause", params={"mode": "keep", "clear_cache": "false"})
            sampling = {"max_tokens": 4, "logprobs": 0, "include_stop_str_in_output": True}
            body = {"sampling_params": sampling, "token_ids": PROMPT}
            session_id = {"X-Session-ID": "a-trajectory"}
            turn = asyncio.create_task(call("/inference/v1/generate", body, headers=session_id))
            await call("/resume")
            [choice] = (await turn)["choices"]
            assert len(choice["token_ids"]) == 4 or choice["finish_reason"] == "stop"
            await call("/detokenize", {"model": "qwen3-3m", "tokens": choice["token_ids"]})
            await call("/finish_session", params={"session_id": "a-trajectory"})
            await call("/reset_prefix_cache", {"reset_running_requests": False})

    asyncio.run(calls())
