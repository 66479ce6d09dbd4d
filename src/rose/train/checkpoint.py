"""Checkpoints: a model folder that any engine serves, and beside it what a trainer needs to go on.

    step-000012/
      config.json, tokenizer.json, ...   as in the folder the job began with
      model.safetensors                  the weights in bf16, for engines
      trainer/state.safetensors          the same weights in fp32, the optimiser's moments, and both once more as
                                         they were before the last healthy batch, to which a starved job goes back
      trainer/state.json                 step, guards, digests of the files above, and what the job adds

A checkpoint is written under another name, read back and compared, and only then given its own: who finds one finds
it whole, after a crash and on a full disk too. Nothing in it is a pickle.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from rose.errors import ModelError, Unavailable
from rose.models.bits import to_bf16
from rose.models.files import sibling_name
from rose.models.spec import read_spec
from rose.models.tensors import SINGLE, check, open_tensors
from rose.models.writer import Storage, write_tensors
from rose.train.checkpoint_state import STATE_FOLDER, STATE_TENSORS, read_state, write_state
from rose.train.model import CausalModel
from rose.train.step import Snapshot, Trainer

WEIGHT = "weight"
HEALTHY = "healthy."  # before the kind of a tensor
WEIGHT_FILES = (".safetensors", ".index.json", ".bin")


def export_model(model: CausalModel, source: Path | str, out: Path | str, dtype: Storage = "bf16") -> Path:
    """Write the model as a Hugging Face folder that was not there before; everything but weights is `source`'s."""
    with _appearing(Path(out)) as fresh:
        _write_model(model, Path(source), fresh, dtype)
    return Path(out)


def save_checkpoint(
    trainer: Trainer, source: Path | str, out: Path | str, extra: Mapping[str, Any] | None = None
) -> Path:
    """Model and trainer state. `extra` is the job's own, plain JSON values."""
    with _appearing(Path(out)) as fresh:
        _write_model(trainer.model, Path(source), fresh, "bf16")
        _write_state(trainer, fresh, extra or {})
    return Path(out)


def load_checkpoint(trainer: Trainer, folder: Path | str) -> dict[str, Any]:
    """Put the trainer where the checkpoint was made; returns the job's extra. Raises ModelError."""
    state = read_state(Path(folder))
    now, healthy = _read_snapshots(Path(folder) / STATE_FOLDER / STATE_TENSORS, trainer)
    trainer.restore(now)
    trainer.healthy = healthy
    trainer.step = state.whole("step", minimum=0)
    trainer.learning_rate_factor = state.number("learning_rate_factor")
    trainer.spikes.norms.clear()
    trainer.spikes.norms.extend(state.get("gradient_norms", []))
    trainer.starvation.starved_steps = state.whole("starved_steps", minimum=0)
    trainer.starvation.roll_backs = state.whole("roll_backs", minimum=0)
    return dict(state.inner("extra").values)


def _write_model(model: CausalModel, source: Path, folder: Path, dtype: Storage) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(WEIGHT_FILES) and not file.name.startswith("."):
            shutil.copyfile(file, folder / file.name)
    if not model.is_finite():
        raise ModelError("the weights hold numbers that are not finite; they are not written")
    arrays = model.arrays()
    write_tensors(folder / SINGLE, arrays, dtype)
    _verify(folder, arrays, dtype)


def _verify(folder: Path, arrays: Mapping[str, NDArray[np.float32]], dtype: Storage) -> None:
    """What was written, read back, is what was meant."""
    tensors = open_tensors(folder)
    check(tensors, read_spec(folder))
    for name, array in arrays.items():
        if dtype == "bf16":
            is_same = np.array_equal(tensors.bits16(name), to_bf16(array))
        else:
            is_same = np.array_equal(tensors.float32(name), array.astype("<f2" if dtype == "f16" else "<f4"))
        if not is_same:
            raise _differs(name, folder / SINGLE)


def _verify_state(file: Path, arrays: Mapping[str, NDArray[np.float32]]) -> None:
    """The same of what only a trainer reads, bit by bit, with one tensor in memory at a time."""
    try:
        with safe_open(str(file), framework="np") as tensors:
            for name, array in arrays.items():
                if not _is_same(tensors.get_tensor(name), array):
                    raise _differs(name, file)
    except SafetensorError as error:
        raise Unavailable(f"{file} cannot be read back: {error}", hint="check the disk") from error


