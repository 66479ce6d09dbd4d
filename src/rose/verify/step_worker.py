"""The process that runs steps one after another, so that they can share engines and none can end the kit.

    python -m rose.verify.step_worker FOLDER

It reads the name of the next step from its input, runs it, and ends with its input. The result of every step is in
`FOLDER/steps`. A step that raises has failed; its engines are ended, and the next step begins with fresh ones. A step
that ends this process, or never ends, is noticed by the runner.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from rose.verify.engine_lab import EngineLab
from rose.verify.kit_results import SETTINGS_FILE, KitSettings, StepResult, read_result, result_path, write_json
from rose.verify.redaction import Redactor
from rose.verify.step_context import StepContext
from rose.verify.verification_steps import VerificationStep, steps_named
from rose.vllm.engine_process import PR_SET_PDEATHSIG


async def run_step(lab: EngineLab, step: VerificationStep) -> StepResult:
    """Run one step, write its result without private parts, and return it."""
    folder, settings = lab.folder, lab.settings
    results = {path.stem: result for path in _result_files(folder) if (result := read_result(path)) is not None}
    context = StepContext(settings, folder, lab, results, _say)
    error: Exception | None = None
    try:
        await step.load()(context)
    except Exception as raised:  # whatever one step does, the next one must run
        error = raised
        await lab.close()
    result = context.findings.result(step.name, time.monotonic() - context.began_s, error)
    result = Redactor(folder, with_names=settings.with_names).result(result)
    write_json(result_path(folder, step.name), result)
    return result


def _result_files(folder: Path) -> list[Path]:
    return sorted((folder / "steps").glob("*.json"))


def _say(text: str) -> None:
    print(f"        {text}", flush=True)


async def _obey(lab: EngineLab) -> None:
    """Run the steps that are named on the input, until it ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while name := (await reader.readline()).decode().strip():
        [step] = steps_named([name])
        await run_step(lab, step)


async def _main(folder: Path) -> None:
    settings = msgspec.json.decode((folder / SETTINGS_FILE).read_bytes(), type=KitSettings)
    loop, lab = asyncio.get_running_loop(), EngineLab(settings, folder, _say)
    works = asyncio.create_task(_obey(lab))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, works.cancel)
    await asyncio.gather(works, return_exceptions=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: None)  # engines are being ended already
    await lab.close()
    if not works.cancelled() and (error := works.exception()) is not None:
        raise error


def main(folder: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    asyncio.run(_main(Path(folder)))
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads of libraries


if __name__ == "__main__":
    main(*sys.argv[1:])
