"""Runs the steps of a kit in another process, follows them, and writes the report after each.

The runner decides and watches; the worker (`step_worker`) runs the steps. If the worker ends before its steps have, or
one step takes far longer than it should, the step under way has failed. Then everything that was started is ended, and
a new worker goes on with the next step. Ctrl-C and SIGTERM end everything that was started, and the report stays.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from rose import __version__
from rose.errors import ConfigError
from rose.observe.progress_line import duration
from rose.private_files import make_private_folder
from rose.verify.kit_results import (
    REPORT_FILE,
    SETTINGS_FILE,
    KitReport,
    KitSettings,
    StepResult,
    read_report,
    read_result,
    result_path,
    write_json,
)
from rose.verify.leftovers import end_processes, marked_environment
from rose.verify.machine_facts import Capabilities
from rose.verify.redaction import Redactor
from rose.verify.verification_steps import STEPS, VerificationStep
from rose.verify.verify_report import COLUMNS, write_pages
from rose.vllm.discovery import FOLDER_VARIABLE

MARK_FILE = "processes"
LIMIT_FACTOR, LIMIT_S_MIN = 3.0, 180.0  # a step that takes this much longer than expected will not end
GRACE_S = 30.0  # for a worker to end its engines
POLL_S = 0.1
INDENT = " " * 8
SHARED_MEMORY = Path("/dev/shm")


def worker_command(folder: Path) -> list[str]:
    """Return the command of a process that runs the steps named on its input."""
    return [sys.executable, "-m", "rose.verify.step_worker", str(folder)]


class KitRunner:
    """One sitting of a kit."""

    def __init__(
        self,
        folder: Path,
        settings: KitSettings,
        steps: Sequence[VerificationStep],
        say: Callable[[str], None],
        *,
        command: Callable[[Path], list[str]] = worker_command,
        limit_s_min: float = LIMIT_S_MIN,
    ) -> None:
        self.folder, self.settings, self.steps = folder, settings, tuple(steps)
        self._say, self._command, self._limit_s_min = say, command, limit_s_min
        self._mark = secrets.token_hex(8)
        self._process: subprocess.Popen[bytes] | None = None
        self._redactor = Redactor(folder, with_names=settings.with_names)
        self._began_s = time.monotonic()
        self._before_s = 0.0

    @property
    def report_path(self) -> Path:
        return self.folder / REPORT_FILE

    def run(self, capabilities: Capabilities, *, is_resumed: bool = False, again: Sequence[str] = ()) -> KitReport:
        """Run what has no result yet, and the steps of `again`. Raises ConfigError for a folder that cannot be used."""
        self._prepare(is_resumed, again)
        segments = Path(tempfile.mkdtemp(prefix="rose-verify-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
        handlers = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        is_whole = False
        try:
            self._run_steps(capabilities, segments)
            is_whole = True
        finally:
            for number in handlers:
                signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave processes behind
            self._end_worker(is_idle=is_whole)
            shutil.rmtree(segments, ignore_errors=True)
            report = self._write_report(is_whole)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return report

    # Before and after

    def _prepare(self, is_resumed: bool, again: Sequence[str]) -> None:
        try:
            make_private_folder(self.folder)
            (self.folder / "steps").mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.folder} cannot be used: {error}", hint="name another folder with --out"
            ) from error
        path, before = self.folder / SETTINGS_FILE, read_report(self.report_path)
        if path.exists():
            if not is_resumed and not again:
                hint = "continue it with --resume, repeat a step with --only STEP, or name another folder with --out"
                raise ConfigError(f"{self.folder} has the results of a kit already", hint=hint)
            self._check_settings(path)
            self._end_leftovers()
        self._before_s = before.run_seconds if before is not None else 0.0
        write_json(path, self.settings)
        (self.folder / MARK_FILE).write_text(self._mark)
        for name in again:
            result_path(self.folder, name).unlink(missing_ok=True)

    def _check_settings(self, path: Path) -> None:
        try:
            earlier = msgspec.json.decode(path.read_bytes(), type=KitSettings)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} was not written by this kit: {error}", hint="name another folder") from error
        changed = [
            name for name in KitSettings.__struct_fields__ if getattr(earlier, name) != getattr(self.settings, name)
        ]
        if changed := [name for name in changed if name != "budget_minutes"]:
            hint = "give the same options, or name another folder with --out"
            raise ConfigError(f"{self.folder} was begun with another {' and '.join(changed)}", hint=hint)

    def _end_leftovers(self) -> None:
        """End what a killed kit has left running."""
        with suppress(OSError):
            end_processes((self.folder / MARK_FILE).read_text().strip() or "none")

    def _write_report(self, is_whole: bool) -> KitReport:
        before = read_report(self.report_path)
        results = [result for step in STEPS if (result := read_result(result_path(self.folder, step.name))) is not None]
        report = KitReport(
            __version__,
            before.began if before is not None else time.strftime("%Y-%m-%d %H:%M"),
            self._redactor.settings(self.settings),
            tuple(results),
            round(self._before_s + time.monotonic() - self._began_s, 1),
            time.time() if is_whole else 0.0,
        )
        write_json(self.report_path, report)
        write_pages(self.folder, report)
        return report

    # Steps

    def _run_steps(self, capabilities: Capabilities, segments: Path) -> None:
        waiting = self._leave_out(capabilities)
        while waiting:
            step = waiting[0]
            if not self._has_time(step):
                why = f"the {self.settings.budget_minutes:g} minutes are used up; --resume goes on"
                for skipped in waiting:
                    self._put(StepResult(skipped.name, "not run", why))
                self._say(f"{INDENT}{len(waiting)} steps are left out: {why}")
                return
            place = f"[{self.steps.index(step) + 1}/{len(self.steps)}]"
            left = duration(60 * sum(step.minutes for step in waiting))
            self._say(f"{place} {step.name}: about {duration(60 * step.minutes)}; about {left} left in all")
            self._say(textwrap.fill(step.shows, COLUMNS, initial_indent=INDENT, subsequent_indent=INDENT))
            self._run_step(step, segments)
            waiting.pop(0)
            self._write_report(False)

    def _leave_out(self, capabilities: Capabilities) -> list[VerificationStep]:
        """Return the steps to run: without a result, and with everything that they need. Write why others are not."""
        waiting, reasons = [], defaultdict[str, list[str]](list)
        for step in self.steps:
            if self._has_result(step):
                continue
            if why := capabilities.why_not(step.needs_on(is_cpu=self.settings.is_cpu)):
                self._put(StepResult(step.name, "not run", self._redactor.text(why)))
                reasons[why].append(step.name)
            else:
                waiting.append(step)
        for why, names in reasons.items():
            self._say(textwrap.fill(f"not run: {', '.join(names)}: {why}", COLUMNS, subsequent_indent=INDENT))
        return waiting

    def _has_result(self, step: VerificationStep) -> bool:
        """Return whether a step has passed or failed; what was not run is looked at again."""
        result = read_result(result_path(self.folder, step.name))
        return result is not None and result.outcome != "not run"

    def _has_time(self, step: VerificationStep) -> bool:
        spent_s = time.monotonic() - self._began_s
        return spent_s + 60 * step.minutes <= 60 * self.settings.budget_minutes

    def _run_step(self, step: VerificationStep, segments: Path) -> None:
        """Have the worker run a step, and tell how it went."""
        result_path(self.folder, step.name).unlink(missing_ok=True)  # of a sitting in which it was not run
        process = self._process or self._start_worker(segments)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which is found below
            process.stdin.write(f"{step.name}\n".encode())
            process.stdin.flush()
        result = self._result_of(step, process)
        why = f": {result.reason.splitlines()[0]}" if result.reason else ""
        text = f"{result.outcome} in {duration(result.seconds)}{why}"
        self._say(textwrap.fill(text, COLUMNS, initial_indent=INDENT, subsequent_indent=INDENT))

    def _result_of(self, step: VerificationStep, process: subprocess.Popen[bytes]) -> StepResult:
        """Wait for the worker's result of a step, or make one of the worker's end."""
        path, began_s = result_path(self.folder, step.name), time.monotonic()
        limit_s = max(self._limit_s_min, LIMIT_FACTOR * 60 * step.minutes)
        while True:
            code, result = process.poll(), read_result(path)
            if result is not None:
                return result
            seconds = time.monotonic() - began_s
            if code is not None:
                how = f"signal {-code}" if code < 0 else f"code {code}"
                return self._fail(step, f"the process that ran the step ended with {how}; see worker.log", seconds)
            if seconds > limit_s:
                return self._fail(step, f"the step did not end within {limit_s:.0f} s", seconds)
            time.sleep(POLL_S)

    def _fail(self, step: VerificationStep, reason: str, seconds: float) -> StepResult:
        self._end_worker()
        result = StepResult(step.name, "failed", reason, round(seconds, 3))
        self._put(result)
        return result

    def _put(self, result: StepResult) -> None:
        write_json(result_path(self.folder, result.step), result)

    # The worker

    def _start_worker(self, segments: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **marked_environment(self._mark), FOLDER_VARIABLE: str(segments)}
        with (self.folder / "worker.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(self.folder),
                env=environment,
                stdin=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal reaches the runner only, which ends the worker
            )
        return self._process

    def _end_worker(self, *, is_idle: bool = False) -> None:
        """End the worker in good order if it can, and then everything that it started."""
        process = self._process
        if process is not None:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            if not is_idle:  # a step is under way, which the end of its input does not end
                process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            left = end_processes(self._mark, process.pid)
            if process.poll() is None:
                process.kill()
                process.wait()
            if left:
                self._say(f"{INDENT}processes that could not be ended: {', '.join(map(str, sorted(left)))}")
        self._process = None


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
