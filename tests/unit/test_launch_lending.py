"""When the borrowed device is given a rest."""

from __future__ import annotations

import pytest

from rose.launch.lending import STALL_S, Stall


@pytest.mark.parametrize(
    "story, samples",
    [
        ("turns end", [(0, 8, 0.0, False), (1, 8, STALL_S + 1, False), (2, 8, 2 * STALL_S + 2, False)]),
        ("nothing to do", [(5, 0, 0.0, False), (5, 0, 99.0, False), (5, 3, 99.5, False)]),
        ("stuck", [(5, 3, 0.0, False), (5, 3, STALL_S, False), (5, 3, STALL_S + 1, True)]),
        ("stuck, then not", [(5, 3, 0.0, False), (5, 3, STALL_S + 1, True), (6, 3, STALL_S + 2, False)]),
    ],
)
def test_a_device_that_ends_nothing_is_found(story, samples):
    stall = Stall()
    assert [stall.observe(*sample[:3]) for sample in samples] == [sample[3] for sample in samples], story
