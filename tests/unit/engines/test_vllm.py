"""The old name of the schedulers for vLLM still leads to them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import rose.vllm
from rose.engines import vllm as old_name


def test_the_old_name_leads_to_the_schedulers(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = object()
    monkeypatch.setitem(vars(rose.vllm), "ServingScheduler", scheduler)
    assert old_name.ServingScheduler is scheduler


def test_an_unknown_name_is_refused_before_vllm_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())  # loading anything of it would fail
    with pytest.raises(AttributeError, match="OtherScheduler"):
        _ = old_name.OtherScheduler
