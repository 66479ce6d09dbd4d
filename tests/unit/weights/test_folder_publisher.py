"""Folders that a trainer wrote: which are read, when one is new, and the hash that their weights get."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from rose.errors import RequestRefused, Unavailable
from rose.models.presets import write_preset
from rose.models.tensors import open_tensors, write_tensors
from rose.weights import folder_publisher
from rose.weights.folder_publisher import (
    FolderPublisher,
    PublisherSpec,
    PublishOrder,
    PublishOutcome,
    checked_folder,
    weight_files,
)
from rose.weights.keys import SECRET
from rose.weights.manifest import folder_hash


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "a-secret-of-these-tests-and-no-other")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("frozenlake-1m", tmp_path_factory.mktemp("models") / "m", seed=0)


@pytest.fixture
def spec(model: Path, tmp_path: Path) -> PublisherSpec:
    (tmp_path / "root").mkdir()
    return PublisherSpec(str(model), str(tmp_path / "root"), str(tmp_path / "relay"), "run")


def written(spec: PublisherSpec, name: str, change: float = 0.0, dtype: Any = "bf16") -> Path:
    folder = Path(spec.root) / name
    folder.mkdir(exist_ok=True)
    tensors = open_tensors(spec.model)
    arrays = {each: np.array(tensors.float32(each)) + np.float32(change) for each in tensors.names()}
    write_tensors(folder / "model.safetensors", arrays, dtype)
    return folder


def test_weights_are_published_once_and_as_deltas(spec: PublisherSpec) -> None:
    publisher = FolderPublisher(spec)
    first, second = written(spec, "a"), written(spec, "b", 0.5)
    one = publisher.publish(PublishOrder(str(first), 1))
    assert (one.version, one.hash, one.kind) == (f"1-{one.hash[:8]}", folder_hash(first), "anchor")
    assert publisher.publish(PublishOrder(str(first), 2, one.hash)) == PublishOutcome(hash=one.hash)
    two = publisher.publish(PublishOrder(str(second), 2, one.hash))
    assert (two.hash, two.kind) == (folder_hash(second), "delta")
    back = publisher.publish(PublishOrder(str(first), 1, two.hash))
    assert (back.version, back.hash) == (f"3-{one.hash[:8]}", one.hash), "an earlier folder, under a later number"
    publisher.close()


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("elements", [1 << 24, 1 << 10])
def test_a_new_process_knows_the_newest_weights(
    spec: PublisherSpec, dtype: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash does not depend on the stored type or on how tensors are cut."""
    monkeypatch.setattr(folder_publisher, "CHUNK_ELEMENTS_MAX", elements)
    make = folder_publisher.Publisher
    monkeypatch.setattr(folder_publisher, "Publisher", lambda *a, **k: make(*a, chunk_elements_max=elements, **k))
    folder = written(spec, "a", dtype=dtype)
    publisher = FolderPublisher(spec)
    outcome = publisher.publish(PublishOrder(str(folder), 1))
    publisher.close()
    again = FolderPublisher(spec)
    assert again.publish(PublishOrder(str(folder), 2, outcome.hash)) == PublishOutcome(hash=outcome.hash)
    assert again.publish(PublishOrder(str(folder), 2, outcome.hash)) == PublishOutcome(hash=outcome.hash)
    assert again.publish(PublishOrder(str(folder), 2, "another")).version.startswith("2-")
    again.close()


def test_files_that_change_while_they_are_read_are_not_published(
    spec: PublisherSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(spec, "a")
    publisher = FolderPublisher(spec)
    stored = folder_publisher.Tensors.stored

    def change(tensors: Any, name: str) -> Any:
        os.utime(folder / "model.safetensors", ns=(1, 1))
        return stored(tensors, name)

    monkeypatch.setattr(folder_publisher.Tensors, "stored", change)
    with pytest.raises(Unavailable, match="changed while"):
        publisher.publish(PublishOrder(str(folder), 1))
    monkeypatch.undo()
    monkeypatch.setenv(SECRET, "a-secret-of-these-tests-and-no-other")
    assert publisher.publish(PublishOrder(str(folder), 1)).kind == "anchor"
    publisher.close()


def test_only_folders_below_the_root_are_read(spec: PublisherSpec, tmp_path: Path) -> None:
    root = Path(spec.root)
    inside = written(spec, "a")
    assert checked_folder(str(root / "x" / ".." / "a"), spec.root) == Path(os.path.realpath(inside))
    (root / "within").symlink_to(inside)
    assert checked_folder(str(root / "within"), spec.root) == Path(os.path.realpath(inside))
    (root / "out").symlink_to(tmp_path)
    beside = tmp_path / "root-beside"
    for bad in (str(tmp_path), str(root / "out"), str(root / ".."), str(beside), "/", "a", "", "/\0"):
        with pytest.raises(RequestRefused):
            checked_folder(bad, spec.root)


def test_files_that_are_links_to_outside_or_pipes_are_refused(spec: PublisherSpec, tmp_path: Path) -> None:
    folder = written(spec, "a")
    outside = tmp_path / "model.safetensors"
    shutil.move(folder / "model.safetensors", outside)
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(RequestRefused, match="is not below"):
        weight_files(folder, spec.root)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(RequestRefused, match="not a regular file"):
        weight_files(folder, spec.root)


def test_a_folder_of_too_many_files_is_refused(spec: PublisherSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(spec, "a")
    monkeypatch.setattr(folder_publisher, "ITEMS_MAX", 2)
    for name in "xyz":
        (folder / name).touch()
    with pytest.raises(RequestRefused, match="more than 2 files"):
        weight_files(folder, spec.root)


def test_orders_are_lines_and_errors_are_outcomes(spec: PublisherSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(spec, "a")
    orders = [PublishOrder("/etc", 1), PublishOrder(str(folder), 1)]
    text = b"".join(msgspec.json.encode(order) + b"\n" for order in orders)
    output = io.BytesIO()
    monkeypatch.setattr(folder_publisher.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    monkeypatch.setattr(folder_publisher.sys, "stdout", SimpleNamespace(buffer=output))
    monkeypatch.setattr(folder_publisher.os, "setpriority", lambda *_: None)
    monkeypatch.setattr(folder_publisher.signal, "signal", lambda *_: None)
    folder_publisher.main(msgspec.json.encode(spec).decode())
    refused, done = (msgspec.json.decode(line, type=PublishOutcome) for line in output.getvalue().splitlines())
    assert refused.fault is not None and refused.fault.kind == "RequestRefused"
    assert done.fault is None and done.hash == folder_hash(folder)
