"""Checkpoints: a model folder that any engine serves, and beside it what a trainer needs to go on.

    step-000012/
      config.json, tokenizer.json, ...   as in the folder the job began with
      model.safetensors                  the weights in bf16, for engines
      trainer/state.safetensors          the weights in fp32 and the optimiser's moments, now and before the last
                                         healthy batch, to which a starved job goes back
      trainer/state.json                 step, guards, digests of the files above, and the job's own values

A checkpoint is written under another name, read back, compared and only then renamed: it is whole if it is there, after
a crash and on a full disk too. Nothing in it is a pickle.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from rose.errors import ModelError, Unavailable
from rose.models.files import sibling_name
from rose.models.model_spec import read_spec
from rose.models.tensors import SINGLE, Storage, check, open_tensors, to_bf16, write_tensors
from rose.train.checkpoint_state import STATE_FOLDER, STATE_TENSORS, read_state, state_files, write_state
from rose.train.module_model import own_part, own_rows
from rose.train.policy_model import PolicyModel
from rose.train.step import Snapshot, Trainer

WEIGHT = "weight"
STEP = "step/"  # the optimiser's counter of a weight
MOMENTS = ("exp_avg", "exp_avg_sq")
HEALTHY = "healthy."  # prefix of the tensors from before the last healthy batch
WEIGHT_FILES = (".safetensors", ".index.json", ".bin")


def export_model(model: PolicyModel, source: Path | str, out: Path | str, dtype: Storage = "bf16") -> Path:
    """Write the model as a new Hugging Face folder; everything but the weights is copied from `source`."""
    with appearing(Path(out)) as fresh:
        _write_model(model, Path(source), fresh, dtype)
    return Path(out)


def save_checkpoint(
    trainer: Trainer, source: Path | str, out: Path | str, extra: Mapping[str, Any] | None = None
) -> Path:
    """Write the model and the trainer's state. `extra` has the job's own plain JSON values."""
    with appearing(Path(out)) as fresh:
        _write_model(trainer.model, Path(source), fresh, "bf16")
        (fresh / STATE_FOLDER).mkdir()
        write_tensor_state(trainer, fresh / STATE_FOLDER / STATE_TENSORS)
        write_state(fresh, state_values(trainer, extra))
    return Path(out)


def write_tensor_state(trainer: Trainer, file: Path) -> None:
    """Write what this process holds of weights and moments, and read it back."""
    arrays = _named(Snapshot(dict(trainer.model.weights), trainer.moments()), "")
    if trainer.healthy is not None:
        arrays |= _named(trainer.healthy, HEALTHY)
    write_tensors(file, arrays, "f32")
    _verify_state(file, arrays)


def state_values(trainer: Trainer, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "step": trainer.step,
        "learning_rate_factor": trainer.learning_rate_factor,
        "gradient_norms": list(trainer.spikes.norms),
        "starved_steps": trainer.starvation.starved_steps,
        "roll_backs": trainer.starvation.roll_backs,
        "extra": dict(extra or {}),
    }


def load_checkpoint(trainer: Trainer, folder: Path | str) -> dict[str, Any]:
    """Restore the trainer, and return the job's extra values. Raises ModelError."""
    state = read_state(Path(folder))
    files = [Path(folder) / file for file in state_files(state)]
    file, arrays = files[0], _read_rows(files, trainer)
    healthy = {name.removeprefix(HEALTHY): array for name, array in arrays.items() if name.startswith(HEALTHY)}
    now = {name: array for name, array in arrays.items() if not name.startswith(HEALTHY)}
    snapshots = _snapshot(file, now, trainer), _snapshot(file, healthy, trainer) if healthy else None
    trainer.restore(snapshots[0])
    trainer.healthy = snapshots[1]
    trainer.step = state.whole("step", minimum=0)
    trainer.learning_rate_factor = state.number("learning_rate_factor")
    trainer.spikes.norms.clear()
    trainer.spikes.norms.extend(state.get("gradient_norms", []))
    trainer.starvation.starved_steps = state.whole("starved_steps", minimum=0)
    trainer.starvation.roll_backs = state.whole("roll_backs", minimum=0)
    return dict(state.inner("extra").values)


