"""The second version of the weights differs where it should, and is a whole model folder."""

from __future__ import annotations

import numpy as np

from rose.models.presets import write_preset
from rose.models.tensors import open_tensors
from rose.verify.weight_steps import CHANGED_BIT, CHANGED_SHARE, GreedyAnswer, weights_hash, write_changed


def test_the_second_version_differs_by_one_bit_in_some_numbers_of_every_tensor(tmp_path):
    before = write_preset("frozenlake-1m", tmp_path / "before", seed=0)
    write_changed(before, tmp_path / "after", seed=1)
    one, other = open_tensors(before), open_tensors(tmp_path / "after")
    assert set(one.names()) == set(other.names())
    for name in one.names():
        difference = one.bits16(name) ^ other.bits16(name)
        assert set(np.unique(difference)) <= {0, CHANGED_BIT}
        assert np.count_nonzero(difference) == max(1, int(CHANGED_SHARE * difference.size))
    assert (tmp_path / "after" / "config.json").read_bytes() == (before / "config.json").read_bytes()


def test_the_hash_is_that_of_the_weights_alone(tmp_path):
    folders = [
        write_preset("frozenlake-1m", tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    (folders[1] / "README").write_text("another file")
    hashes = [weights_hash(folder) for folder in folders]
    assert hashes[0] == hashes[1] != hashes[2]


def test_agreement_counts_equal_tokens():
    assert GreedyAnswer([1, 2, 3], []).agreement(GreedyAnswer([1, 9, 3, 4], [])) == "2 of 4 tokens agree"
