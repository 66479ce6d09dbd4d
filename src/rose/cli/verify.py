"""`rose verify gpu`: check on one machine what ROSE promises, in half an hour, and write a report to share."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rose.cli.options import say
from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.verify.kit_results import KitReport, KitSettings
    from rose.verify.verification_steps import VerificationStep

SUMMARY = "check on one GPU what ROSE promises, and write a report to share"
OUT = Path("rose-verify")
COLUMNS = 80
VLLM_VARIABLE = "ROSE_VLLM_PYTHON"
ON_CPU = {"requests": 120, "rate_rps": 3.0}  # a trial: a core is slower than a GPU
EXAMPLES = """examples:
  rose verify gpu --dry-run
  rose verify gpu --serving ~/models/Qwen3-8B --rollout ~/models/Qwen3-1.7B
  rose verify gpu --device cpu:0 --vllm-python .venv-vllm/bin/python
"""


def configure(parser: argparse.ArgumentParser) -> None:
    from rose.cli.load import ABOVE_ZERO, COUNT, SEED

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("what", choices=["gpu"], metavar="gpu", help="what to verify: one GPU (or, as a trial, one CPU device)")
    add("--serving", default="", metavar="MODEL", help="folder of the serving model, or a preset (a small preset)")
    add("--rollout", default="", metavar="MODEL", help="folder of the rollout model, or a preset (the same)")
    add("--out", type=Path, default=OUT, metavar="FOLDER", help="where results and the report go (rose-verify)")
    add("--device", default="cuda:0", help="cuda:0, cuda:0-1 for tensor parallelism, or cpu:0 to try the kit itself")
    add("--dry-run", action="store_true", help="list the steps with what they need and how long they take; run none")
    add("--only", action="append", default=[], metavar="STEP", help="run this step only, again if it was run")
    add("--resume", action="store_true", help="go on where a kit in the same folder stopped")
    add("--vllm-python", default="", metavar="PATH", help=f"interpreter that has vLLM ({VLLM_VARIABLE}, or this one)")
    add("--requests", type=COUNT, metavar="N", help="requests of every replay (1000; 120 on a CPU)")
    add("--rate", type=ABOVE_ZERO, metavar="R", help="requests a second (12; 3 on a CPU)")
    add("--ttft-ms", type=ABOVE_ZERO, default=500.0, metavar="MS", help="budget to the first token (500)")
    add("--tpot-ms", type=ABOVE_ZERO, default=150.0, metavar="MS", help="budget per token after it (150)")
    add("--minutes", type=ABOVE_ZERO, default=30.0, metavar="M", help="start no step that would end later (30)")
    add("--seed", type=SEED, default=0, metavar="N", help="seed of requests and presets (0)")
    add("--with-names", action="store_true", help="keep the host's and the user's name and folders in the report")


def run(arguments: argparse.Namespace) -> int:
    from rose.verify.machine_facts import capabilities
    from rose.verify.verification_steps import steps_named

    settings, steps = _settings(arguments), steps_named(arguments.only)
    found = capabilities(settings)
    if arguments.dry_run:
        print(_listing(steps, settings, found.why_not))
        return 0
    from rose.verify.kit_runner import KitRunner

    runner = KitRunner(arguments.out, settings, steps, say)
    try:
        report = runner.run(found, is_resumed=arguments.resume, again=arguments.only)
    except KeyboardInterrupt:
        say(f"interrupted: what was found so far is in {arguments.out}; --resume goes on")
        raise
    return _conclude(report, arguments.out)


def _settings(arguments: argparse.Namespace) -> KitSettings:
    from rose.verify.kit_results import KitSettings
    from rose.vllm.engine_process import DEVICE

    if not DEVICE.fullmatch(arguments.device):
        raise ConfigError(f"`{arguments.device}` is not a device", hint="give cuda:0, or cpu:0 to try the kit")
    is_cpu = arguments.device.startswith("cpu")
    sizes = {**({"requests": 1000, "rate_rps": 12.0} | (ON_CPU if is_cpu else {}))}
    given = {"requests": arguments.requests, "rate_rps": arguments.rate}
    sizes |= {name: value for name, value in given.items() if value is not None}
    return KitSettings(
        device=arguments.device,
        serving=_absolute(arguments.serving),
        rollout=_absolute(arguments.rollout or arguments.serving),
        vllm_python=arguments.vllm_python or os.environ.get(VLLM_VARIABLE) or sys.executable,
        requests=int(sizes["requests"]),
        rate_rps=float(sizes["rate_rps"]),
        ttft_ms=arguments.ttft_ms,
        tpot_ms=arguments.tpot_ms,
        budget_minutes=arguments.minutes,
        seed=arguments.seed,
        with_names=arguments.with_names,
    )


def _absolute(model: str) -> str:
    """Return a model's folder in full; the name of a preset is left as it is."""
    return str(Path(model).expanduser().absolute()) if Path(model).expanduser().is_dir() and model else model


def _listing(steps: tuple[VerificationStep, ...], settings: KitSettings, why_not: object) -> str:
    """Return the steps for `--dry-run`."""
    assert callable(why_not)
    lines = []
    for step in steps:
        needs = ", ".join(step.needs_on(is_cpu=settings.is_cpu)) or "nothing"
        lines.append(f"{step.name:<18} {step.minutes:>4.1f} min  needs {needs}")
        lines += textwrap.wrap(step.shows, COLUMNS - 4, initial_indent="    ", subsequent_indent="    ")
        if why := why_not(step.needs_on(is_cpu=settings.is_cpu)):
            lines += textwrap.wrap(f"not here: {why}", COLUMNS - 4, initial_indent="    ", subsequent_indent="    ")
    total = sum(step.minutes for step in steps)
    return "\n".join([*lines, "", f"{len(steps)} steps, about {total:.0f} minutes on a GPU; nothing was run"])


def _conclude(report: KitReport, folder: Path) -> int:
    """Print the summary and where the report is; the exit code says whether every step that was run has passed."""
    from rose.verify.verify_report import HTML_FILE, TEXT_FILE, opening

    say("")
    say("\n".join(textwrap.wrap(opening(report), COLUMNS)))
    say(f"report: {folder / HTML_FILE}, {folder / TEXT_FILE}; to attach to an issue: {folder / 'report.json'}")
    outcomes = [result.outcome for result in report.results]
    if "passed" not in outcomes and "failed" not in outcomes:
        say("nothing could be verified on this device; --device cpu:0 tries the kit itself")
    return 0 if "failed" not in outcomes and "passed" in outcomes else 1
