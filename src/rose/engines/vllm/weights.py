"""vLLM's side of new weights: the weight-transfer engine `rose`, and a worker's methods to stage what it commits.

Staging reads a folder and compares it with the running weights in a thread, while steps go on; the first time it notes
where every tensor lies, between two steps. Committing writes what differs, inside one of vLLM's update sessions, so
that vLLM knows of the new version. What fails is taken back; what cannot be taken back is said in words that the agent
knows, and ends the engine.

vLLM imports this before it loads a model, to mix `RoseWorker` into its worker; so the plugin is in force in a rollout
engine even where the package's entry point is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rose.engines.vllm.memory import KvMemory
from rose.engines.vllm.patching import NOT_STAGED, MixedWeights, Patch, Place, apply, compare, find_places
from rose.engines.vllm.plugin import register
from rose.errors import ModelError

register()


@dataclass
class RoseInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing is needed to begin."""


@dataclass
class RoseUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The staged version that becomes current."""

    version: str = ""


class RoseWeights(WeightTransferEngine):  # type: ignore[misc]
    """One per worker of a rollout engine."""

    init_info_cls, update_info_cls = RoseInit, RoseUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places: dict[str, list[Place]] = {}
        self._staged: Patch | None = None
        self._thread: threading.Thread | None = None
        self._failure = ""

    # Staging

    def stage(self, version: str, folder: str) -> None:
        """Begin; `staged` says when it is done and how it went. What was staged before goes when that went well."""
        if not self._places:
            self._places = find_places(self.model, dict(_shapes(Path(folder))))
        self._failure = ""
        self._thread = threading.Thread(target=self._compare, args=(version, Path(folder)), name="stage", daemon=True)
        self._thread.start()

    def staged(self) -> dict[str, Any]:
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


class RoseWorker(KvMemory):
    """Mixed into vLLM's worker; the agent calls these by name."""

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


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ModelError(f"there are no weights (*.safetensors) in {folder}")
    return found


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, tuple(file.get_slice(name).get_shape())


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
