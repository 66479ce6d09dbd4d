"""The devices of a run that are vLLM (docs/vllm.md): how each of their processes is started.

    a dedicated worker   `rose lend vllm` without a serving engine
    a borrowed device    a `vllm serve` with our scheduler, and beside it `rose lend vllm`, which holds the owner's
                         controls; each has half of the KV memory

vLLM lives in an environment of its own, whose interpreter is named by the settings or by ROSE_VLLM_PYTHON. Whether it
is there is asked before anything is started with it, without importing vLLM, which takes many seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from rose.config.device import cores_of
from rose.engines.vllm.starting import MODULE, ON_CPU
from rose.errors import ConfigError
from rose.launch.placement import CONTROL_NICENESS, SERVING_NICENESS, TRAINER_NICENESS, Placement
from rose.launch.processes import URL, Command, free_port, roses
from rose.launch.role_secrets import FOR_LENDER, FOR_WORKER
from rose.launch.settings import RunSettings

PYTHON_VARIABLE = "ROSE_VLLM_PYTHON"
BECOME = "import os, sys; os.execvp('env', ['env', *sys.argv[1:]])"  # processes of a run begin as this interpreter
STEP_TOKENS, SEQUENCES = 512, 64
OPEN = {"url": rf"controls are at {URL}"}  # long before there is an engine
JOIN_S_MAX = 600.0
ASKED_S_MAX = 60.0
ASK = "from importlib.util import find_spec; print(*(name for name in ('vllm', 'rose') if find_spec(name) is None))"
INSTALL = f"run `make venv-vllm`, then set vllm_python=.venv-vllm/bin/python, or {PYTHON_VARIABLE} to the same"


def python(settings: RunSettings) -> str:
    """The interpreter that has vLLM."""
    return settings.vllm_python or os.environ.get(PYTHON_VARIABLE) or sys.executable


def check(settings: RunSettings) -> None:
    """Raises ConfigError if a device is to be vLLM and the interpreter for it is not there or does not have it."""
    wanted = [name for name in ("serving", "worker") if getattr(settings, name).engine == "vllm"]
    if not wanted:
        return
    what, where = f"{wanted[0]}.engine is vllm", python(settings)
    try:
        missing = _missing(where)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{what}, and {where} is no interpreter that works: {error}", hint=INSTALL) from error
    if "vllm" in missing:
        raise ConfigError(
            f"{what}, and there is no vLLM for {where}: it lives in an environment of its own", hint=INSTALL
        )
    if "rose" in missing:
        raise ConfigError(
            f"{what}, and the environment of {where} has vLLM but not ROSE, which vLLM must be able to import",
            hint=f"install it there, from its sources: {where} -m pip install --no-deps -e .",
        )


@cache
def _missing(where: str) -> tuple[str, ...]:
    """Which packages this interpreter does not find."""
    asked = subprocess.run([where, "-c", ASK], capture_output=True, text=True, timeout=ASKED_S_MAX, check=True)
    return tuple(asked.stdout.split())


def join_s_max(settings: RunSettings, usual_s: float) -> float:
    """Longest wait for workers once their processes are open; vLLM takes its time."""
    return JOIN_S_MAX if "vllm" in (settings.serving.engine, settings.worker.engine) else usual_s


def serving(role: str, model: Path, settings: RunSettings, placement: Placement) -> Command:
    """Pinned as a whole: vLLM's front is part of the device.

    Prompts are computed whole, since users' requests have seeds, and vLLM 0.32 dies on a CPU of one that has a seed and
    a prompt that takes more than one step.
    """
    check(settings)
    own, cores = settings.serving, cores_of(placement.serving)
    flags = {
        "--model": str(model),
        "--served-model-name": model.name,
        "--host": "127.0.0.1",
        "--port": str(free_port()),
        "--max-model-len": str(own.max_context_tokens),
        "--max-num-seqs": str(SEQUENCES),
        "--max-num-batched-tokens": str(max(STEP_TOKENS, own.max_context_tokens)),
        "--kv-cache-memory-bytes": str((own.kv_memory_mb << 20) // 2),
        "--scheduler-cls": "rose.engines.vllm.ServingScheduler",
        **ON_CPU,
    }
    words = [f"OMP_NUM_THREADS={len(cores)}", "VLLM_CPU_OMP_THREADS_BIND=nobind", python(settings), "-m", MODULE]
    words += [word for pair in flags.items() for word in pair]
    words += ["--enforce-eager", "--disable-uvicorn-access-log", "--no-enable-chunked-prefill"]
    patterns = {"url": rf"Starting vLLM server on {URL}", "up": r"(Application startup complete)"}
    return Command(role, ("-c", BECOME, *words), SERVING_NICENESS, cores, patterns, is_kept=True)


def lender(
    role: str, name: str, serving_url: str, model: Path, settings: RunSettings, placement: Placement, gateway_url: str
) -> Command:
    """Not confined to cores: it starts the rollout engine on serving's, and keeps off them itself."""
    lend, memory_mb = settings.serving.lend, settings.serving.kv_memory_mb
    arguments = _lend(model, placement.serving, name, settings, gateway_url)
    arguments += ["--serving-url", serving_url, "--owner-port", str(free_port()), "--mode", lend.mode]
    arguments += ["--ttft-ms", f"{lend.ttft_ms:g}", "--tpot-ms", f"{lend.tpot_ms:g}"]
    arguments += ["--answer-s", f"{lend.answer_s:g}"]
    arguments += ["--slack-share", f"{lend.slack_share:g}", "--compute", f"{lend.compute_share:g}"]
    arguments += ["--max-sequences", str(lend.max_sequences), "--step-tokens", str(lend.max_step_tokens)]
    arguments += ["--max-context", str(lend.max_context_tokens)]
    arguments += ["--kv-memory-mb", str(max(1, int(memory_mb * lend.memory_share) // 2))]
    return Command(role, roses(*arguments), CONTROL_NICENESS, (), OPEN, is_kept=True, secrets=FOR_LENDER)


def dedicated(role: str, model: Path, settings: RunSettings, placement: Placement, gateway_url: str) -> Command:
    assert placement.worker is not None
    check(settings)
    own = settings.worker
    arguments = _lend(model, placement.worker, role, settings, gateway_url)
    arguments += ["--max-sequences", str(own.max_sequences), "--kv-memory-mb", str(own.kv_memory_mb)]
    arguments += ["--step-tokens", str(STEP_TOKENS), "--max-context", "0"]
    cores = cores_of(placement.worker)
    return Command(role, roses(*arguments), TRAINER_NICENESS, cores, OPEN, is_kept=True, secrets=FOR_WORKER)


def _lend(model: Path, device: str, name: str, settings: RunSettings, gateway_url: str) -> list[str]:
    words = ["lend", "vllm", "--rollout-model", str(model), "--device", device, "--vllm-python", python(settings)]
    return [*words, "--gateway", gateway_url, "--worker-name", name]
