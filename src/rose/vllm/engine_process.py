"""A rollout engine as a process: vLLM's own server with our scheduler, started and ended with all its children.

The server runs in vLLM's development mode, whose routes call any method of the worker, write weights and stop the
engine, and which vLLM's API key does not protect. So it listens on no port, only on a Unix socket (`--uds`) in a folder
that no other user may enter: neither another account of the machine nor a web page can connect to it.

On a CPU a single worker lives inside the engine's process: vLLM's default puts it into another one, whose reader of
steps spins for a second after every message and starves a serving engine on the same core. With tensor parallelism
there is a process per rank, and the plugin lets their readers sleep instead. On a GPU vLLM does not start unless the
share of it that it may use is free, 92 % by default. Where its KV memory is given, that share decides nothing else, so
it is set to hardly any. Where memory runs out the kernel ends the rollout engine first.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from rose.engines.process_keeper import ChildProcess
from rose.errors import ConfigError, Unavailable
from rose.private_files import without_secrets
from rose.vllm.control_segment import ENGINE_FOLDER_VARIABLE, EngineControl, Segment, open_control
from rose.vllm.discovery import FOLDER_VARIABLE, own_folder, own_name, remove_dead_segments
from rose.vllm.plugin import POOL_VARIABLE, ROLLOUT_VARIABLE
from rose.vllm.vllm_client import URL, connector
from rose.vllm.vllm_engine import VllmEngine

IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
PER_RANK = "mp"  # a worker process for each rank
DEVICE = re.compile(r"(cpu|cuda):\d+(-\d+)?")
DEVICE_HINT = "give cpu:0, cpu:0-3, cuda:0 or cuda:0-3"
NICE = 10  # behind serving, wherever the kernel decides
USABLE = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset[int]()
ON_CPU = {"--dtype": "float32", "--block-size": "32", "--distributed-executor-backend": IN_PROCESS}
ON_GPU = {"--gpu-memory-utilization": "0.01"}
MODULE = "vllm.entrypoints.openai.api_server"  # the `vllm` command asks for a package name that CPU wheels have not
OOM_SCORE_HIGHEST = "1000"  # the kernel ends this process first when memory runs out
SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un of Linux has 108 with the terminating zero
READY_S = 300.0  # a large model on a busy machine
LOG_LINES = 12
LOG_BYTES_MAX, LOG_BYTES_KEPT = 8 << 20, 1 << 20
SHUTDOWN_GRACE_S = 5.0  # it has nothing to save


@dataclass(frozen=True, slots=True)
class RolloutEngineSettings:
    """The settings of a rollout engine to start. `device` is `cpu:N`, `cpu:N-M`, `cuda:N` or `cuda:N-M`."""

    model: Path
    device: str = "cpu:0"
    max_context_tokens: int = 4096  # 0 takes the model's own
    max_sequences: int = 16
    step_tokens: int = 256  # the longest step is what a serving request may find in its way
    kv_memory_mb: int = 256  # of every rank
    kv_pool: str = ""  # the folder of a serving engine's pool, of `kv_memory_mb`, to join
    python: str = sys.executable
    extra: tuple[str, ...] = ()  # further flags of vLLM
    environment: dict[str, str] = field(default_factory=dict)
    tensor_parallel: int = 0  # ranks; 0 is one per GPU, or one on a CPU

    @property
    def is_cpu(self) -> bool:
        return self.device.startswith("cpu")

    @property
    def numbers(self) -> list[int]:
        """Return the numbers of the device's cores or GPUs."""
        first, _, last = self.device.partition(":")[2].partition("-")
        return list(range(int(first), int(last or first) + 1))

    @property
    def cores(self) -> list[int]:
        """Return the cores of a CPU device; a GPU has none."""
        return self.numbers if self.is_cpu else []

    @property
    def parts(self) -> list[str]:
        """Return the devices of one core or one GPU each."""
        kind = self.device.partition(":")[0]
        return [f"{kind}:{number}" for number in self.numbers]

    @property
    def ranks(self) -> int:
        """Return the tensor-parallel ranks: each has a part of every layer, and a worker process of its own."""
        return self.tensor_parallel or (1 if self.is_cpu else len(self.numbers))


