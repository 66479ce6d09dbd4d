"""The word of a checkpoint on itself: `trainer/state.json`, with digests of everything that a job goes on from.

Looked at before a job goes on from it, without loading anything: whoever has to choose between checkpoints knows then
which of them are whole. Files that say nothing of a digest were written by an earlier version and pass without it.
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
DIGESTS = {"sha256": Path(STATE_FOLDER) / STATE_TENSORS, "model_sha256": Path(SINGLE)}
"""Which file of a checkpoint each key is the digest of."""


def write_state(folder: Path, values: Mapping[str, Any]) -> None:
    """The last file of a checkpoint: the others must be there."""
    state = dict(values) | {key: digest(folder / file) for key, file in DIGESTS.items()}
    text = json.dumps(state | {SEAL: _seal(state)}, indent=2) + "\n"
    (folder / STATE_FOLDER / STATE_JSON).write_text(text, encoding="utf-8")


def read_state(folder: Path) -> Keys:
    """What was written, if the checkpoint is whole. Raises ModelError."""
    path = folder / STATE_FOLDER / STATE_JSON
    state = Keys(str(path), read_object(path))
    state.text("sha256")
    if SEAL in state and state.values[SEAL] != _seal(state.values):
        raise ModelError(f"{path} is not as it was written", hint="take an earlier checkpoint")
    for key, file in DIGESTS.items():
        if key in state and (not (folder / file).exists() or digest(folder / file) != state.text(key)):
            what = f"{folder / file} is not the file its state.json was written with"
            raise ModelError(what, hint="take an earlier checkpoint")
    return state


def digest(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error


def _seal(state: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in state.items() if key != SEAL}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
