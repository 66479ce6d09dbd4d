"""How a rollout engine is started: vLLM's own server with our scheduler, on a Unix socket, beside the serving engine.

The server runs in vLLM's development mode, which has routes that call any method of the worker, write weights and stop
the engine. vLLM's API key does not protect these routes: its middleware checks only paths below `/v1`, `/v2`,
`/inference` and `/cohere`. Therefore the server listens on no port, only on a Unix socket in a folder that no other
user may enter (`--uds`). Neither another account of the machine nor a web page can connect to it.

On a CPU the worker must live inside the engine's process: vLLM's default puts it into another one, whose reader of
steps spins for a second after every message and starves a serving engine on the same core. Weights stay in the type of
the KV cache, unpacked, so that they can be patched.

On a GPU vLLM does not start unless the share of it that it may use is free, 92 % by default; where its KV memory is
given, that share decides nothing else. So it is told to use hardly any.

Where memory runs out the kernel ends the rollout engine before anybody else: it can be started again.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rose.config.environment import without_secrets
from rose.engines.vllm.desk import DESK_VARIABLE
from rose.engines.vllm.finding import FOLDER_VARIABLE
from rose.engines.vllm.plugin import ROLLOUT_VARIABLE
from rose.errors import ConfigError

IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
DEVICE = re.compile(r"cpu:\d+(-\d+)?|cuda:\d+")
NICE = 10  # behind serving, wherever the kernel has a say
USABLE = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset[int]()
ON_CPU = {"--dtype": "float32", "--block-size": "32", "--distributed-executor-backend": IN_PROCESS}
ON_GPU = {"--gpu-memory-utilization": "0.01"}
MODULE = "vllm.entrypoints.openai.api_server"  # the `vllm` command asks for a package name that CPU wheels have not
ENDED_FIRST = "1000"  # for the kernel, when memory runs out
SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un of Linux has 108 with the terminating zero


@dataclass(frozen=True, slots=True)
class RolloutEngine:
    """A rollout engine to be started. `device` is `cpu:N`, `cpu:N-M` or `cuda:N`."""

    model: Path
    device: str = "cpu:0"
    max_context_tokens: int = 4096  # 0 takes the model's own
    max_sequences: int = 16
    step_tokens: int = 256  # the longest step is what a serving request may find in its way
    kv_memory_mb: int = 256
    python: str = sys.executable
    extra: tuple[str, ...] = ()  # further flags of vLLM
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_cpu(self) -> bool:
        return self.device.startswith("cpu")

    @property
    def cores(self) -> list[int]:
        first, _, last = self.device.removeprefix("cpu:").partition("-")
        return list(range(int(first), int(last or first) + 1))

    @property
    def parts(self) -> list[str]:
        """Devices of one core, or the GPU."""
        return [f"cpu:{core}" for core in self.cores] if self.is_cpu else [self.device]


def socket_path(desk: Path) -> Path:
    """Return where the engine's server listens. Raises ConfigError if the path is too long for a Unix socket."""
    path = desk / "http"
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        hint = f"set {FOLDER_VARIABLE} to a folder with a short path"
        raise ConfigError(f"{path} is too long for a Unix socket ({SOCKET_PATH_BYTES_MAX} bytes)", hint=hint)
    return path


def command(engine: RolloutEngine, desk: Path) -> list[str]:
    flags = {
        "--model": str(engine.model),
        "--served-model-name": "rollout",
        "--uds": str(socket_path(desk)),
        "--max-num-seqs": str(engine.max_sequences),
        "--max-num-batched-tokens": str(max(engine.step_tokens, engine.max_sequences)),
        "--kv-cache-memory-bytes": str(engine.kv_memory_mb << 20),
        "--scheduler-cls": "rose.engines.vllm.RolloutScheduler",
        "--scheduling-policy": "priority",
        "--weight-transfer-config": json.dumps({"backend": "rose"}),
        "--worker-extension-cls": "rose.engines.vllm.weights.RoseWorker",
        "--logprobs-mode": "processed_logprobs",
    }
    if engine.max_context_tokens:
        flags["--max-model-len"] = str(engine.max_context_tokens)
    flags |= ON_CPU if engine.is_cpu else ON_GPU
    switches = ["--enable-scale-out", "--no-async-scheduling", "--disable-uvicorn-access-log"]
    switches += ["--enforce-eager"] if engine.is_cpu else []
    return [engine.python, "-m", MODULE, *(word for pair in flags.items() for word in pair), *switches, *engine.extra]


def environment(engine: RolloutEngine, desk: Path) -> dict[str, str]:
    own = {
        DESK_VARIABLE: str(desk),
        ROLLOUT_VARIABLE: "1",
        "VLLM_SERVER_DEV_MODE": "1",  # pause, weights and aborts; only this user can open the socket
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    }
    if engine.is_cpu:
        own |= {"OMP_NUM_THREADS": str(len(engine.cores)), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    else:
        own |= {"CUDA_VISIBLE_DEVICES": engine.device.removeprefix("cuda:")}
    return {**without_secrets(os.environ), **own, **engine.environment}


def in_child(engine: RolloutEngine) -> Callable[[], None]:
    """Run in the new process before vLLM: its cores, behind serving in time and memory, not longer than its parent."""
    cores, library = engine.cores if engine.is_cpu else None, ctypes.CDLL(None)

    def prepare() -> None:
        os.setsid()
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
        if cores is not None:
            os.sched_setaffinity(0, cores)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(ENDED_FIRST)
        library.prctl(DIE_WITH_PARENT, signal.SIGTERM)

    return prepare


def check(engine: RolloutEngine) -> None:
    """Raises ConfigError for what cannot work on this machine."""
    if not DEVICE.fullmatch(engine.device):
        raise ConfigError(f"`{engine.device}` is not a device", hint="give cpu:0, cpu:0-3 or cuda:0")
    if not (engine.model / "config.json").is_file():
        raise ConfigError(f"{engine.model} is not a model folder: it has no config.json")
    if engine.is_cpu:
        missing = set(engine.cores) - USABLE
        if missing:
            raise ConfigError(f"core {min(missing)} of {engine.device} is not here or not for us", hint="see `nproc`")