def _is_same(found: NDArray[np.float32], meant: NDArray[np.float32]) -> bool:
    if (found.shape, found.dtype) != (meant.shape, meant.dtype):
        return False
    return np.array_equal(found.view(np.uint32), np.ascontiguousarray(meant).view(np.uint32))


def _differs(name: str, file: Path) -> Unavailable:
    return Unavailable(f"{name} reads back from {file} as something else", hint="check the disk")


def _write_state(trainer: Trainer, folder: Path, extra: Mapping[str, Any]) -> None:
    (folder / STATE_FOLDER).mkdir()
    arrays = _named(Snapshot(dict(trainer.model.weights), trainer.moments()), "")
    if trainer.healthy is not None:
        arrays |= _named(trainer.healthy, HEALTHY)
    write_tensors(folder / STATE_FOLDER / STATE_TENSORS, arrays, "f32")
    _verify_state(folder / STATE_FOLDER / STATE_TENSORS, arrays)
    state = {
        "step": trainer.step,
        "learning_rate_factor": trainer.learning_rate_factor,
        "gradient_norms": list(trainer.spikes.norms),
        "starved_steps": trainer.starvation.starved_steps,
        "roll_backs": trainer.starvation.roll_backs,
        "extra": dict(extra),
    }
    write_state(folder, state)


def _named(snapshot: Snapshot, prefix: str) -> dict[str, NDArray[np.float32]]:
    """Tensors as KIND/NAME: the weight itself, and whatever the optimiser keeps of it."""
    arrays = {f"{prefix}{WEIGHT}/{name}": _plain(weight) for name, weight in snapshot.weights.items()}
    for name, state in snapshot.moments.items():
        arrays |= {f"{prefix}{key}/{name}": np.atleast_1d(_plain(value)) for key, value in state.items()}
    return arrays


def _plain(value: torch.Tensor) -> NDArray[np.float32]:
    return value.detach().numpy().astype(np.float32, copy=False)


def _read_snapshots(file: Path, trainer: Trainer) -> tuple[Snapshot, Snapshot | None]:
    """What the trainer had, and what it goes back to when it starves."""
    now: dict[str, NDArray[np.float32]] = {}
    healthy: dict[str, NDArray[np.float32]] = {}
    for name, array in _read_tensors(file).items():
        (healthy if name.startswith(HEALTHY) else now)[name.removeprefix(HEALTHY)] = array
    return _snapshot(file, now, trainer), _snapshot(file, healthy, trainer) if healthy else None


def _snapshot(file: Path, tensors: Mapping[str, NDArray[np.float32]], trainer: Trainer) -> Snapshot:
    found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in trainer.model.weights}
    for full_name, array in tensors.items():
        kind, _, name = full_name.partition("/")
        if name not in found:
            raise ModelError(f"{file} holds {full_name}, which this model does not have")
        found[name][kind] = torch.from_numpy(array)
    weights = {}
    for name, weight in trainer.model.weights.items():
        if WEIGHT not in found[name] or found[name][WEIGHT].shape != weight.shape:
            raise ModelError(f"{file} holds no weight {name} of shape {tuple(weight.shape)}")
        weights[name] = found[name].pop(WEIGHT)
    moments = {name: {key: _as_kept(value, weights[name]) for key, value in found[name].items()} for name in found}
    return Snapshot(weights, {name: state for name, state in moments.items() if state})


def _as_kept(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The optimiser's step counter is a scalar; files hold it as a list of one."""
    return value.reshape(()) if value.numel() == 1 and weight.numel() != 1 else value


def _read_tensors(file: Path) -> dict[str, NDArray[np.float32]]:
    """Every tensor of one safetensors file, copied into memory."""
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A folder to write in, which takes the name `out` when it is whole and leaves nothing behind when it fails."""
    fresh = sibling_name(out)
    try:
        fresh.mkdir(parents=True)
        yield fresh
        _sync(fresh)
        fresh.rename(out)
    except OSError as error:
        what = f"{out} cannot be written: {error.strerror or error}"
        raise Unavailable(what, hint="free some space, or choose another folder") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _sync(folder: Path) -> None:
    """On disk before the name is: a crash after the rename must not find empty files."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
