"""Where the processes of a run are: this machine unless the settings say otherwise."""

from __future__ import annotations

import asyncio
import sys

import pytest

from rose.errors import ConfigError
from rose.run.process_site import LocalSite, ProcessEvents, site_of
from rose.run.processes import Command
from rose.run.run_settings import load_run_settings

IS_UP = Command("sleeper", ("-c", "import time; print('up', flush=True); time.sleep(600)"), patterns={"up": "(up)"})


def test_this_machine_is_the_default_and_tells_processor_time(tmp_path) -> None:
    async def story() -> dict[str, float]:
        site = site_of(load_run_settings(None, ["worker.is_used=false"]))
        assert isinstance(site, LocalSite)
        assert (await site.open()).worker is None
        processes = site.processes(tmp_path, {}, ProcessEvents(print, print, print))
        await processes.prepare()
        assert (await processes.start(IS_UP)).captured == {"up": "up"}
        costs = processes.cpu_s()
        await processes.close()
        await site.close()
        return costs

    assert asyncio.run(story())["sleeper"] >= 0


def test_a_run_on_ray_without_ray_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="Ray is not installed") as caught:
        site_of(load_run_settings(None, ["cluster.kind=ray"]))
    assert "pip install 'rose-rl[ray]" in str(caught.value)


def test_vllm_devices_are_refused_on_ray() -> None:
    with pytest.raises(ConfigError, match="have the embedded engine"):
        load_run_settings(None, ["cluster.kind=ray", "worker.engine=vllm"])


def test_a_run_on_ray_may_have_several_ranks() -> None:
    assert load_run_settings(None, ["cluster.kind=ray", "train.ranks=2"]).train.ranks == 2
