"""vLLM's asynchronous engine on a CPU, where vLLM itself turns it off: a plugin of vLLM, for tests alone.

On a CPU a step has been computed when it was handed in, so nothing overlaps. Everything else is as on a GPU: the next
step is planned while the last one has not been told, with stand-ins for tokens that are not known yet, and the engine
keeps a queue of steps. CUDA's streams and events become ones that do nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

METADATA = "Metadata-Version: 2.1\nName: forced-async\nVersion: 0\n"
ENTRY_POINTS = "[vllm.general_plugins]\nforced_async = tests.vllm.forced_async:register\n"


def install(folder: Path) -> None:
    """So that every vLLM with this folder and the project's in its PYTHONPATH finds the plugin."""
    told = folder / "forced_async-0.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text(METADATA)
    (told / "entry_points.txt").write_text(ENTRY_POINTS)


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def register() -> None:
    import torch
    from vllm.platforms.cpu import CpuPlatform

    plain = CpuPlatform.check_and_update_config.__func__
    if getattr(plain, "is_forced", False):
        return

    def forced(kind: Any, config: Any) -> None:
        plain(kind, config)
        config.scheduler_config.async_scheduling = True

    forced.is_forced = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = classmethod(forced)
    torch.cuda.Event = Event
    torch.cuda.current_stream = lambda *args: None
    torch.cuda.stream = lambda stream: nullcontext()
