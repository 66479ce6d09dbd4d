"""What SGLang loads in every process where ROSE is installed (entry point `sglang.srt.plugins`).

The variable ROSE_SGLANG chooses what it does: nothing without it, `serving` publishes the scheduler's status, `rollout`
puts the gate before the scheduler. SGLang logs an exception of a plugin and goes on without it. That is right for
serving, which is then not lent. A rollout engine must not run without its gate, so `rose.sglang.rollout_server` calls
`register` itself, where an exception ends the process.
"""

from __future__ import annotations

import os

from rose.errors import ConfigError

ROLE_VARIABLE = "ROSE_SGLANG"
SUPPORTED = ("0.5.23",)
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

_registered: list[str] = []


def register() -> None:
    """Register what this process's role asks for, once. Raises ConfigError for a wrong role or version of SGLang."""
    role = os.environ.get(ROLE_VARIABLE, "")
    if not role or _registered:
        return
    if role not in ("serving", "rollout"):
        raise ConfigError(f"{ROLE_VARIABLE}={role} is no role", hint="`serving`, or nothing")
    import sglang

    check_version(sglang.__version__)
    if role == "serving":
        from rose.sglang.serving_publisher import register_hooks
    else:
        from rose.sglang.rollout_scheduler import register_hooks
    register_hooks()
    _registered.append(role)


def check_version(version: str) -> None:
    """Raise ConfigError for an SGLang that this was not written for: its scheduler's interface is not public."""
    if version not in SUPPORTED:
        known = ", ".join(SUPPORTED)
        raise ConfigError(
            f"SGLang {version} is installed, and ROSE's plugin is written for {known}",
            hint=f'install a supported one: pip install "sglang=={SUPPORTED[-1]}"; or serve without {ROLE_VARIABLE}',
        )
