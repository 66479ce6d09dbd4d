"""The step that writes down the machine, and looks for settings of it under which lending cannot work."""

from __future__ import annotations

from rose import __version__
from rose.verify.machine_facts import (
    driver_trouble,
    driver_version,
    gpu_facts,
    gpu_index,
    has_mps,
    host_facts,
    processes_on_gpu,
    versions,
)
from rose.verify.step_context import NotApplicable, StepContext

EXCLUSIVE = "exclusive"  # one context on the GPU: a second engine does not start
PROHIBITED = "prohibited"


async def machine(context: StepContext) -> None:
    """Write down driver, CUDA, torch, vLLM, the GPU and how it may be shared."""
    findings, settings = context.findings, context.settings
    findings.fact("ROSE", __version__)
    for name, value in host_facts().items():
        findings.fact(name, value)
    for name, value in versions(settings.vllm_python).items():
        if name != "has":
            findings.fact(name, value)
    if settings.is_cpu:
        findings.note(f"The device is {settings.device}: this is a trial of the kit, and says nothing about a GPU.")
        return
    gpu = gpu_facts(gpu_index(settings))
    if not gpu and (trouble := driver_trouble(gpu_index(settings))):
        raise NotApplicable(f"no GPU: nvidia-smi shows none, and {trouble}")
    for name, value in gpu.items():
        findings.fact(name, value)
    findings.fact("CUDA of the driver", driver_version() or "not known")
    findings.fact("MPS daemon", "runs" if has_mps() else "does not run")
    mode = gpu.get("compute mode", "").lower()
    is_shared = EXCLUSIVE not in mode and PROHIBITED not in mode
    findings.check("the compute mode lets two processes use the GPU", is_shared, gpu.get("compute mode", "not known"))
    if gpu.get("MIG", "").lower() == "enabled":
        findings.note(
            "MIG is on: a device of ROSE is a whole GPU or one MIG instance; both engines must be on the same."
        )
    if others := processes_on_gpu(gpu_index(settings)):
        findings.note(f"{len(others)} other processes use this GPU: every figure of this report has their work in it.")
    if has_mps():
        findings.note("An MPS daemon runs. Every step but `mps` keeps its engines away from it.")
