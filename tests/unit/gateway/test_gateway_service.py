"""Authorization and health of the gateway's application."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.hostile_worker import begin
from tests.unit.rollout_world import TOKENS, World, tell

from rose.models.model_folder import ModelFolder


@pytest.mark.parametrize("headers", [
    {"Authorization": "Bearer \xff"},
    {"Authorization": "Bearer"},
    {"Authorization": "\xff"},
    {"Authorization": "Basic YTpi"},
    {"Authorization": f"Digest {TOKENS.trainer}"},
    {},
])  # fmt: skip
def test_a_malformed_authorization_is_401_and_leaves_no_trace_in_the_log(
    folder: ModelFolder, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async def story(found: World) -> None:
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        host = found.url.removeprefix("http://")
        reader, writer = await asyncio.open_connection(*host.split(":"))
        writer.write(f"GET /v1/pool HTTP/1.1\r\nHost: {host}\r\n{head}\r\n".encode("latin-1"))
        assert (await reader.readline()).split()[1] == b"401"
        writer.close()
        assert not caplog.records

    tell(folder, story)


def test_health_reports_that_the_ledger_cannot_be_written(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(found: World) -> None:
        assert (await found.ask("GET", "/health"))[0] == 200
        database = found.gateway.core.ledger._database  # type: ignore[attr-defined]
        pages = database.execute("PRAGMA page_count").fetchone()[0]
        database.execute(f"PRAGMA max_page_count = {pages}")
        for number in range(200):
            if (await begin(found, id=f"t{number}", task="x" * 4000))[0] != 200:
                break
        status, reply = await found.ask("GET", "/health")
        assert status == 503 and "ledger" in reply["error"]["message"]
        database.execute("PRAGMA max_page_count = 1000000")
        found.gateway.core.tick(found.gateway.now_s())
        assert (await found.ask("GET", "/health"))[0] == 200

    tell(folder, story, ledger=str(tmp_path / "ledger.sqlite"))
