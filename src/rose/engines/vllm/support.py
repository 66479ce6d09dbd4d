"""Which vLLM this works with, said at start-up: its scheduler interface is not public and changes between releases."""

from __future__ import annotations

from rose.errors import ConfigError

SUPPORTED = ("0.32",)
WRITTEN_FOR = ", ".join(f"{version}.x" for version in SUPPORTED)


def check_version(version: str) -> None:
    """Raises ConfigError for a vLLM that these schedulers were not written for."""
    if not any(version == known or version.startswith(f"{known}.") for known in SUPPORTED):
        raise ConfigError(
            f"vLLM {version} is installed, and ROSE's schedulers are written for {WRITTEN_FOR}",
            hint=f'install a supported one: pip install "vllm=={SUPPORTED[-1]}.*"; or serve without --scheduler-cls',
        )


def check_scheduling(name: str, *, is_async: bool, wants_async: bool) -> None:
    """Raises ConfigError if a scheduler is used under the other kind of scheduling; names the right one."""
    if is_async == wants_async:
        return
    right = f"Async{name}" if wants_async else name.removeprefix("Async")
    kind = "asynchronous" if wants_async else "synchronous"
    raise ConfigError(
        f"vLLM's scheduling is {kind} here, and {name} is for the other kind",
        hint=f"use --scheduler-cls rose.engines.vllm.{right}",
    )


def check_chunked(is_chunked: bool) -> None:
    """Raises ConfigError without chunked prefill: a prompt longer than a grant would never start."""
    if not is_chunked:
        raise ConfigError(
            "the rollout engine runs without chunked prefill, so a prompt longer than a grant would never start",
            hint="remove --no-enable-chunked-prefill",
        )