def socket_path(folder: Path) -> Path:
    """Return where the engine's server listens. Raises ConfigError if the path is too long for a Unix socket."""
    path = folder / "http"
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        hint = f"set {FOLDER_VARIABLE} to a folder with a short path"
        raise ConfigError(f"{path} is too long for a Unix socket ({SOCKET_PATH_BYTES_MAX} bytes)", hint=hint)
    return path


def launch_command(engine: RolloutEngineSettings, folder: Path) -> list[str]:
    """Return the command that starts vLLM's server."""
    flags = {
        "--model": str(engine.model),
        "--served-model-name": "rollout",
        "--uds": str(socket_path(folder)),
        "--max-num-seqs": str(engine.max_sequences),
        "--max-num-batched-tokens": str(max(engine.step_tokens, engine.max_sequences)),
        "--kv-cache-memory-bytes": str(engine.kv_memory_mb << 20),
        "--scheduler-cls": "rose.vllm.RolloutScheduler",
        "--scheduling-policy": "priority",
        "--weight-transfer-config": json.dumps({"backend": "rose"}),
        "--worker-extension-cls": "rose.vllm.vllm_weights.RoseWorker",
        "--logprobs-mode": "processed_logprobs",
    }
    if engine.max_context_tokens:
        flags["--max-model-len"] = str(engine.max_context_tokens)
    flags |= ON_CPU if engine.is_cpu else ON_GPU
    if engine.ranks > 1:
        flags |= {"--tensor-parallel-size": str(engine.ranks), "--distributed-executor-backend": PER_RANK}
    switches = ["--enable-scale-out", "--no-async-scheduling", "--disable-uvicorn-access-log"]
    switches += ["--enforce-eager"] if engine.is_cpu else []
    return [engine.python, "-m", MODULE, *(word for pair in flags.items() for word in pair), *switches, *engine.extra]


def launch_environment(engine: RolloutEngineSettings, folder: Path) -> dict[str, str]:
    """Return the environment of the engine, without ROSE's secrets."""
    own = {
        ENGINE_FOLDER_VARIABLE: str(folder),
        ROLLOUT_VARIABLE: "1",
        POOL_VARIABLE: engine.kv_pool,
        "VLLM_SERVER_DEV_MODE": "1",  # pause, weights and aborts; only this user can open the socket
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    }
    if engine.is_cpu:
        threads = max(1, len(engine.cores) // engine.ranks)
        own |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    else:
        own |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, engine.numbers))}
    return {**without_secrets(os.environ), **own, **engine.environment}


def prepare_child(engine: RolloutEngineSettings) -> Callable[[], None]:
    """Set cores, lower priority, early out-of-memory end and death with the parent in the new process, before vLLM."""
    cores, library = engine.cores if engine.is_cpu else None, ctypes.CDLL(None)

    def prepare() -> None:
        os.setsid()
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
        if cores is not None:
            os.sched_setaffinity(0, cores)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(OOM_SCORE_HIGHEST)
        library.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    return prepare


def check_engine(engine: RolloutEngineSettings) -> None:
    """Raise ConfigError for settings that cannot work on this machine."""
    if not DEVICE.fullmatch(engine.device):
        raise ConfigError(f"`{engine.device}` is not a device", hint=DEVICE_HINT)
    if not engine.numbers:
        raise ConfigError(f"`{engine.device}` ends before it begins", hint=DEVICE_HINT)
    _check_ranks(engine)
    if not (engine.model / "config.json").is_file():
        raise ConfigError(f"{engine.model} is not a model folder: it has no config.json")
    if engine.is_cpu:
        missing = set(engine.cores) - USABLE
        if missing:
            raise ConfigError(f"core {min(missing)} of {engine.device} is not here or not for us", hint="see `nproc`")


