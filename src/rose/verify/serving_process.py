"""A `vllm serve` that the kit starts as an owner would: one more flag, and room left for a rollout engine.

On a CPU it is pinned to the device's core, and prompts are computed whole: users' requests have seeds, and vLLM 0.32
dies on a CPU of one that has a seed and a prompt that takes more than one step.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp
import msgspec

from rose.bounds import TokenIds
from rose.engines.process_keeper import ChildProcess
from rose.errors import Unavailable
from rose.openai.http_server import free_port
from rose.private_files import without_secrets
from rose.verify.kit_results import KitSettings
from rose.vllm.engine_process import MODULE, ON_CPU, PR_SET_PDEATHSIG, RolloutEngineSettings

READY_S, POLL_S = 420.0, 0.2  # a large model with CUDA graphs, from a cold disk
ANSWER_S = 120.0
SHUTDOWN_GRACE_S = 15.0
LOG_CHARACTERS = 1500
CONTEXT_TOKENS = {True: 1024, False: 4096}  # on a CPU, on a GPU
SEQUENCES = {True: 16, False: 64}
GPU_SHARE = "0.5"  # the rollout engine needs room for weights, activations, CUDA graphs and its KV memory
SERVING_KV_MB_ON_CPU = 64
NAME = "serving"


class _GreedyChoice(msgspec.Struct):
    token_ids: TokenIds | None = None


class _GreedyAnswer(msgspec.Struct):
    choices: tuple[_GreedyChoice]


_decoder = msgspec.json.Decoder(_GreedyAnswer)


def scheduler_for(settings: KitSettings, *, wrong: bool = False) -> str:
    """Return the scheduler for this device's kind of scheduling, or the other one."""
    return "rose.vllm.ServingScheduler" if settings.is_cpu is not wrong else "rose.vllm.AsyncServingScheduler"


def serving_command(settings: KitSettings, model: Path, port: int, scheduler: str) -> list[str]:
    """Return the command of the serving engine."""
    is_cpu = settings.is_cpu
    context = CONTEXT_TOKENS[is_cpu]
    flags = {
        "--model": str(model),
        "--served-model-name": NAME,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--max-model-len": str(context),
        "--max-num-seqs": str(SEQUENCES[is_cpu]),
    }
    if scheduler:
        flags["--scheduler-cls"] = scheduler
    if is_cpu:
        flags |= {
            "--max-num-batched-tokens": str(context),
            "--kv-cache-memory-bytes": str(SERVING_KV_MB_ON_CPU << 20),
            **ON_CPU,
        }
    else:
        flags["--gpu-memory-utilization"] = GPU_SHARE
        flags["--tensor-parallel-size"] = str(RolloutEngineSettings(Path(), settings.device).ranks)
    switches = ["--disable-uvicorn-access-log", *(["--enforce-eager", "--no-enable-chunked-prefill"] if is_cpu else [])]
    return [settings.vllm_python, "-m", MODULE, *(word for pair in flags.items() for word in pair), *switches]


def device_environment(settings: KitSettings) -> dict[str, str]:
    """Return the variables that bind an engine to the device."""
    if settings.is_cpu:
        cores = RolloutEngineSettings(Path(), settings.device).cores
        return {"OMP_NUM_THREADS": str(len(cores)), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, RolloutEngineSettings(Path(), settings.device).numbers))}


class ServingProcess:
    """One run of the serving engine."""

    def __init__(
        self,
        settings: KitSettings,
        model: Path,
        log: Path,
        *,
        scheduler: str | None = None,
        environment: Mapping[str, str] | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        """Start the process: with the right scheduler, unless another is named or, by an empty name, none is wanted.

        `extra` are further flags of vLLM.
        """
        self.port, self.log = free_port(), log
        self.environment, self.extra = dict(environment or {}), tuple(extra)
        self.scheduler = scheduler_for(settings) if scheduler is None else scheduler
        command = serving_command(settings, model, self.port, self.scheduler)
        command += self.extra
        with log.open("ab") as out:
            process = subprocess.Popen(
                command,
                env={**without_secrets(os.environ), **device_environment(settings), **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=_prepare(settings),
            )
        self._process = ChildProcess(process, "the serving engine", is_group=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._process.is_running

    async def until_ready(self) -> None:
        """Wait until it answers. Raises Unavailable with the end of its log if it does not come up."""
        deadline_s = time.monotonic() + READY_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5)) as http:
            while time.monotonic() < deadline_s:
                if not self.is_running:
                    raise Unavailable(f"the serving engine did not start; the end of its log:\n{self.log_tail()}")
                with suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with http.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(POLL_S)
        raise Unavailable(f"the serving engine was not ready within {READY_S:g} s:\n{self.log_tail()}")

    async def until_ended(self, seconds_max: float) -> bool:
        """Wait for its end; return whether it came in time."""
        deadline_s = time.monotonic() + seconds_max
        while self.is_running and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
        return not self.is_running

    async def greedy(self, prompt: list[int], tokens: int) -> tuple[int, ...]:
        """Return the greedy continuation of a prompt. Raises Unavailable."""
        body = {
            "model": NAME,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ANSWER_S)) as http:
                async with http.post(f"{self.url}/v1/completions", json=body) as response:
                    content = await response.read()
            answer = _decoder.decode(content).choices[0].token_ids
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Unavailable(f"the serving engine did not answer: {error!r}") from error
        if answer is None:
            raise Unavailable("the serving engine did not return the ids of its tokens")
        return answer

    def log_text(self) -> str:
        with suppress(OSError):
            return self.log.read_text(errors="replace")
        return ""

    def log_tail(self) -> str:
        """Return the end of its log; lines with an error first if there are any."""
        text = self.log_text()
        errors = "\n".join(line[-300:] for line in text.splitlines() if "Error" in line)
        return (errors or text)[-LOG_CHARACTERS:] or "(empty)"

    def kill(self) -> None:
        self._process.kill()

    async def close(self) -> None:
        await self._process.stop(SHUTDOWN_GRACE_S)


def _prepare(settings: KitSettings) -> Callable[[], None]:
    cores = RolloutEngineSettings(Path(), settings.device).cores if settings.is_cpu else None
    library = ctypes.CDLL(None)

    def prepare() -> None:
        os.setsid()
        if cores is not None:
            os.sched_setaffinity(0, cores)
        library.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    return prepare
