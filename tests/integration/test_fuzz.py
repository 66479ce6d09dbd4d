"""A short run of every fuzzer against real processes, and the rows of the corpus. Hours of it: `make fuzz`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.fuzz import corpus, decoders
from tests.fuzz import kill_gateway as kills
from tests.fuzz.__main__ import fuzz
from tests.fuzz.corpus import Row
from tests.fuzz.servers import Server
from tests.fuzz.table import LISTENERS

from rose.models.presets import write_preset

SECONDS = float(os.environ.get("FUZZ_SECONDS", "20"))
SEED = os.environ.get("FUZZ_SEED", "1")
BLOCK_MS = 100.0  # 50 on a machine of one's own
DECODER_S = 3.0
KILLS = 10
ROWS = corpus.rows()

ServerFor = Callable[[str], Server]


@pytest.fixture(scope="module")
def server_for(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerFor]:
    """One server for all rows of a listener."""
    with ExitStack() as held:
        found: dict[object, Server] = {}

        def server(name: str) -> Server:
            start = LISTENERS[name].server
            if start not in found:
                found[start] = held.enter_context(start(tmp_path_factory.mktemp(name), BLOCK_MS))
            return found[start]

        yield server


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_row_of_the_corpus_shows_nothing(row: Row, server_for: ServerFor) -> None:
    found = asyncio.run(corpus.problems(row, LISTENERS[row.listener], server_for(row.listener)))
    assert not found, "\n".join(f"{finding.signature}: {finding.detail}" for finding in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTENERS)
def test_fuzzing_a_listener_shows_nothing(name: str, tmp_path: Path) -> None:
    assert fuzz(LISTENERS[name], SECONDS, SEED, BLOCK_MS, tmp_path)["found"] == []


@pytest.mark.slow
def test_fuzzing_the_decoders_shows_nothing() -> None:
    assert decoders.run_all(DECODER_S, SEED) == []


@pytest.mark.slow
def test_a_killed_gateway_loses_and_doubles_nothing(tmp_path: Path) -> None:
    model = write_preset(kills.MODEL, tmp_path / kills.MODEL, seed=0)
    table = asyncio.run(kills.run(model, tmp_path / "ledger.sqlite", KILLS, 1)).table()
    assert kills.is_right(table), table
