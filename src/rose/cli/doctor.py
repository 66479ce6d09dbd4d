"""`rose doctor`: what this machine can run, and how to get what is missing.

Every check looks at one thing and returns a `Finding`; none of them raises. The exit code answers one question: can the
embedded engine run here? What only some parts need (extras, a second environment, a browser) never makes it fail.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import mmap
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rose import __version__

SUMMARY = "say what this machine can run, and how to get what is missing"

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
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `remedy` is what to do when it is not ok."""

    name: str
    is_ok: bool
    found: str
    remedy: str = ""
    is_essential: bool = True


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "exit code 0: the embedded engine can run here; 1: it cannot"


def run(arguments: argparse.Namespace) -> int:
    findings = list(examine())
    print(f"rose {__version__} on {platform.platform(terse=True)}\n")
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"  {_mark(finding):<8} {finding.name:<{width}}  {finding.found}")
        if not finding.is_ok:
            print(f"  {'':<8} {'':<{width}}  try: {finding.remedy}")
    can_run = all(finding.is_ok for finding in findings if finding.is_essential)
    print(
        "\n"
        + ("The embedded engine can run here. Next: rose demo" if can_run else "The embedded engine cannot run yet.")
    )
    return 0 if can_run else 1


def examine() -> Iterator[Finding]:
    """Every check, in the order a person would make them."""
    checks: tuple[Callable[[], Finding], ...] = (system, python, cores, cpu_features, memory, shared_pages)
    yield from (check() for check in checks)
    yield from (dependency(name, is_essential) for name, is_essential in DEPENDENCIES.items())
    yield compile_cache()
    yield engine()
    yield codec()
    yield dependency("transformers", False, "make venv (the tests compare with it)")
    yield dependency("alfworld", False, "pip install 'rose-rl[alfworld]' (for that task alone)")
    yield vllm_environment()
    yield browser()


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
    found = f"{platform.machine()} {' '.join(present)}".strip()
    return Finding("vectors", is_fast, found, "it runs, only slower; CPUs from about 2013 on have AVX2 and FMA", False)


def memory(meminfo: Path = Path("/proc/meminfo")) -> Finding:
    words = _first_value(meminfo, ("MemAvailable",)).split()
    available_mb = int(words[0]) // 1024 if words else 0
    remedy = f"free {MEMORY_MINIMUM_MB} MiB, or lower engine.kv_memory_mb"
    return Finding("memory", available_mb >= MEMORY_MINIMUM_MB, f"{available_mb} MiB available", remedy)


def shared_pages() -> Finding:
    """Pages of a memfd placed at a chosen address: how two models will share one pool of memory."""
    try:
        works = _map_page_fixed()
    except (OSError, AttributeError) as error:
        return Finding(
            "pages", False, f"memfd and MAP_FIXED do not work: {error}", "a Linux kernel 3.17 or newer", False
        )
    return Finding("pages", works, "memfd and MAP_FIXED work", "a Linux kernel 3.17 or newer", False)


def dependency(name: str, is_essential: bool, remedy: str = INSTALL) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(name), remedy, is_essential)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", remedy, is_essential)


def compile_cache() -> Finding:
    """Where numba keeps compiled kernels; without one, every start compiles again."""
    remedy = "NUMBA_CACHE_DIR=<a folder you may write>; without it every start compiles the kernels again"
    try:
        from rose.engines.embedded.compiling import cache_folder
    except ImportError as error:
        return Finding("kernel cache", False, f"not to be found: {error}", remedy, False)
    place = cache_folder()
    return Finding("kernel cache", _is_writable(place), str(place), remedy, False)


def engine() -> Finding:
    """Make the smallest model and have it answer: what a check of parts can miss, this does not."""
    begun_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            tokens = _generate(Path(folder) / "model")
    except Exception as error:  # whatever a broken installation may raise
        return Finding("engine", False, f"{type(error).__name__}: {error}", f"{INSTALL} (into a fresh environment)")
    found = f"computed {tokens} tokens; ready in {time.monotonic() - begun_s:.1f} s (the first time it compiles)"
    return Finding("engine", tokens > 0, found, INSTALL)


def codec() -> Finding:
    """Code some weights and decode them, in every type: compiled here, no worker has to wait for it."""
    begun_s = time.monotonic()
    try:
        is_right = _send_weights()
    except Exception as error:  # whatever a broken installation may raise
        remedy = f"{INSTALL} (into a fresh environment)"
        return Finding("weight codec", False, f"{type(error).__name__}: {error}", remedy, False)
    spent = f"ready in {time.monotonic() - begun_s:.1f} s (the first time it compiles)"
    found = f"deltas are exact; {spent}" if is_right else "a delta did not come out as it went in"
    return Finding("weight codec", is_right, found, INSTALL, False)


def vllm_environment(folder: Path = Path(".venv-vllm")) -> Finding:
    is_there = (folder / "bin" / "python").exists()
    return Finding(
        "vllm", is_there, str(folder) if is_there else "not set up", "make venv-vllm (to compare with it)", False
    )


def browser() -> Finding:
    path = next((path for path in map(shutil.which, BROWSERS) if path), None)
    return Finding("chromium", path is not None, path or "not found", "apt-get install chromium (to test pages)", False)


def _generate(folder: Path) -> int:
    from rose.config.device import EngineSettings
    from rose.engines.base import Budget, Request, Sampling
    from rose.engines.embedded.engine import EmbeddedEngine
    from rose.models.presets import write_preset

    write_preset("frozenlake-1m", folder, seed=0)
    engine = EmbeddedEngine.load(folder, EngineSettings(kv_memory_mb=64))
    engine.add(Request("doctor", (1, 2, 3), Sampling(max_tokens=4, ignore_eos=True)))
    tokens = 0
    while (plan := engine.plan(Budget(64, 1))) is not None:
        tokens += sum(len(event.token_ids) for event in engine.step(plan))
    return tokens


def _send_weights() -> bool:
    import numpy as np

    from rose.weights import codec
    from rose.weights.codec.kernels import warm_up

    is_right = True
    for element_type in (codec.ElementType.BF16, codec.ElementType.FP32):  # the functions for bf16 fit fp16 too
        warm_up(element_type, to_encode=True)
        base = np.arange(4096).astype(element_type.storage)
        new, held = base + (base % 7 == 0).astype(base.dtype), base.copy()
        codec.apply(codec.encode(base, new, element_type=element_type), held)
        is_right &= bool(np.array_equal(held, new))
    return is_right


def _mark(finding: Finding) -> str:
    if finding.is_ok:
        return "ok"
    return "MISSING" if finding.is_essential else "absent"


def _first_value(file: Path, keys: tuple[str, ...]) -> str:
    """The value of the first `key : value` line of a /proc file; empty if there is none."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() in keys), "")


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _map_page_fixed() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    size, map_fixed = mmap.PAGESIZE, 0x10
    file = os.memfd_create("rose-doctor")
    try:
        os.pwrite(file, b"rose", 0)
        os.ftruncate(file, size)
        address = libc.mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        placed = libc.mmap(address, size, mmap.PROT_READ, mmap.MAP_SHARED | map_fixed, file, 0)
        works = placed == address and ctypes.string_at(placed, 4) == b"rose"
        libc.munmap(address, size)
        return works
    finally:
        os.close(file)
