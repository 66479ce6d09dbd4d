"""Harvested tokens: read from the metrics of a device while a load runs."""

from __future__ import annotations

import aiohttp
import pytest
from tests.unit.load.test_client import Scripted, against

from rose.load.harvest import COUNTER, Harvest, counted, look, watch


@pytest.mark.parametrize(
    "page, tokens_total",
    [
        (f"# HELP {COUNTER} x\n# TYPE {COUNTER} counter\n{COUNTER} 12.0\n", 12),
        (f'{COUNTER}{{kind="prompt"}} 5.0\n{COUNTER}{{kind="output"}} 1e3\n', 1005),
        (f"{COUNTER}_created 99\nother_{COUNTER} 4\n", None),
        ("", None),
    ],
)
def test_the_counter_is_summed_over_its_labels(page, tokens_total):
    assert counted(page.encode()) == tokens_total


def test_failed_reads_leave_gaps_and_a_restart_subtracts_nothing():
    script, harvest, moments = Scripted(), Harvest(), iter([1.0, 2.0, 3.0])
    script.metrics = [f"{COUNTER} 100\n", 500, f"{COUNTER} 160\n", f"{COUNTER} oops\n", f"{COUNTER} 30\n"]

    async def five_looks(session: aiohttp.ClientSession, url: str) -> None:
        for _ in range(5):
            await look(session, f"{url}/metrics", lambda: next(moments), harvest)

    against(script, five_looks)
    assert (harvest.at_s, harvest.tokens) == ([1.0, 2.0, 3.0], [100, 160, 30])
    assert harvest.total == 60 and harvest.tokens_per_s == 30


def test_a_device_without_the_counter_is_read_once():
    script, harvest = Scripted(), Harvest()
    script.metrics = ["nothing 1\n"]
    against(script, lambda session, url: watch(session, f"{url}/metrics", lambda: 0.0, harvest))
    assert harvest.total is None and harvest.tokens_per_s is None
