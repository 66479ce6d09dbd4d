"""Pages that change hands: stories against the system's own figures, every order of calls, and an engine on top."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rose.config.server_settings import EngineSettings
from rose.device import pages
from rose.device.kv_pool import host_memory
from rose.device.pages import PagePool, PageShare, VirtualRange, group_of
from rose.engines.base import Budget, Request, Sampling
from rose.engines.embedded.engine import EmbeddedEngine
from rose.errors import ConfigError, Unavailable
from rose.models.presets import write_preset

PAGE = 64 << 10
FLOATS = PAGE // 4
SOURCES = Path(pages.__file__).parents[2]


@pytest.fixture
def pool() -> Iterator[PagePool]:
    made = PagePool(16, PAGE)
    yield made
    assert made.resident_bytes() == made.created * PAGE
    made.check()


def shared_memory_kib() -> int:
    """What the system says this process holds of shared memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssShmem:"))


def test_a_page_is_created_mapped_unmapped_and_released(pool: PagePool) -> None:
    memory = VirtualRange(pool, 4, "serving")
    (handle,) = pool.create(1)
    memory.map([2], [handle])
    view = memory.floats()[2 * FLOATS : 3 * FLOATS]
    assert not view.any(), "a created page is zero"
    view[:] = 7.0
    assert memory.unmap([2]) == [handle]
    memory.map([0], [handle])
    assert (memory.floats()[:FLOATS] == 7.0).all(), "unmapped is not released"
    memory.floats()[0] = 8.0
    memory.unmap([0])
    assert pool.release_spare() == 1
    assert pool.create(1) == [handle]
    memory.map([1], [handle])
    assert not memory.floats()[FLOATS : 2 * FLOATS].any(), "what was released comes back empty"
    memory.unmap([1])
    pool.release_spare()
    memory.free()
    memory.free()
    assert pool.resident_bytes() == 0


def test_released_memory_goes_back_to_the_system() -> None:
    pool = PagePool(8, 1 << 20)
    memory = VirtualRange(pool, 8, "serving")
    before_kib = shared_memory_kib()
    assert pool.resident_bytes() == 0, "a pool and a range cost nothing"
    memory.map(range(8), pool.create(8))
    memory.floats()[:] = 1.0
    assert pool.resident_bytes() == 8 << 20
    assert shared_memory_kib() - before_kib >= 8 << 10
    memory.unmap([1, 2, 5])
    assert pool.resident_bytes() == 8 << 20, "spare pages are still ours"
    assert pool.release_spare() == 3
    assert pool.resident_bytes() == 5 << 20
    assert shared_memory_kib() - before_kib <= (5 << 10) + 256
    assert (memory.floats()[: 1 << 18] == 1.0).all()
    pool.check()


def test_moving_a_page_keeps_its_content_and_disturbs_no_other(pool: PagePool) -> None:
    serving, rollout = VirtualRange(pool, 4, "serving"), VirtualRange(pool, 8, "rollout")
    serving.map([0, 1], pool.create(2))
    rollout.map([3, 4, 5], pool.create(3))
    serving.floats()[: 2 * FLOATS] = 1.0
    rollout.floats()[3 * FLOATS : 6 * FLOATS] = 2.0
    moved = rollout.handle_at(4)
    serving.map([3], rollout.unmap([4]))
    assert serving.handle_at(3) == moved and pool.owner_of(moved or 0) is serving
    assert pool.resident_bytes() == 5 * PAGE, "no memory was asked for"
    assert (serving.floats()[: 2 * FLOATS] == 1.0).all() and (serving.floats()[3 * FLOATS :] == 2.0).all()
    assert (rollout.floats()[3 * FLOATS : 4 * FLOATS] == 2.0).all()
    assert (rollout.floats()[5 * FLOATS : 6 * FLOATS] == 2.0).all()