def copy_companions(source: Path, folder: Path) -> None:
    """Copy everything of a model folder but its weights."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(WEIGHT_FILES) and not file.name.startswith("."):
            shutil.copyfile(file, folder / file.name)


def _write_model(model: PolicyModel, source: Path, folder: Path, dtype: Storage) -> None:
    copy_companions(source, folder)
    if not model.is_finite():
        raise ModelError("the weights hold numbers that are not finite; they are not written")
    arrays = model.arrays()
    write_tensors(folder / SINGLE, arrays, dtype)
    tensors = open_tensors(folder)  # what was written must read back as what was meant
    check(tensors, read_spec(folder))
    for name, array in arrays.items():
        if dtype == "bf16":
            is_same = np.array_equal(tensors.bits16(name), to_bf16(array))
        else:
            is_same = np.array_equal(tensors.float32(name), array.astype("<f2" if dtype == "f16" else "<f4"))
        if not is_same:
            raise _differs(name, folder / SINGLE)


def _verify_state(file: Path, arrays: Mapping[str, NDArray[np.float32]]) -> None:
    """Compare a state file with what was meant, bit by bit, with one tensor in memory at a time."""
    try:
        with safe_open(str(file), framework="np") as tensors:
            for name, meant in arrays.items():
                found = tensors.get_tensor(name)
                bits = np.ascontiguousarray(meant).view(np.uint32)
                if found.dtype != meant.dtype or not np.array_equal(found.view(np.uint32), bits):
                    raise _differs(name, file)
    except SafetensorError as error:
        raise Unavailable(f"{file} cannot be read back: {error}", hint="check the disk") from error


def _differs(name: str, file: Path) -> Unavailable:
    return Unavailable(f"{name} reads back from {file} as something else", hint="check the disk")


def _named(snapshot: Snapshot, prefix: str) -> dict[str, NDArray[np.float32]]:
    """Return tensors as KIND/NAME: the weight itself, and the optimiser's moments of it."""
    arrays = {f"{prefix}{WEIGHT}/{name}": _as_array(weight) for name, weight in snapshot.weights.items()}
    for name, state in snapshot.moments.items():
        arrays |= {f"{prefix}{key}/{name}": np.atleast_1d(_as_array(value)) for key, value in state.items()}
    return arrays


def _as_array(value: torch.Tensor) -> NDArray[np.float32]:
    return own_part(value.detach()).cpu().numpy().astype(np.float32, copy=False)


def _read_rows(files: Sequence[Path], trainer: Trainer) -> dict[str, NDArray[np.float32]]:
    """Return this process's rows of everything in the state files, one per rank that wrote them."""
    parts: dict[str, list[NDArray[np.float32]]] = {}
    for writer, file in enumerate(files):
        try:
            with safe_open(str(file), framework="np") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    weight = trainer.model.weights.get(key.removeprefix(HEALTHY).partition("/")[2])
                    if weight is None or STEP in key:  # a counter is the same on every rank
                        parts.setdefault(key, [tensors.get_tensor(key)])
                        continue
                    held = own_rows(weight.shape[0], writer, len(files))
                    wanted = own_rows(weight.shape[0], trainer.rank, trainer.rank_count)
                    rows = tensors.get_slice(key)
                    if not rows.get_shape() or rows.get_shape()[0] != held[1] - held[0]:
                        raise ModelError(f"{file} holds no {key} of shape {tuple(weight.shape)}")
                    first, last = max(held[0], wanted[0]) - held[0], min(held[1], wanted[1]) - held[0]
                    if first < last:
                        parts.setdefault(key, []).append(rows[first:last])
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
    return {key: found[0] if len(found) == 1 else np.concatenate(found) for key, found in parts.items()}


def _snapshot(file: Path, tensors: Mapping[str, NDArray[np.float32]], trainer: Trainer) -> Snapshot:
    found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in trainer.model.weights}
    for full_name, array in tensors.items():
        kind, _, name = full_name.partition("/")
        if name not in found:
            raise ModelError(f"{file} holds {full_name}, which this model does not have")
        found[name][kind] = torch.from_numpy(array)
    weights, moments = {}, {}
    for name, weight in trainer.model.weights.items():
        mine = own_part(weight)
        if not mine.numel():  # a rank that holds no row of it
            found[name].setdefault(WEIGHT, torch.zeros(mine.shape))
        if WEIGHT not in found[name] or found[name][WEIGHT].shape != mine.shape:
            raise ModelError(f"{file} holds no weight {name} of shape {tuple(weight.shape)}")
        weights[name] = _placed(found[name].pop(WEIGHT), weight)
        if found[name]:  # files hold the optimiser's step counter, a scalar, as a list of one
            moments[name] = {
                key: value.reshape(()) if f"{key}/" == STEP else _placed(value, weight)
                for key, value in found[name].items()
            }
            if not mine.numel():
                moments[name] |= {key: torch.zeros_like(weight) for key in MOMENTS}
    return Snapshot(weights, moments)


def _placed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return rows as a tensor of the weight's kind: on its device, and sharded if it is."""
    if own_part(weight) is weight:
        return rows.to(weight.device)
    tensor = torch.empty_like(weight.detach())
    own_part(tensor).copy_(rows)
    return tensor


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """Yield a folder that gets the name `out` when it is whole; a failure leaves nothing behind."""
    fresh = sibling_name(out)
    try:
        fresh.mkdir(parents=True)
        yield fresh
        # A crash after the rename must not find empty files.
        for path in [*fresh.rglob("*"), fresh]:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fresh.rename(out)
    except OSError as error:
        what = f"{out} cannot be written: {error.strerror or error}"
        raise Unavailable(what, hint="free some space, or choose another folder") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
