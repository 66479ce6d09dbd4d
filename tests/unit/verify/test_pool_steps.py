"""A burst that needs half of a pool, and the time for which serving asked for pages."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from rose.verify import pool_steps
from rose.verify.kit_results import KitSettings
from rose.verify.pool_steps import burst_prompt, burst_size, pool_flags
from rose.verify.step_context import StepContext, StepFindings


@pytest.mark.parametrize("blocks, block_tokens, prompt_tokens", [(384, 32, 768), (4600, 16, 3072), (8, 32, 768)])
def test_a_burst_needs_the_blocks_that_are_wanted_or_all_of_its_fixed_prompts(blocks, block_tokens, prompt_tokens):
    count = burst_size(blocks, block_tokens, prompt_tokens)
    each = -(-(prompt_tokens + pool_steps.ANSWER_TOKENS) // block_tokens)
    assert count == pool_steps.SAME_PROMPTS or blocks - each < count * each <= blocks


def test_no_two_prompts_of_a_burst_are_alike_and_each_is_the_same_every_time():
    prompts = [burst_prompt(number, 100) for number in (0, 1, 1000, 2000)]
    assert len({tuple(prompt) for prompt in prompts}) == 4 and prompts[0] == burst_prompt(0, 100)
    assert all(0 < token < pool_steps.VOCABULARY for prompt in prompts for token in prompt)


def test_what_serving_asked_for_is_judged_by_its_median():
    findings = StepFindings()
    pool_steps._add_asked(findings, [1.0, 2.0, 500.0])
    assert findings.result("pool-burst", 1.0).outcome == "passed" and findings.figures[0].n == 3
    pool_steps._add_asked(findings, [400.0, 500.0])
    assert findings.result("pool-burst", 1.0).outcome == "failed"


def test_serving_that_never_asks_is_a_note():
    findings = StepFindings()
    pool_steps._add_asked(findings, [])
    assert findings.checks == [] and "never asked" in findings.notes[0]


class FakeReader:
    """A status segment whose serving engine asks for pages as it is told."""

    def __init__(self) -> None:
        self.asked = 0

    @property
    def pages(self) -> tuple[int, int, int]:
        return 0, 0, self.asked


def test_every_request_for_pages_is_one_span_and_the_least_of_rollouts_is_kept():
    async def watch() -> pool_steps.Burst:
        reader, side = FakeReader(), SimpleNamespace(status=SimpleNamespace(pages=9))
        task = asyncio.create_task(pool_steps._watch(side, reader))  # type: ignore[arg-type]
        for asked, pages in ((0, 9), (4, 5), (0, 7), (8, 3), (8, 3), (0, 8), (2, 9)):
            reader.asked, side.status.pages = asked, pages
            await asyncio.sleep(0.02)
        task.cancel()
        return await task

    burst = asyncio.run(watch())
    assert len(burst.asked_ms) == 3 and all(span > 0 for span in burst.asked_ms) and burst.least == 3


def test_the_pool_on_a_gpu_is_small_enough_for_a_burst(tmp_path, monkeypatch):
    from rose.verify.engine_lab import EngineLab

    settings = KitSettings(device="cuda:0", serving="qwen3-3m")
    context = StepContext(settings, tmp_path, EngineLab(settings, tmp_path, print), {}, print)
    flags = dict(zip(pool_flags(context)[::2], pool_flags(context)[1::2]))
    assert 0 < int(flags["--kv-cache-memory-bytes"]) < pool_steps.POOL_BYTES_MAX
    monkeypatch.setattr(pool_steps, "POOL_TOKENS", 1 << 40)
    assert pool_flags(context)[1] == str(pool_steps.POOL_BYTES_MAX)


def test_preemptions_are_read_from_the_metrics_of_vllm():
    text = b'# HELP x\nvllm:num_preemptions_total{engine="0"} 3.0\nvllm:num_preemptions_created{engine="0"} 1.7e9\n'
    assert pool_steps.PREEMPTIONS.findall(text) == [b"3.0"]
