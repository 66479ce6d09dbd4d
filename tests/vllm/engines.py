"""The engines of these tests: vLLM's servers on one core, started with the interpreter that has vLLM.

The tests themselves run without vLLM; `ROSE_VLLM_PYTHON` names the interpreter of the environment that has it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from rose.openai.http_server import free_port
from rose.vllm.engine_process import IN_PROCESS, MODULE, PER_RANK, RolloutEngineSettings

PYTHON = os.environ.get("ROSE_VLLM_PYTHON", "")
CORES = sorted(os.sched_getaffinity(0))
CORE = CORES[-1]
PROJECT = Path(__file__).parents[2]
SOURCES = str(PROJECT / "src")
READY_S = 240.0
CONTEXT_TOKENS = 1024


def environment(plugins: Path | None = None) -> dict[str, str]:
    """With further plugins of vLLM, if a folder is given (forced_async.py)."""
    paths = [SOURCES] if plugins is None else [SOURCES, str(PROJECT), str(plugins)]
    return {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


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


def asynchronous(engine: RolloutEngineSettings, plugins: Path) -> RolloutEngineSettings:
    flags = ("--scheduler-cls", "rose.vllm.AsyncRolloutScheduler", "--async-scheduling")
    return replace(engine, extra=flags, environment=environment(plugins))


class ServingEngine:
    """A `vllm serve` with the one flag that lending needs, or another one."""

    def __init__(
        self,
        model: Path,
        log: Path,
        scheduler: str = "ServingScheduler",
        port: int = 0,
        plugins: Path | None = None,
        kv_memory_mb: int = 64,
        ranks: int = 1,
    ) -> None:
        self.port, self.log = port or free_port(), log
        flags = {
            "--model": str(model),
            "--served-model-name": "serving",
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--dtype": "float32",
            "--max-model-len": str(CONTEXT_TOKENS),
            "--max-num-seqs": "16",
            "--max-num-batched-tokens": "256",
            "--kv-cache-memory-bytes": str(kv_memory_mb << 20),
            "--block-size": "32",
            "--distributed-executor-backend": IN_PROCESS if ranks == 1 else PER_RANK,
            "--tensor-parallel-size": str(ranks),
            "--logprobs-mode": "processed_logprobs",
        }
        if scheduler:
            flags["--scheduler-cls"] = f"rose.vllm.{scheduler}"
        words = [word for pair in flags.items() for word in pair]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [PYTHON, "-m", MODULE, *words, "--enforce-eager", "--disable-uvicorn-access-log", "--enable-scale-out"],
                env={**os.environ, **environment(plugins)},
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(_pinned, CORES[-ranks:]),
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def ready(self) -> None:
        deadline_s = time.monotonic() + READY_S
        async with aiohttp.ClientSession() as http:
            while time.monotonic() < deadline_s:
                assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
                with suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with http.get(self.url + "/health", timeout=aiohttp.ClientTimeout(5)) as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.2)
        raise AssertionError("the serving engine did not come up")

    async def answer(self, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
        """Greedy token ids and their log-probabilities."""
        params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}
        body = {"token_ids": prompt, "sampling_params": params, "stream": True}
        tokens: list[int] = []
        logprobs: list[float] = []
        async with aiohttp.ClientSession() as http, http.post(self.url + "/inference/v1/generate", json=body) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        tokens += choice["token_ids"]
                        logprobs += [entry["logprob"] for entry in (choice["logprobs"] or {"content": []})["content"]]
        return tokens, logprobs

    async def metric(self, name: str) -> float:
        """Return the sum of a metric of vLLM."""
        async with aiohttp.ClientSession() as http, http.get(self.url + "/metrics") as reply:
            lines = (await reply.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        self.kill()


def _pinned(cores: list[int]) -> None:
    os.setsid()
    os.sched_setaffinity(0, cores)


def cpu_s(group: int) -> float:
    """Of all processes of a group."""
    ticks = 0
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError, IndexError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group:
                    ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_bytes(group: int) -> int:
    """That is really there, of all processes of a group."""
    total = 0
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError, IndexError):
                if int((path / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                    total += int((path / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total
