"""New weights on a rollout engine, as its agent's side sees it: closed while it lasts, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rose.engines.vllm.desk import Control, Status, control_sheet, status_sheet
from rose.engines.vllm.worker import VllmWorker
from rose.errors import ModelError, RequestRefused, RoseError, Unavailable

ALL = 1 << 20


class Engine:
    """Obeys its desk at once, and answers calls as it is told to."""

    def __init__(self, folder: Path) -> None:
        self._control, self._status = control_sheet(folder, create=True), status_sheet(folder, create=True)
        self._status.write(Status(1, version="old"))
        self.worker = VllmWorker(folder / "http", folder, self._control, lambda: True)
        self.worker._status_sheet = status_sheet(folder)
        self.worker._version = "old"
        self.worker._call = self._call  # type: ignore[method-assign]
        self.failures: dict[str, RoseError] = {}
        self.meanwhile: Callable[[], None] = lambda: None
        self.seen: list[tuple[str, int]] = []  # paths, and tokens granted then

    @property
    def control(self) -> Control:
        found = self._control.read()[1]
        assert found is not None
        return found

    async def _call(self, path: str, body: Any) -> dict[str, Any]:
        self.meanwhile()
        self.seen.append((path, self.control.tokens))
        if path in self.failures:
            raise self.failures[path]
        return {"results": [{"busy": False, "failure": "", "version": "new", "numbers": 1}]}

    async def obey(self) -> None:
        while True:
            self._status.write(Status(1, done=self._control.number, version="old"))
            await asyncio.sleep(0)


def tell(folder: Path, story: Callable[[Engine], Awaitable[None]]) -> None:
    async def told() -> None:
        engine = Engine(folder)
        obeying = asyncio.create_task(engine.obey())
        try:
            engine.worker.wish(tokens=ALL)
            await engine.worker.stage("new", "folder")
            await story(engine)
        finally:
            obeying.cancel()
            await engine.worker.close()

    asyncio.run(told())


def test_the_gate_is_closed_for_what_writes_and_for_nothing_else(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        await engine.worker.commit("new")
        assert engine.seen[1:] == [("/start_weight_update", ALL), ("/update_weights", 0), ("/finish_weight_update", 0)]
        assert (engine.control.tokens, engine.worker._version) == (ALL, "new")
        assert engine.worker.swap_s is not None

    tell(tmp_path, story)


def test_a_grant_that_is_renewed_meanwhile_opens_nothing_until_it_is_done(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        engine.meanwhile = lambda: engine.worker.wish(tokens=7, until_s=9.0) and None
        await engine.worker.commit("new")
        assert [tokens for path, tokens in engine.seen if path != "/start_weight_update"][1:] == [0, 0]
        assert (engine.control.tokens, engine.control.until_s) == (7, 9.0)

    tell(tmp_path, story)


@pytest.mark.parametrize("words", ["version `new` was taken back: no room", "version `new` is not staged"])
def test_what_left_the_weights_as_they_were_is_over(tmp_path: Path, words: str) -> None:
    async def story(engine: Engine) -> None:
        engine.failures["/update_weights"] = Unavailable(f"the rollout engine answered 500: {words}")
        with pytest.raises(ModelError, match="version `new`"):
            await engine.worker.commit("new")
        assert (engine.control.tokens, engine.worker._version) == (ALL, "old")
        with pytest.raises(RequestRefused, match="not staged"):
            await engine.worker.commit("new")

    tell(tmp_path, story)


@pytest.mark.parametrize(
    "path, words",
    [
        ("/update_weights", "version `new` is half written (no room) and cannot be taken back"),
        ("/update_weights", "the connection was lost"),
        ("/finish_weight_update", "the connection was lost"),
    ],
)
def test_an_engine_of_unknown_weights_is_never_opened_again(tmp_path: Path, path: str, words: str) -> None:
    async def story(engine: Engine) -> None:
        engine.failures[path] = Unavailable(words)
        with pytest.raises(Unavailable, match="not known which weights"):
            await engine.worker.commit("new")
        engine.worker.wish(tokens=ALL)
        assert engine.control.tokens == 0

    tell(tmp_path, story)
