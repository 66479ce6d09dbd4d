"""The engines of these tests: SGLang's servers on one core, started with the interpreter that has SGLang.

The tests themselves run without SGLang; `ROSE_SGLANG_PYTHON` names the interpreter of the environment that has it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
from tests.vllm.engines import ServingEngine, _pinned

from rose.openai.http_server import free_port
from rose.sglang.plugin import ROLE_VARIABLE
from rose.sglang.sglang_process import ON_CPU
from rose.vllm.engine_process import RolloutEngineSettings

PYTHON = os.environ.get("ROSE_SGLANG_PYTHON", "")
CORE = max(os.sched_getaffinity(0))
SOURCES = str(Path(__file__).parents[2] / "src")
CONTEXT_TOKENS = 1024


METADATA = "Metadata-Version: 2.1\nName: rose-plugin-of-tests\nVersion: 0\n"
ENTRY_POINTS = "[sglang.srt.plugins]\nrose = rose.sglang.plugin:register\n"


def install_plugin(folder: Path) -> Path:
    """Make a folder that declares ROSE's plugin as an installed package does, and return it."""
    package = folder / "rose_plugin_of_tests-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(METADATA)
    (package / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def environment(*folders: Path) -> dict[str, str]:
    paths = [SOURCES, *map(str, folders)]
    return {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def rollout_engine(model: Path, **changes: Any) -> RolloutEngineSettings:
    plain: dict[str, Any] = {
        "max_context_tokens": CONTEXT_TOKENS,
        "max_sequences": 8,
        "step_tokens": 128,
        "kv_memory_mb": 64,
        "python": PYTHON,
        "environment": environment(),
    }
    return RolloutEngineSettings(model, f"cpu:{CORE}", **{**plain, **changes})


class SglangServing(ServingEngine):
    """An SGLang server with the one variable that lending needs. It sleeps when idle, since it shares its core."""

    def __init__(self, model: Path, log: Path, plugins: Path, port: int = 0) -> None:
        self.port, self.log = port or free_port(), log
        flags = {
            "--model-path": str(model),
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--context-length": str(CONTEXT_TOKENS),
            "--max-running-requests": "16",
            "--max-total-tokens": "16384",
            "--chunked-prefill-size": "256",
            **ON_CPU,
        }
        words = [word for pair in flags.items() for word in pair]
        switches = ["--skip-tokenizer-init", "--incremental-streaming-output", "--sleep-on-idle"]
        own = {**environment(plugins), ROLE_VARIABLE: "serving", "SGLANG_USE_CPU_ENGINE": "1"}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [PYTHON, "-m", "sglang.launch_server", *words, *switches],
                env={**os.environ, **own},
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=_pinned,
            )

    async def answer(self, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
        """Return greedy token ids and their log-probabilities."""
        params = {"max_new_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        async with aiohttp.ClientSession() as http, http.post(self.url + "/generate", json=body) as reply:
            assert reply.status == 200, await reply.text()
            answer = json.loads(await reply.text())
        return answer["output_ids"], [scored[0] for scored in answer["meta_info"]["output_token_logprobs"]]
