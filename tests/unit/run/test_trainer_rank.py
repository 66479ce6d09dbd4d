"""Whether torchrun started this process, and as which rank."""

from __future__ import annotations

import pytest

from rose.errors import ConfigError
from rose.run.trainer_rank import STARTED_BY_TORCHRUN, TORCHRUN, rank_of_torchrun


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in (*TORCHRUN, STARTED_BY_TORCHRUN):
        monkeypatch.delenv(name, raising=False)


def pretend(monkeypatch, rank: str, ranks: str, by: str | None = "7") -> None:
    for name, value in zip((*TORCHRUN, STARTED_BY_TORCHRUN), (rank, ranks, "127.0.0.1", "29500", by)):
        if value is not None:
            monkeypatch.setenv(name, value)


def test_without_its_variables_torchrun_started_nothing(monkeypatch):
    assert rank_of_torchrun(1) is None and rank_of_torchrun(4) is None
    monkeypatch.setenv("RANK", "1")
    assert rank_of_torchrun(4) is None, "other launchers set RANK alone"


def test_the_rank_is_that_of_the_environment(monkeypatch):
    pretend(monkeypatch, "3", "4", by=None)
    assert rank_of_torchrun(4) == 3
    assert rank_of_torchrun(1) is None, "a job scheduler's variables are no reason to refuse a run of one rank"


@pytest.mark.parametrize("rank, ranks, wanted", [("0", "2", 4), ("1", "2", 1), ("x", "2", 2)])
def test_another_number_of_ranks_is_refused(monkeypatch, rank, ranks, wanted):
    pretend(monkeypatch, rank, ranks)
    with pytest.raises(ConfigError, match=f"train.ranks is {wanted}"):
        rank_of_torchrun(wanted)
