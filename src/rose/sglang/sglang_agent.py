"""Keep a rollout engine on SGLang running: the client of `rose.vllm.vllm_agent` with SGLang's process.

SGLang's KV memory is one allocation of fixed size: it can be taken from all requests, but not in part.
"""

from __future__ import annotations

from rose.core.lending_state import DesiredLending
from rose.errors import RequestRefused
from rose.sglang.sglang_process import SglangProcess
from rose.vllm.engine_process import RolloutEngineSettings
from rose.vllm.vllm_agent import VllmEngineClient


class SglangEngineClient(VllmEngineClient):
    """The engine client of one rollout engine on SGLang, which it keeps running."""

    def _new_process(self, engine: RolloutEngineSettings) -> SglangProcess:
        return SglangProcess(engine)

    async def adopt(self, desired: DesiredLending) -> None:
        """Take over a desired state. Raises RequestRefused for a share of the memory."""
        if desired.memory_share < 1:
            raise RequestRefused(
                "SGLang's KV memory cannot be limited while it runs", hint="start it with a smaller --kv-memory-mb"
            )
        await super().adopt(desired)
