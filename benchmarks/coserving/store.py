"""What was measured so far, on disk: one file per segment and mode, so that a run that was stopped goes on.

A folder belongs to one run, told by the fingerprint of its options. Files are written whole or not at all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from coserving.plan import Piece
from coserving.processes import Shares
from rose.errors import ConfigError

Kind = TypeVar("Kind")


class Row(msgspec.Struct, array_like=True):
    """One request as its client saw it, in seconds from the start of its segment."""

    index: int
    scheduled_s: float
    prompt_tokens: int
    wanted_tokens: int
    sent_s: float | None
    ended_s: float | None
    outcome: str
    detail: str
    tokens_counted: int
    was_held: bool
    token_s: list[float]


class Measured(msgspec.Struct):
    """One segment under one mode."""

    wall_s: float
    rows: list[Row] = []
    serving_step_s: float | None = None  # by the engine's own account
    serving_cpu_s: float | None = None  # of its engine's process
    breaches: float | None = None  # late steps too
    rollout_tokens: float | None = None  # generated and really prefilled, less what was thrown away
    rollout_at_s: list[float] = []
    rollout_total: list[float] = []  # at these times, from the start of the segment
    lent_tok_s: float | None = None  # by the device's account; the client counts whole turns
    breaker_trips: float | None = None
    late_requests: float | None = None  # that missed a deadline, and would not have without what was lent before
    ambiguous: float | None = None  # misses that what was lent in the same busy period may explain
    is_lending_share: float | None = None  # 1 if the device was lent at the beginning and in the end
    rollout_notes: dict[str, float] = {}
    cores: Shares | None = None

    @property
    def rollout_tok_s(self) -> float | None:
        return None if self.rollout_tokens is None else self.rollout_tokens / self.wall_s


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def open(cls, folder: Path, fingerprint: dict[str, Any]) -> Store:
        """The folder of this run; ConfigError if it is another one's."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "run.json"
        if path.exists() and (found := json.loads(path.read_text())) != fingerprint:
            differing = [key for key in fingerprint if found.get(key) != fingerprint[key]]
            what = f"{folder} holds another run: {', '.join(differing)} differ"
            raise ConfigError(what, hint="give another --work, or delete that folder")
        _write(path, json.dumps(fingerprint).encode())
        return cls(folder)

    def has(self, piece: Piece) -> bool:
        return self._path(piece).exists()

    def read(self, piece: Piece) -> Measured:
        return msgspec.json.decode(self._path(piece).read_bytes(), type=Measured)

    def write(self, piece: Piece, measured: Measured) -> None:
        _write(self._path(piece), msgspec.json.encode(measured))

    def kept(self, name: str, kind: type[Kind]) -> Kind | None:
        path = self.folder / f"{name}.json"
        return msgspec.json.decode(path.read_bytes(), type=kind) if path.exists() else None

    def keep(self, name: str, what: Any) -> None:
        _write(self.folder / f"{name}.json", msgspec.json.encode(what))

    def _path(self, piece: Piece) -> Path:
        return self.folder / f"segment-{piece.segment.number:03}-{piece.mode}.json"


def _write(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    partial.replace(path)
