"""`rose profile --record FILE`: the step profiles of a lent device, from the steps that it runs under its own traffic.

A device keeps a bounded sample of its steps. The command reads it beside the running engine, fits both step profiles,
and writes them; `rose plan --profile` and `rose sim --profile` take these files.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rose.cli.options import say
from rose.errors import ConfigError

SUMMARY = "record step profiles of a lent device, for `rose plan` and `sim`"
SECONDS_MAX = 86_400.0
EXAMPLE = """example, with one lent device under traffic on this machine:
  rose profile --record serving.json --rollout-record rollout.json --seconds 60
  rose plan --trace my.csv --profile serving.json --rollout-profile rollout.json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLE
    parser.add_argument("--record", type=Path, required=True, metavar="FILE", help="profile of the serving model")
    parser.add_argument("--rollout-record", type=Path, metavar="FILE", help="profile of the rollout model")
    parser.add_argument("--url", help="the device's serving address; not needed if only one runs here")
    parser.add_argument("--seconds", type=float, default=0.0, metavar="S", help="wait before reading (0)")


def run(arguments: argparse.Namespace) -> int:
    from rose.cli.lend import address_and_token, owner_request
    from rose.engines.recorded_steps import profile_of, steps_of

    paths = [path for path in (arguments.record, arguments.rollout_record) if path is not None]
    for path in paths:
        if path.suffix != ".json" or not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written", hint="name a .json file in a folder that exists")
    if not 0 <= arguments.seconds <= SECONDS_MAX:
        raise ConfigError(f"{arguments.seconds:g} seconds cannot be waited", hint=f"give 0 to {SECONDS_MAX:g}")
    url, token = address_and_token(arguments.url)
    time.sleep(arguments.seconds)
    steps = steps_of(owner_request(url, token, "/rose/steps"))
    for path, side in zip(paths, (steps.serving, steps.rollout), strict=False):
        _write(path, profile_of(side, path.stem, f"the {side.side} engine at {url} on {machine_text()}"))
    files = f"--profile {paths[0]}" + (f" --rollout-profile {paths[1]}" if len(paths) > 1 else "")
    print(f"next: rose plan --trace my.csv {files}")
    return 0


def machine_text() -> str:
    """Return what the profile was measured on, in words."""
    from rose.verify.machine_facts import host_facts

    facts = host_facts()
    machine = f"{facts['processor']}, {facts['cores']} cores, load {facts['load before']}"
    return f"{machine}, {time.strftime('%Y-%m-%d')}"


def _write(path: Path, profile: Any) -> None:
    from rose.engines.profiles import write_profile

    try:
        write_profile(profile, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", hint="name another file") from error
    say(f"written to {path}: {profile.source['measured']}")
