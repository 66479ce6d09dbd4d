"""The memory of a lent device as its loop uses it: what reaches the policy, by which way, and what is written down."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.unit.device import coserving_device
from tests.unit.device.coserving_device import PAGES, SETTINGS, Device, ask

from rose.config.server_settings import LendSettings
from rose.core.memory import MemorySampled, SetRolloutBudget
from rose.device import coserving_factory
from rose.engines.embedded.runner import block_bytes
from rose.models.model_folder import served_spec
from rose.observe.journal import Journal, read

folders, device = coserving_device.folders, coserving_device.device
latencies = coserving_device.quick_latencies


def test_lending_terms_reach_the_memory_policy(folders: tuple[Path, Path]) -> None:
    sides = [coserving_factory._Side(folder, SETTINGS, block_bytes(served_spec(folder))) for folder in folders]
    memory = coserving_factory._memory(SETTINGS, LendSettings(regrowth="swap", headroom_share=0.3), sides)
    assert (memory.policy.limits.regrowth, memory.policy.limits.headroom_share) == ("swap", 0.3)
    for tenant in (memory.serving, memory.rollout):
        tenant.share.memory.free()
    memory.pages.close()


def test_the_journal_has_every_memory_decision_and_its_facts(device: Device, tmp_path: Path) -> None:
    lines: list[bytes] = []
    link: Any = SimpleNamespace(send=lambda noted: lines.append(noted.line))
    coserving_factory.keep_journal(device.arbiter, device.memory, link)
    for _ in range(2):
        ask(device, "limits", memory_share=0.25)
    with Journal(tmp_path / "journal.jsonl") as journal:
        for line in list(lines):
            journal.append_line(line)
    (entry,) = [entry for entry in read(journal.path) if isinstance(entry.fact, MemorySampled)]
    pages = PAGES // 4
    assert entry.fact.owner_limit_pages == pages
    assert entry.decisions == (SetRolloutBudget(pages, f"the owner allows {pages} pages"),)
