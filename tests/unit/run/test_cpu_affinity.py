"""Cores of the processes of a run: serving has its own, and a conflict is reported."""

from __future__ import annotations

import pytest

from rose.errors import ConfigError
from rose.run.cpu_affinity import place
from rose.run.run_settings import RunSettings, load_run_settings


def test_of_two_cores_serving_and_the_worker_have_one_each():
    placement = place(RunSettings(), [0, 1])
    assert (placement.serving, placement.worker, placement.others, placement.notes) == ("cpu:0", "cpu:1", (1,), ())


def test_one_core_means_no_dedicated_worker_and_a_note():
    placement = place(RunSettings(), [3])
    assert (placement.serving, placement.worker, placement.others) == ("cpu:3", None, (3,))
    assert "one core" in placement.notes[0]


def test_the_trainer_avoids_the_core_of_serving():
    placement = place(load_run_settings(None, ["serving.device=cpu:2"]), [0, 1, 2])
    assert (placement.worker, placement.others) == ("cpu:0", (0, 1))


@pytest.mark.parametrize(
    "overrides, cores, word",
    [
        (["compare=true", "steps=4"], [0], "second core"),
        (["serving.is_borrowed=false"], [0], "second core"),
        (["serving.device=cpu:7"], [0, 1], "serving.device is cpu:7"),
        (["worker.device=cpu:7"], [0, 1], "worker.device is cpu:7"),
    ],
)
def test_cores_that_do_not_exist_are_refused(overrides, cores, word):
    with pytest.raises(ConfigError, match=word):
        place(load_run_settings(None, overrides), cores)


def test_a_shared_core_is_noted():
    placement = place(load_run_settings(None, ["worker.device=cpu:0"]), [0, 1])
    assert "share core 0" in placement.notes[0]