def _check_ranks(engine: RolloutEngineSettings) -> None:
    devices, ranks = len(engine.numbers), engine.ranks
    if ranks < 1 or (engine.is_cpu and devices % ranks):
        raise ConfigError(
            f"{devices} cores of {engine.device} cannot be shared by {ranks} tensor-parallel ranks",
            hint="give as many cores to every rank: --tensor-parallel 2 --device cpu:0-1",
        )
    if not engine.is_cpu and devices != ranks:
        raise ConfigError(
            f"{engine.device} has {devices} GPUs, and a tensor-parallel rank needs one: {ranks} ranks were given",
            hint="start an agent of its own for every replica, each with its GPUs",
        )


class EngineProcess:
    """One run of one rollout engine."""

    def __init__(self, settings: RolloutEngineSettings) -> None:
        check_engine(settings)
        self.settings = settings
        remove_dead_segments()
        self.folder = Path(tempfile.mkdtemp(prefix=f"desk-{own_name()}-", dir=own_folder()))
        self.log = self.folder / "engine.log"
        self._engine: VllmEngine | None = None
        self._process: ChildProcess | None = None

    @property
    def socket(self) -> Path:
        return socket_path(self.folder)

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.process_id

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.is_running

    async def start(self) -> VllmEngine:
        """Start the engine. Raises Unavailable with the end of its log if it does not come up."""
        control = open_control(self.folder, create=True)
        with self.log.open("ab") as log:  # appended to, so that it can be cut while the engine writes
            process = subprocess.Popen(
                self._command(),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=prepare_child(self.settings),
            )
        self._process = ChildProcess(process, "the rollout engine", is_group=True)
        await self._until_ready()
        self._engine = self._connect(control)
        return self._engine

    # What another engine than vLLM does otherwise

    def _command(self) -> list[str]:
        return launch_command(self.settings, self.folder)

    def _environment(self) -> dict[str, str]:
        return launch_environment(self.settings, self.folder)

    def _connect(self, control: Segment[EngineControl]) -> VllmEngine:
        is_seeded = not self.settings.is_cpu
        return VllmEngine(self.socket, self.folder, control, lambda: self.is_running, is_seeded=is_seeded)

    async def _until_ready(self) -> None:
        deadline_s = time.monotonic() + READY_S
        async with aiohttp.ClientSession(connector=connector(self.socket)) as http:
            while time.monotonic() < deadline_s:
                if not self.is_running:
                    raise Unavailable(f"the rollout engine did not start; the end of its log:\n{self.log_tail()}")
                with suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with http.get(URL + "/health", timeout=aiohttp.ClientTimeout(5)) as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.2)
        raise Unavailable(f"the rollout engine was not ready within {READY_S:g} s:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """Return the end of its log; only lines with `Error` if there are any: they say more than a traceback."""
        with suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()
            shown = [line for line in lines if "Error" in line] or lines
            return "\n".join(f"  {line[-300:]}" for line in shown[-LOG_LINES:])
        return "  (none)"

    def cut_log(self) -> None:
        """Keep the newest part of a log that has grown large: it lies in memory, beside what serving needs."""
        with suppress(OSError), self.log.open("r+b") as log:
            size = log.seek(0, os.SEEK_END)
            if size > LOG_BYTES_MAX:
                log.seek(size - LOG_BYTES_KEPT)
                newest = log.read()
                log.truncate(0)
                log.seek(0)
                log.write(newest)

    def kill(self) -> None:
        """End the engine at once, with every process that it started."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """End the engine, and wait until it and all that it started are gone."""
        if self._engine is not None:
            await self._engine.close()
        if self._process is not None:
            await self._process.stop(SHUTDOWN_GRACE_S)
        shutil.rmtree(self.folder, ignore_errors=True)
