"""Weight updates inside vLLM: the weight-transfer engine `rose`, and the worker methods that the agent calls by name.

Staging reads a folder and compares it with the running weights in a thread, while steps continue; the first time it
finds where every tensor lies, between two steps. Committing writes the differences inside one of vLLM's update
sessions, so vLLM knows the new version. A failure is undone; one that cannot be is reported in words that the agent
knows, and ends the engine. vLLM imports this before it loads a model, to mix `RoseWorker` into its worker. So the
plugin is in force in a rollout engine even where the package's entry point is not seen.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rose.errors import ModelError
from rose.vllm.patching import NOT_STAGED, MixedWeights, Patch, TensorPlace, apply, compare, find_places
from rose.vllm.plugin import register

DONT_NEED = 4  # MADV_DONTNEED

register()


@dataclass
class RoseInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The empty settings of the transfer engine."""


@dataclass
class RoseUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The staged version that becomes current."""

    version: str = ""


class RoseWeights(WeightTransferEngine):  # type: ignore[misc]
    """The weight-transfer engine of one vLLM worker."""

    init_info_cls, update_info_cls = RoseInit, RoseUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places: dict[str, list[TensorPlace]] = {}
        self._staged: Patch | None = None
        self._thread: threading.Thread | None = None
        self._failure = ""

    # Staging

    def stage(self, version: str, folder: str) -> None:
        """Begin; `staged` returns whether it is done and how it went. A success replaces what was staged before."""
        if not self._places:
            self._places = find_places(self.model, dict(_shapes(Path(folder))))
        self._failure = ""
        self._thread = threading.Thread(target=self._compare, args=(version, Path(folder)), name="stage", daemon=True)
        self._thread.start()

    def staged(self) -> dict[str, Any]:
        """Return the progress of staging, and its result."""
        is_busy = self._thread is not None and self._thread.is_alive()
        version = self._staged.version if self._staged is not None else None
        numbers = self._staged.numbers if self._staged is not None else 0
        return {"busy": is_busy, "version": version, "numbers": numbers, "failure": self._failure}

    def _compare(self, version: str, folder: Path) -> None:
        try:
            self._staged = compare(version, _tensors(folder), self._places)
        except Exception as error:
            self._failure = str(error) or type(error).__name__

    # vLLM's sessions

    def init_transfer_engine(self, init_info: RoseInit) -> None:
        return

    def start_weight_update(self) -> None:
        return

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RoseUpdate) -> None:
        patch = self._staged
        if patch is None or patch.version != update_info.version:
            raise ModelError(f"version `{update_info.version}` {NOT_STAGED}")
        self._staged = None  # whatever happens: it was compared with weights that change now
        apply(patch)

    def finish_weight_update(self) -> None:
        return

    def shutdown(self) -> None:
        return


class RoseWorker:
    """A mixin of vLLM's worker; the agent and the scheduler call its methods by name."""

    def stage_weights(self, version: str, folder: str) -> dict[str, Any]:
        engine: RoseWeights = self.weight_transfer_engine  # type: ignore[attr-defined]
        try:
            engine.stage(version, folder)
        except MixedWeights:
            raise
        except Exception as error:
            return {"busy": False, "version": None, "numbers": 0, "failure": str(error)}
        return engine.staged()

    def staged_weights(self) -> dict[str, Any]:
        engine: RoseWeights = self.weight_transfer_engine  # type: ignore[attr-defined]
        return engine.staged()

    def return_kv_blocks(self, runs: Iterable[tuple[int, int]]) -> int:
        """Return the memory of block runs [first, end) in every layer to the machine. The result is in bytes.

        On a CPU vLLM writes its whole KV cache at start-up, so it takes all its memory at once. When returned blocks
        are used again the kernel supplies pages of zeros. On a GPU nothing is done: memory inside an allocation cannot
        be returned.
        """
        caches: list[Any] = self.model_runner.kv_caches  # type: ignore[attr-defined]
        return sum([_drop(cache, first, end) for first, end in runs for cache in caches])


def _drop(cache: Any, first: int, end: int) -> int:
    if cache.device.type != "cpu":
        return 0
    stride = cache.stride(0) * cache.element_size()
    begin = -(-(cache.data_ptr() + first * stride) // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (cache.data_ptr() + end * stride) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if size <= 0:
        return 0
    failed = ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), DONT_NEED)
    return 0 if failed else size


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for file, name in _tensor_files(folder):
        yield name, tuple(file.get_slice(name).get_shape())


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    for file, name in _tensor_files(folder):
        yield name, file.get_tensor(name)


def _tensor_files(folder: Path) -> Iterator[tuple[Any, str]]:
    """Yield every tensor's name with its open file."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"there are no weights (*.safetensors) in {folder}")
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield file, name
