"""Keys, folders and ranges of every relay."""

from __future__ import annotations

import pytest

from rose.errors import RequestRefused
from rose.weights.relay.relay_base import (
    KEY_CHARACTERS_MAX,
    RangeRefused,
    check_key,
    check_prefix,
    check_range,
    is_below,
    is_key,
)


@pytest.mark.parametrize("key", ["a", "run/e17/v07/delta.0000/manifest", "A_b=c-d.e/0", "x" * 128])
def test_paths_of_plain_segments_are_keys(key):
    assert is_key(key) and check_key(key) == key


@pytest.mark.parametrize(
    "key",
    ["", "/a", "a/", "a//b", ".hidden", "a/../b", "a/.b", "a b", "a\n", "\u00e4", "x" * 129, "a/" * 300 + "a"],
)
def test_other_texts_are_refused_as_keys(key):
    assert not is_key(key)
    with pytest.raises(RequestRefused, match="is not a key of a relay"):
        check_key(key)


def test_the_refusal_of_a_long_key_is_short():
    with pytest.raises(RequestRefused) as refusal:
        check_key("x" * (KEY_CHARACTERS_MAX + 1))
    assert len(str(refusal.value)) < 200


def test_a_prefix_is_a_folder_with_or_without_its_slash():
    assert check_prefix("run/e1/") == check_prefix("run/e1") == "run/e1" and check_prefix("") == ""
    with pytest.raises(RequestRefused):
        check_prefix("run//")


def test_below_a_folder_means_whole_segments():
    assert is_below("run/e1/a", "run/e1") and is_below("anything", "")
    assert not is_below("run/e10/a", "run/e1") and not is_below("run/e1", "run/e1")


@pytest.mark.parametrize("start, stop, range_of", [(0, None, (0, 9)), (3, 5, (3, 5)), (9, None, (9, 9))])
def test_a_range_inside_the_value_is_returned_with_its_end(start, stop, range_of):
    assert check_range("key", start, stop, 9) == range_of


@pytest.mark.parametrize("start, stop", [(-1, None), (0, 10), (10, None), (5, 4), (-2, -1)])
def test_a_range_outside_the_value_is_refused_not_cut(start, stop):
    with pytest.raises(RangeRefused) as refusal:
        check_range("key", start, stop, 9)
    assert refusal.value.size_bytes == 9
