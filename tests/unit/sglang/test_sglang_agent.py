"""The client of a rollout engine on SGLang starts SGLang's process, and says what SGLang cannot do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rose.core.lending_state import DesiredLending
from rose.errors import RequestRefused
from rose.sglang.sglang_agent import SglangEngineClient
from rose.sglang.sglang_process import SglangProcess
from rose.vllm import discovery
from rose.vllm.engine_process import RolloutEngineSettings
from rose.vllm.vllm_agent import VllmLending


def test_it_starts_sglang_and_limits_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(discovery.FOLDER_VARIABLE, str(tmp_path / "boards"))
    (tmp_path / "config.json").write_text(json.dumps({}))

    async def check() -> None:
        client = SglangEngineClient(VllmLending(RolloutEngineSettings(tmp_path)))
        try:
            process = client._new_process(client.lending.engine)
            assert isinstance(process, SglangProcess)
            await process.close()
            with pytest.raises(RequestRefused, match="cannot be limited"):
                await client.adopt(DesiredLending(memory_share=0.5))
            await client.adopt(DesiredLending(compute_share=0.5))
            assert client.desired.compute_share == 0.5
        finally:
            await client.close()

    asyncio.run(check())