def test_a_page_has_one_owner(pool: PagePool) -> None:
    one, two = VirtualRange(pool, 2, "one"), VirtualRange(pool, 2, "two")
    handles = pool.create(1)
    with pytest.raises(AssertionError, match="absent"):
        one.map([1], [9])
    one.map([0], handles)
    for wrong in (
        lambda: two.map([0], handles),
        lambda: one.map([0], pool.create(1)),
        lambda: two.unmap([0]),
        lambda: one.free(),
        lambda: pool.close(),
    ):
        with pytest.raises(AssertionError):
            wrong()
    assert pool.owner_of(handles[0]) is one


@pytest.mark.parametrize("what", ["never mapped", "handed over"])
def test_touching_what_is_not_mapped_ends_the_process(what: str) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(SOURCES)!r})
from rose.device.pages import *
pool = PagePool(2, {PAGE})
one, two = VirtualRange(pool, 1, "one"), VirtualRange(pool, 1, "two")
one.map([0], pool.create(1))
one.floats()[0] = 1.0
if {what == "handed over"}: two.map([0], one.unmap([0]))
print("alive", flush=True)
({{"never mapped": two, "handed over": one}}[{what!r}]).floats()[0] = 1.0
print("still alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert done.stdout.split() == ["alive"]


def test_neighbouring_pages_are_mapped_in_one_call(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = VirtualRange(pool, 16, "one"), VirtualRange(pool, 16, "two")
    calls: list[int] = []
    real = host_memory._map

    def counting(address: Any, size: int, *others: Any) -> int:
        calls.append(size)
        return real(address, size, *others)

    monkeypatch.setattr(host_memory, "_map", counting)
    one.map(range(12), pool.create(12))
    assert calls == [12 * PAGE]
    calls.clear()
    two.map(range(4, 12), one.unmap(range(2, 10)))
    assert calls == [8 * PAGE, 8 * PAGE], "one to take away, one to put"
    calls.clear()
    two.map([0, 1], one.unmap([0, 10]))
    assert sorted(calls) == [PAGE] * 4


def test_a_mapping_that_fails_changes_nothing(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = VirtualRange(pool, 8, "serving")
    handles = pool.create(4)
    real = host_memory._map

    def refusing(address: Any, size: int, access: Any, flags: int, *others: Any) -> int:
        if others and address <= memory.address + 5 * PAGE < address + size:
            raise Unavailable("no more mappings")
        return real(address, size, access, flags, *others)

    monkeypatch.setattr(host_memory, "_map", refusing)
    with pytest.raises(Unavailable):
        memory.map([0, 1, 5, 6], handles)
    assert len(memory) == 0 and pool.spare == 4
    share = PageShare(memory, budget_pages=8)
    assert share.acquire(8) == [] and "no more mappings" in share.refused
    monkeypatch.undo()
    assert share.acquire(8) == list(range(8))


def test_creating_pages_fails_cleanly_without_system_memory(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    share = PageShare(VirtualRange(pool, 8, "serving"), budget_pages=8)
    assert share.acquire(2) == [0, 1]
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Unavailable, match="no memory for"):
        pool.create(3)
    assert share.acquire(1) == [] and "no memory for" in share.refused
    assert pool.created == 2 and pool.left == 14


@pytest.mark.parametrize(
    "count, size, said",
    [(4, 1000, "not possible"), (4, 0, "not possible"), (0, PAGE, "at least one"), (1 << 40, PAGE, "does not fit")],
)
def test_impossible_pools_are_refused(count: int, size: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PagePool(count, size)


def test_a_share_keeps_to_its_budget_and_returns_pages_to_the_other(pool: PagePool) -> None:
    serving = PageShare(VirtualRange(pool, 16, "serving"), budget_pages=6)
    rollout = PageShare(VirtualRange(pool, 16, "rollout"), budget_pages=10)
    assert rollout.acquire(99) == list(range(10)) and rollout.room() == 0
    assert serving.acquire(4, urgent=True) == [0, 1, 2, 3]
    rollout.budget_pages, serving.budget_pages = 5, 11
    assert rollout.groups_over == 5 and rollout.acquire(1) == []
    assert serving.room() == 2, "what rollouts still hold is not there yet"
    rollout.give_back([9, 3, 4, 5, 6])
    assert rollout.groups_over == 0 and serving.room() == 7
    resident = pool.resident_bytes()
    assert serving.acquire(5) == [4, 5, 6, 7, 8]
    assert pool.resident_bytes() == resident and pool.spare == 0, "taken over, not created"


def test_blocks_that_do_not_divide_a_page_go_by_groups_of_pages(pool: PagePool) -> None:
    group = group_of(PAGE, 24 << 10)
    assert (group.pages, group.blocks) == (3, 8)
    share = PageShare(VirtualRange(pool, 9, "serving"), budget_pages=8, group_pages=group.pages)
    assert share.room() == 2 and share.acquire(3) == [0, 1] and share.held == 6
    share.budget_pages = 5
    assert share.groups_over == 1
    share.give_back([0])
    assert share.held == 3 and share.memory.handle_at(3) is not None and share.memory.handle_at(2) is None


def test_serving_is_never_short_while_rollouts_hold_a_page(pool: PagePool) -> None:
    rollout = PageShare(VirtualRange(pool, 16, "rollout"), budget_pages=12)
    assert len(rollout.acquire(12)) == 12
    asked: list[int] = []

    def cut(pages: int) -> None:
        asked.append(pages)
        rollout.budget_pages = max(0, 16 - serving.held - pages)
        serving.budget_pages = 16 - rollout.budget_pages
        rollout.give_back(range(rollout.budget_pages, rollout.held))

    serving = PageShare(VirtualRange(pool, 16, "serving"), budget_pages=4, on_short=cut)
    assert serving.room() == 16
    assert len(serving.acquire(7)) == 4 and asked == [], "in no hurry it takes what there is"
    assert len(serving.acquire(0, urgent=True)) == 0 and asked == []
    assert len(serving.acquire(5, urgent=True)) == 5 and asked == [5]
    assert rollout.held == 7 and serving.room() == 7
    assert len(serving.acquire(9, urgent=True)) == 7 and rollout.held == 0


def test_pages_the_system_refuses_come_from_the_other_model(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def give_up(asked: int, refused: int) -> None:
        told.append((asked, refused))
        rollout.give_back(range(max(0, rollout.held - refused), rollout.held))

    told: list[tuple[int, int]] = []
    serving = PageShare(VirtualRange(pool, 16, "serving"), budget_pages=16, on_refused=give_up)
    rollout = PageShare(VirtualRange(pool, 16, "rollout"), budget_pages=8)
    assert len(rollout.acquire(5)) == 5
    rollout.give_back([4])
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert serving.acquire(3) == [] and told == [], "in no hurry it takes nothing from anybody"
    assert serving.acquire(3, urgent=True) == [0, 1, 2] and told == [(3, 2)], "one was spare"
    assert rollout.held == 2 and "no memory for" in serving.refused
    assert serving.acquire(5, urgent=True) == [3, 4] and rollout.held == 0, "all that there is"
    assert serving.acquire(1, urgent=True) == [] and len(told) == 2, "there is nobody left to ask"
    assert rollout.acquire(1, urgent=True) == [] and len(told) == 2


class PagesHold(RuleBasedStateMachine):
    """Whatever order calls come in: one owner per page, contents stay with it, the system counts what we count."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(10, mmap.PAGESIZE)
        self.ranges = [VirtualRange(self.pool, size, name) for name, size in (("serving", 8), ("rollout", 10))]
        self.shares = [PageShare(memory, budget_pages=5) for memory in self.ranges]
        self.views = [memory.floats().reshape(memory.pages, -1) for memory in self.ranges]
        self.written: dict[int, float] = {}  # handle: what its owner last wrote
        self.number = 0.0

    @rule(who=st.integers(0, 1), count=st.integers(1, 6))
    def acquire(self, who: int, count: int) -> None:
        share = self.shares[who]
        room, spare = share.room(), self.pool.spare
        created = self.pool.created
        taken = share.acquire(count)
        assert len(taken) == min(count, room)
        assert self.pool.created - created == max(0, len(taken) - spare), "spare pages go first"

    @rule(who=st.integers(0, 1), data=st.data())
    def give_back(self, who: int, data: st.DataObject) -> None:
        held = [place for place in range(self.ranges[who].pages) if self.ranges[who].handle_at(place) is not None]
        if held:
            self.shares[who].give_back(data.draw(st.lists(st.sampled_from(held), unique=True, max_size=4)))

    @rule(who=st.integers(0, 1), budget=st.integers(0, 10))
    def budget(self, who: int, budget: int) -> None:
        self.shares[who].budget_pages = budget

    @rule(who=st.integers(0, 1))
    def write_everything(self, who: int) -> None:
        for place in range(self.ranges[who].pages):
            handle = self.ranges[who].handle_at(place)
            if handle is not None:
                self.number += 1.0
                self.views[who][place] = self.written[handle] = self.number

    @precondition(lambda self: self.pool.spare)
    @rule()
    def release_spare(self) -> None:
        self.pool.release_spare()
        mapped = {h for h in self.written if self.pool.owner_of(h) is not None}
        self.written = {handle: number for handle, number in self.written.items() if handle in mapped}

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()
        assert sum(len(memory) for memory in self.ranges) + self.pool.spare == self.pool.created

    @invariant()
    def everybody_reads_what_was_written(self) -> None:
        for memory, view in zip(self.ranges, self.views, strict=True):
            for place in range(memory.pages):
                handle = memory.handle_at(place)
                if handle is not None:
                    assert (view[place] == self.written.get(handle, 0.0)).all()

    def teardown(self) -> None:
        for share in self.shares:
            share.give_back([place for place in range(share.memory.pages) if share.memory.handle_at(place) is not None])
            share.memory.free()
        self.pool.release_spare()
        assert self.pool.resident_bytes() == 0
        self.pool.close()


TestPagesHold = PagesHold.TestCase


@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
def test_an_engine_never_reads_what_the_last_owner_left(tmp_path: Path, poison: float) -> None:
    """Isolation at the level of blocks: the page is not wiped, the engine makes a block ready when it takes it."""
    folder = write_preset("frozenlake-1m", tmp_path / "model", seed=3)
    settings = EngineSettings(kv_memory_mb=2, max_context_tokens=256)
    clean, paged = (EmbeddedEngine.load(folder, settings) for _ in range(2))
    size = paged._kv.nbytes
    pool = PagePool(-(-size // PAGE), PAGE)
    other, mine = VirtualRange(pool, pool.pages, "other"), VirtualRange(pool, pool.pages, "mine")
    other.map(range(pool.pages), pool.create(pool.pages))
    other.floats()[:] = poison
    mine.map(range(pool.pages), other.unmap(range(pool.pages)))
    values = paged._kv_values.shape
    paged._kv = mine.floats()[: size // 4]
    paged._kv_values = paged._kv.reshape(values[0], values[1], 2, values[2])[:, :, 1]
    assert _answers(paged) == _answers(clean)
    clean.close()
    paged.close()


def _answers(engine: EmbeddedEngine) -> list[tuple[str, int, float]]:
    """Prompts and answers that end in the middle of a block, in steps that split them."""
    for number, length in enumerate((1, 15, 16, 17, 40)):
        prompt = tuple((7 * number + position) % 90 for position in range(length))
        engine.add(Request(f"r{number}", prompt, Sampling(max_tokens=20, seed=number, ignore_eos=True)))
    said = []
    while (plan := engine.plan(Budget(24, 4))) is not None:
        for event in engine.step(plan):
            said += [(event.request_id, *pair) for pair in zip(event.token_ids, event.logprobs, strict=True)]
    assert len(said) == 100
    return said
