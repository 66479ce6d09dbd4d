"""A worker of the verification kit for tests: every step does what a file in the kit's folder says.

    python fake_step_worker.py FOLDER

`plan.json` has a word per step: pass, fail, skip, die, hang, or orphan (start a process that stays, and die).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rose.verify.kit_results import StepResult, result_path, write_json

SLEEP_S = 600
OUTCOMES = {"fail": "failed", "skip": "not run"}


def main(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    for step in map(str.strip, sys.stdin):
        with (folder / "started").open("a") as file:
            file.write(f"{step} {os.environ['ROSE_BOARDS']}\n")
        word = plan[step]
        if word == "orphan":
            orphan = subprocess.Popen(["sleep", str(SLEEP_S)], start_new_session=True)
            (folder / "orphan").write_text(str(orphan.pid))
        if word in ("die", "orphan"):
            os._exit(7)
        if word == "hang":
            time.sleep(SLEEP_S)
        write_json(result_path(folder, step), StepResult(step, OUTCOMES.get(word, "passed"), seconds=1.0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
