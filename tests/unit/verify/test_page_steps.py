"""The page steps on host memory, and on the stand-in for the CUDA driver: the same checks hold on both."""

from __future__ import annotations

import asyncio
from array import array
from types import SimpleNamespace

import pytest

from rose.errors import Unavailable
from rose.load.driver import Record, RequestOutcome
from rose.verify import page_steps
from rose.verify.kit_results import KitSettings
from rose.verify.page_contents import PageContents
from rose.verify.step_context import StepContext
from rose.verify.verification_steps import STEPS

PAGE_STEPS = [step for step in STEPS if step.name.startswith("page-") and "vllm" not in step.needs]


@pytest.fixture(params=["cpu:0", "cuda:0"])
def context(request, monkeypatch, tmp_path):
    monkeypatch.setenv("ROSE_BOARDS", str(tmp_path / "boards"))
    monkeypatch.setattr(page_steps, "BURSTS", 3)
    monkeypatch.setattr(page_steps, "ROUNDS", 1)
    if request.param == "cuda:0":
        monkeypatch.setenv("ROSE_CUDA_DRIVER", str(request.getfixturevalue("standin").path))
    settings = KitSettings(device=request.param)
    return StepContext(settings, tmp_path, None, {}, print)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", PAGE_STEPS, ids=lambda step: step.name)
def test_every_check_of_a_page_step_holds(context, step):
    asyncio.run(step.load()(context))
    result = context.findings.result(step.name, 1.0)
    checks = [check for check in result.checks if "median" not in check.name]  # a busy machine may be slow
    assert checks and all(check.is_ok for check in checks), result
    assert all(figure.value is not None and figure.value >= 0 for figure in result.figures)


def test_every_call_that_moves_a_page_has_a_median_and_a_tail(context):
    asyncio.run(page_steps.page_calls(context))
    names = {figure.name for figure in context.findings.figures}
    for call in ("export", "reserve addresses", "map", "wipe", "wait for the device", "unmap"):
        assert {f"{call} P50", f"{call} P95"} <= names


def test_a_page_that_was_not_wiped_is_noticed(context, monkeypatch):
    monkeypatch.setattr(PageContents, "is_zero", lambda *place: False)
    asyncio.run(page_steps.page_owner_killed(context))
    result = context.findings.result("page-owner-killed", 1.0)
    assert result.outcome == "failed" and "every page is zero" in result.reason


def test_a_borrower_that_cannot_join_ends_the_step_in_words(context, monkeypatch):
    monkeypatch.setattr(page_steps.sys, "executable", "/bin/false")
    with pytest.raises(Unavailable, match="the borrowing process ended"):
        asyncio.run(page_steps.page_calls(context))


def test_pattern_and_zero_are_told_apart(context, tmp_path):
    pool = page_steps.PoolUnderTest(tmp_path / "pool", context.settings, 2)
    try:
        pool.share.acquire([0, 1])
        size, address = pool.share.page_bytes, pool.share.address
        pool.contents.fill(address + size, size)
        assert pool.contents.is_zero(address, size) and not pool.contents.is_zero(address + size, size)
    finally:
        pool.close()


def test_calls_are_timed_while_users_are_served(context, monkeypatch):
    async def replay(url, settings, requests):
        await asyncio.sleep(0.3)
        stamps = array("d", [0.2, 0.3])
        return [Record(0, 0.1, 5, 2, 0.1, 0.4, stamps, outcome=RequestOutcome.DONE) for _ in range(requests)]

    async def serving():
        return SimpleNamespace(url="http://127.0.0.1:1")

    monkeypatch.setattr(page_steps, "replay", replay)
    context.lab = SimpleNamespace(serving=serving)
    asyncio.run(page_steps.page_calls_busy(context))
    result = context.findings.result("page-calls-busy", 1.0)
    assert result.outcome == "passed" and result.figure("map P50").n >= page_steps.PAGES
    assert result.figure("TTFT P50").n == context.settings.requests // page_steps.BUSY_PART
