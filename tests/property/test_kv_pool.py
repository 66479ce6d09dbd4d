"""Two processes on one pool in any order of calls, stops and deaths: no page has two owners, and none is lost.

The kernel is the judge: /proc/PID/maps says which pages a process has. Deaths are at a chosen call of the back end, by
the process itself, so that every example runs the same way again.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from tests.support.pool_processes import Died, Nursery, PoolProcess

PAGES, PLACES, PAGE_BYTES = 10, 12, 4096
NAMES = ("serving", "rollout")
CALLS = st.sampled_from(["map", "wipe", "wait_wiped", "settle", "unmap"])


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


class PoolHolds(RuleBasedStateMachine):
    """A serving engine and a borrower that come, take, give back, stop and die."""

    nursery: Nursery

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.engines: dict[str, PoolProcess] = {}
        self.held: dict[str, set[int]] = {name: set() for name in NAMES}
        self.stopped: set[str] = set()
        self.values = itertools.cycle(range(1, 256))
        self.value = dict.fromkeys(NAMES, 0)

    @initialize()
    def begin(self) -> None:
        self.start("serving")
        self.start("rollout")

    def start(self, name: str) -> None:
        engine = self.engines[name] = self.nursery.start()
        call = ("create", str(self.folder / "pool"), PAGES, "memfd", PAGE_BYTES, PLACES)
        engine.call(*(call if name == "serving" else ("join", str(self.folder / "pool"), PLACES)))
        self.held[name], self.value[name] = set(), next(self.values)

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, PLACES), first=st.integers(0, PLACES - 1))
    def take(self, name: str, count: int, first: int) -> None:
        if name in self.stopped:
            return
        places = self.empty_places(name, first)[:count]
        free = PAGES - sum(map(len, self.held.values()))
        got = self.engines[name].call("acquire_and_fill", places, self.value[name])
        assert got == places[:free], "every free page is had at once, whatever the other process does"
        self.held[name].update(got)

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def give_back(self, name: str, data: st.DataObject) -> None:
        if self.held[name] and name not in self.stopped:
            places = data.draw(st.lists(st.sampled_from(sorted(self.held[name])), min_size=1, unique=True))
            self.engines[name].call("give_back", places)
            self.held[name].difference_update(places)

    @rule(
        call=CALLS, count=st.integers(1, 4), after=st.booleans(), is_taking=st.booleans(), name=st.sampled_from(NAMES)
    )
    def die_inside_a_call(self, name: str, call: str, count: int, after: bool, is_taking: bool) -> None:
        if name in self.stopped:
            return
        engine = self.engines[name]
        engine.call("die_at", call, count, after)
        try:
            if is_taking:
                engine.call("acquire", self.empty_places(name, 0))
            else:
                engine.call("give_back", sorted(self.held[name]))
        except Died:
            pass
        self.end(name)

    @rule(name=st.sampled_from(NAMES))
    def be_killed(self, name: str) -> None:
        self.end(name)

    @precondition(lambda self: "rollout" not in self.stopped)
    @rule()
    def stop(self) -> None:
        self.engines["rollout"].signal(signal.SIGSTOP)
        self.stopped.add("rollout")

    @precondition(lambda self: "rollout" in self.stopped)
    @rule()
    def go_on(self) -> None:
        self.engines["rollout"].signal(signal.SIGCONT)
        self.stopped.remove("rollout")

    def end(self, name: str) -> None:
        """End a process and start another. A borrower ends with the serving engine, and keeps its pages until then."""
        self.engines[name].kill()
        self.held[name] = set()
        if name == "serving":
            if "rollout" not in self.stopped:
                assert self.engines["rollout"].call("serving_pid") is None
                assert self.engines["rollout"].call("is_filled_with", self.value["rollout"])
            self.start("serving")
            self.engines["rollout"].kill()
        self.stopped.discard("rollout")
        self.start("rollout")

    def empty_places(self, name: str, first: int) -> list[int]:
        places = [*range(first, PLACES), *range(first)]
        return [place for place in places if place not in self.held[name]]

    @invariant()
    def no_page_has_two_owners_and_none_is_lost(self) -> None:
        mapped = {name: engine.mapped(PAGE_BYTES) for name, engine in self.engines.items()}
        for name, pages in mapped.items():
            assert len(pages) == len(self.held[name]) and set(pages.values()) <= {1}
        assert not mapped["serving"].keys() & mapped["rollout"].keys()
        owners = {page: self.engines[name].pid for name in NAMES for page in mapped[name]}
        for name in set(NAMES) - self.stopped:
            seen, free, is_intact = self.engines[name].call("report", self.value[name])
            assert {int(page): pid for page, pid in seen.items()} == owners and free == PAGES - len(owners)
            assert is_intact, "an engine does not read what it wrote"

    def teardown(self) -> None:
        for engine in self.engines.values():
            engine.kill()
        shutil.rmtree(self.folder)


def test_any_order(nursery: Nursery) -> None:
    run_machine(type("PoolHoldsHere", (PoolHolds,), {"nursery": nursery}), settings=settings(stateful_step_count=20))
