"""The manifest of a checkpoint, `trainer/state.json`, with digests of all files that a resumed job reads.

A job reads it before it resumes, without loading torch, and so knows which of its checkpoints are whole. An earlier
version wrote no digests of some files; those pass without one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rose.errors import ModelError
from rose.models.files import Keys, read_object
from rose.models.tensors import SINGLE

STATE_FOLDER, STATE_TENSORS, STATE_JSON = "trainer", "state.safetensors", "state.json"
SEAL = "seal"
RANKS_MAX = 4096
DIGESTS = {"sha256": Path(STATE_FOLDER) / STATE_TENSORS, "model_sha256": Path(SINGLE)}  # key -> file


def shard_files(rank: int, ranks: int) -> tuple[Path, Path]:
    """Return the names of what a rank of several writes: its rows of the trainer's state, and whole tensors in bf16."""
    part = f"{rank + 1:05}-of-{ranks:05}.safetensors"
    return Path(STATE_FOLDER) / f"state-{part}", Path(f"model-{part}")


def state_files(state: Keys) -> list[Path]:
    """Return the names of the files that hold the trainer's state, by rank."""
    ranks = state.whole("ranks", default=1)
    if ranks > RANKS_MAX:
        raise state.complaint("ranks", f"must be at most {RANKS_MAX}")
    return [shard_files(rank, ranks)[0] for rank in range(ranks)] if ranks > 1 else [DIGESTS["sha256"]]


def write_state(folder: Path, values: Mapping[str, Any], digests: Mapping[str, str] | None = None) -> None:
    """Write the last file of a checkpoint; the others must be there. `digests` are those of the files of ranks."""
    if digests is None:
        state = dict(values) | {key: digest_of(folder / file) for key, file in DIGESTS.items()}
    else:
        state = dict(values) | {"files": dict(digests)}
    text = json.dumps(state | {SEAL: _seal(state)}, indent=2) + "\n"
    (folder / STATE_FOLDER / STATE_JSON).write_text(text, encoding="utf-8")


def read_state(folder: Path) -> Keys:
    """Return the values that were written, or raise ModelError if the checkpoint is not whole."""
    path = folder / STATE_FOLDER / STATE_JSON
    state = Keys(str(path), read_object(path))
    ranks = len(state_files(state))
    if ranks == 1:
        state.text("sha256")
    if SEAL in state and state.values[SEAL] != _seal(state.values):
        raise ModelError(f"{path} is not as it was written", hint="take an earlier checkpoint")
    known = {file: state.text(key) for key, file in DIGESTS.items() if key in state}
    if ranks > 1:
        digests = state.inner("files")
        known = {file: digests.text(str(file)) for rank in range(ranks) for file in shard_files(rank, ranks)}
    for file, digest in known.items():
        if not (folder / file).exists() or digest_of(folder / file) != digest:
            what = f"{folder / file} is not the file its state.json was written with"
            raise ModelError(what, hint="take an earlier checkpoint")
    return state


def digest_of(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error


def _seal(state: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in state.items() if key != SEAL}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
