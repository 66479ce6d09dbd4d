"""A commit of weights pauses the engine, calls SGLang's own routes, and is never half believed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose.engines.base import Request
from rose.errors import ModelError, RequestRefused, Unavailable
from rose.models.tensors import write_tensors
from rose.sglang.sglang_engine import SglangEngine, check_same_tensors
from rose.vllm.control_segment import EngineControl, Status, open_control, open_status

ALL = 1 << 20


def write(folder: Path, **shapes: tuple[int, ...]) -> Path:
    folder.mkdir()
    write_tensors(folder / "model.safetensors", {name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    return folder


class Engine:
    """Applies every control at once, and answers calls as a test says."""

    def __init__(self, folder: Path) -> None:
        self._control, self._status = open_control(folder, create=True), open_status(folder, create=True)
        self._status.write(Status(1, version="old", max_context_tokens=64))
        self.model, self.new = write(folder / "model", a=(2, 3)), write(folder / "new", a=(2, 3))
        self.client = SglangEngine(folder / "http", folder, self._control, lambda: True, self.model, 10)
        self.client._command = self._command  # type: ignore[method-assign]
        self.failing, self.unapplied_s = "", -1.0
        self.seen: list[tuple[str, int]] = []  # paths, and tokens granted then
        self.bodies: dict[str, Any] = {}

    @property
    def control(self) -> EngineControl:
        control = self._control.read()[1]
        assert control is not None
        return control

    async def _command(self, path: str, body: Any) -> None:
        self.seen.append((path, self.control.tokens))
        self.bodies[path] = body
        self.unapplied_s = self.client.unapplied_s
        if path == self.failing:
            raise RequestRefused("it does not fit")

    async def apply(self) -> None:
        while True:
            status = Status(1, done=self._control.number, version="old", max_context_tokens=64)
            self._status.write(status)
            await asyncio.sleep(0)


def with_engine(folder: Path, check: Callable[[Engine], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = Engine(folder)
        applying = asyncio.create_task(engine.apply())
        try:
            engine.client.write_control(tokens=ALL)
            await check(engine)
        finally:
            applying.cancel()
            await engine.client.close()

    asyncio.run(run())


def test_a_commit_pauses_steps_while_sglang_reads_the_folder(tmp_path: Path) -> None:
    async def check(engine: Engine) -> None:
        await engine.client.stage("new", str(engine.new))
        await engine.client.commit("new")
        assert engine.seen == [("/pause_generation", 0), ("/update_weights_from_disk", 0), ("/continue_generation", 0)]
        body = engine.bodies["/update_weights_from_disk"]
        assert body == {"model_path": str(engine.new), "weight_version": "new", "flush_cache": False}
        assert (engine.control.tokens, engine.client._version) == (ALL, "new")
        assert engine.unapplied_s == 0.0, "an engine that reads weights does not hang"

    with_engine(tmp_path, check)


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_disk", "/continue_generation"])
def test_after_a_failed_commit_no_step_runs(path: str, tmp_path: Path) -> None:
    async def check(engine: Engine) -> None:
        await engine.client.stage("new", str(engine.new))
        engine.failing = path
        with pytest.raises(Unavailable, match="not known which weights"):
            await engine.client.commit("new")
        assert (engine.control.tokens, engine.client._version) == (0, "old")

    with_engine(tmp_path, check)


def test_only_a_staged_version_is_committed(tmp_path: Path) -> None:
    async def check(engine: Engine) -> None:
        with pytest.raises(RequestRefused):
            await engine.client.commit("new")
        await engine.client.stage("new", str(engine.new))
        with pytest.raises(ModelError):
            await engine.client.stage("bad", str(tmp_path / "nowhere"))
        await engine.client.commit("new")
        assert engine.client._version == "new"

    with_engine(tmp_path, check)


def test_a_token_outside_the_vocabulary_never_reaches_sglang(tmp_path: Path) -> None:
    async def check(engine: Engine) -> None:
        with pytest.raises(RequestRefused, match="out of vocabulary"):
            await anext(engine.client.generate(Request("a", (1, 10))))

    with_engine(tmp_path, check)


def test_an_abort_is_repeated_until_the_stream_has_ended(tmp_path: Path) -> None:
    async def check(engine: Engine) -> None:
        await engine.client.evict("never heard of")
        assert engine.seen == []
        plain, engine.client._names = engine.client._command, {"a": "rose-1"}

        async def command(path: str, body: Any) -> None:
            await plain(path, body)
            if len(engine.seen) == 2:  # the first one came before SGLang had read the request
                del engine.client._names["a"]

        engine.client._command = command  # type: ignore[method-assign]
        await engine.client.evict("a")
        assert ([path for path, _ in engine.seen], engine.bodies) == (
            ["/abort_request"] * 2, {"/abort_request": {"rid": "rose-1"}},
        )  # fmt: skip

    with_engine(tmp_path, check)


def test_a_folder_with_other_tensors_is_refused(tmp_path: Path) -> None:
    model = write(tmp_path / "model", a=(2, 3), b=(4,))
    check_same_tensors(model, write(tmp_path / "same", a=(2, 3), b=(4,)), "v")
    with pytest.raises(ModelError, match="lacks or adds tensors, for example `b`"):
        check_same_tensors(model, write(tmp_path / "less", a=(2, 3)), "v")
    with pytest.raises(ModelError, match="has shape"):
        check_same_tensors(model, write(tmp_path / "other", a=(3, 2), b=(4,)), "v")
