"""The memory of a lent device as its loop uses it: what reaches the policy, by which way, and what is written down."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.unit import test_lent as whole
from tests.unit import test_lent_trouble as trouble
from tests.unit.test_lent import PAGES, SETTINGS, Device, alone, ask, long_requests

from rose.config.device import LendSettings
from rose.core.memory import MemoryLimits, MemorySampled, SetRolloutBudget
from rose.coserve import lent_start, messages
from rose.engines.embedded.memory import block_bytes
from rose.models.folder import served_spec
from rose.observe.journal import Journal, read

folders, device, latencies = whole.folders, whole.device, trouble.latencies


def test_a_failure_on_servings_way_to_a_page_is_not_servings(device: Device, folders: tuple[Path, Path]) -> None:
    """It enters in the middle of serving's plan, when the request's prefix was found already."""
    policy, observe = device.memory.policy, device.memory.policy.observe

    def fails_when_serving_asks(sample: MemorySampled, now_s: float) -> Any:
        return (trouble.fails if sample.serving_asks_pages else observe)(sample, now_s)

    policy.observe = fails_when_serving_asks  # type: ignore[method-assign]
    requests = long_requests("short", 1, 60, 2) + long_requests("long", 1, 400, 8)
    for request in requests:
        device.serving.send(messages.Add(request))
        device.serving.until(lambda: request.request_id in device.serving.finished)  # noqa: B023
    device.rollout.until(lambda: device.rollout.failed is not None)
    assert ask(device, "status").state == "failed"
    assert device.serving.said == alone(folders[0], requests)
    assert device.lender.serving.facts().prefix_hit_tokens > 0
    device.lender.serving.scheduler.check()
    assert device.lender.serving.facts().kv_blocks_used == 0, "blocks that nobody holds are pinned"


def test_what_lending_does_to_servings_lives_widens_its_headroom(device: Device) -> None:
    before = ask(device, "status")
    device.lender.stretch.finished(life_s=2.0, lent_s=1.0)
    after = ask(device, "limits", memory_share=1.0)
    assert (before.lending_stretch, after.lending_stretch) == (1.0, 2.0)
    assert after.headroom_pages > before.headroom_pages


def test_new_weights_give_rollouts_their_memory_back(device: Device, folders: tuple[Path, Path]) -> None:
    device.memory.policy.limits = MemoryLimits(regrowth="swap")
    most = ask(device, "status").rollout_pages_max
    ask(device, "limits", memory_share=0.25)
    assert ask(device, "limits", memory_share=1.0).rollout_pages_max == PAGES // 4 < most
    trouble.new_weights(device, folders, "7")
    assert ask(device, "limits", memory_share=1.0).rollout_pages_max == most


def test_the_owners_terms_reach_the_memory_policy(folders: tuple[Path, Path]) -> None:
    sides = [lent_start._Side(folder, SETTINGS, block_bytes(served_spec(folder))) for folder in folders]
    memory = lent_start._memory(SETTINGS, LendSettings(regrowth="swap", headroom_share=0.3), sides)
    assert (memory.policy.limits.regrowth, memory.policy.limits.headroom_share) == ("swap", 0.3)
    for tenant in (memory.serving, memory.rollout):
        tenant.share.memory.free()
    memory.pages.close()


def test_a_journal_has_every_change_of_the_rollouts_memory_and_what_it_was_made_from(
    device: Device, tmp_path: Path
) -> None:
    lines: list[bytes] = []
    link: Any = SimpleNamespace(send=lambda noted: lines.append(noted.line))
    lent_start._keep_journal(device.lender, device.memory, link)
    for _ in range(2):
        ask(device, "limits", memory_share=0.25)
    with Journal(tmp_path / "journal.jsonl") as journal:
        for line in list(lines):
            journal.append_line(line)
    (entry,) = [entry for entry in read(journal.path) if isinstance(entry.fact, MemorySampled)]
    pages = PAGES // 4
    assert entry.fact.owner_limit_pages == pages
    assert entry.decisions == (SetRolloutBudget(pages, f"the owner allows {pages} pages"),)
