"""The books of trajectories: what is lost or comes twice is found, in whatever order things happen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.run.trajectory_ledger import Balance, TrajectoryLedger


def test_each_comes_back_once():
    ledger = TrajectoryLedger()
    for name in ("a", "b", "c"):
        ledger.begin(name)
    assert ledger.returned("a") and not ledger.returned("a")
    assert not ledger.returned("x")
    assert not ledger.returned("b", is_same=False)
    ledger.write_off("c")
    balance = ledger.close_step()
    assert (balance.begun, balance.returned, balance.written_off, balance.lost) == (3, 2, 1, 0)
    assert (balance.doubled, balance.unknown, balance.differing) == (1, 1, 1)


def test_what_never_comes_is_lost_at_the_end_of_its_step():
    ledger = TrajectoryLedger()
    ledger.begin("a")
    ledger.begin("b")
    assert ledger.close_step(still_open=["b"]).lost == 1
    assert ledger.returned("b") and ledger.close_step().lost == 1


def test_a_resumed_run_goes_on_from_its_balance_and_may_begin_the_same_again():
    before = Balance(begun=10, returned=6, written_off=1, open=2, lost=1, doubled=1)
    ledger = TrajectoryLedger(before)
    ledger.begin("a")
    assert ledger.returned("a")
    found = ledger.close_step()
    assert (found.begun, found.returned, found.written_off, found.lost, found.doubled) == (9, 7, 1, 1, 1)
    assert found.begun == found.returned + found.written_off + found.open + found.lost


def test_those_that_are_left_out_were_never_begun():
    ledger = TrajectoryLedger(Balance(begun=10, returned=10))
    for name in ("a", "b", "c", "d"):
        ledger.begin(name)
    for name in ("a", "b"):
        assert ledger.returned(name)
    ledger.write_off("c")
    assert ledger.balance(without=["b", "c", "d", "x"]) == Balance(begun=11, returned=11)
    assert ledger.balance() == Balance(begun=14, returned=12, written_off=1, open=1)


class LookedUp(set[str]):
    """May be searched, but not copied: a run has millions of them."""

    def __or__(self, other: object) -> set[str]:
        raise RuntimeError("all ids were copied for the sake of one")

    __ror__ = __or__


def test_beginning_one_more_copies_none_of_those_before():
    ledger = TrajectoryLedger()
    ledger._returned = LookedUp()
    for name in ("a", "b", "c"):
        ledger.begin(name)
    assert ledger.returned("b")
    ledger.write_off("c")
    for name in ("a", "b", "c"):
        with pytest.raises(AssertionError, match=f"{name} was begun before"):
            ledger.begin(name)
    assert ledger.balance().begun == 3


@given(st.lists(st.tuples(st.sampled_from(["return", "write off", "close"]), st.integers(0, 9)), max_size=60))
def test_the_books_always_balance(events):
    ledger = TrajectoryLedger()
    for number in range(10):
        ledger.begin(str(number))
    for what, number in events:
        if what == "return":
            ledger.returned(str(number))
        elif what == "write off":
            ledger.write_off(str(number))
        else:
            ledger.close_step([str(number)])
        balance = ledger.balance()
        assert balance.begun == balance.returned + balance.written_off + balance.open + balance.lost == 10
