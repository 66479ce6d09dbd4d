"""`rose weights` on a relay that a publisher filled."""

from __future__ import annotations

import re
import shlex

import numpy as np
import pytest
from tests.contract.chain_ends import equal
from tests.contract.relays import SECRET
from tests.unit.cli.published import RUN, bits_at, fill_relay, weights_at

from rose.cli import main as cli
from rose.weights.publish import Publisher
from rose.weights.receive import Receiver


@pytest.fixture
def filled(tmp_path):
    return fill_relay(tmp_path)


def said(capsys, *words: str, code: int = 0) -> str:
    assert cli.main(list(words)) == code
    out, err = capsys.readouterr()
    return out + err


def test_ls_lists_every_link(filled, capsys):
    text = said(capsys, "weights", "ls", *filled[1])
    assert len(re.findall(r"^\d+ +\d+ +(?:anchor|delta)", text, re.MULTILINE)) == 4
    assert re.search(r"newest for a worker that joins: 4 \(epoch \d+\)", text)
    [following] = re.findall(r"^next: rose (.*)$", text, re.MULTILINE)
    assert "version     4" in said(capsys, *shlex.split(following))


def test_show_describes_the_newest_or_a_chosen_one(filled, capsys):
    newest = said(capsys, "weights", "show", *filled[1])
    assert "version     4" in newest and "a.weight" in newest and "times smaller" in newest
    assert "21,009 parameters in 2 tensors" in newest
    assert "from        version 1" in said(capsys, "weights", "show", *filled[1], "2")


def test_verify_reads_everything_and_finds_a_flipped_bit(filled, capsys):
    relay, where = filled
    assert re.search(r"version 3 \(epoch \d+\) is whole", said(capsys, "weights", "verify", *where, "3"))
    bucket = next(entry.key for entry in relay.list() if "v0000000004/delta" in entry.key and ".b0" in entry.key)
    path = relay.folder / bucket
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    text = said(capsys, "weights", "verify", *where, code=1)
    assert "version 4" in text and "Traceback" not in text
    assert re.search(r"version 3 \(epoch \d+\) is whole", said(capsys, "weights", "verify", *where, "3"))


def test_diff_counts_what_changed(filled, capsys):
    text = said(capsys, "weights", "diff", *filled[1], "2", "4")
    before, after = bits_at(2), bits_at(4)
    changed = sum(int(np.count_nonzero(before[name] != after[name])) for name in before)
    assert f"{changed:,} of 21,009 numbers changed" in text and re.search(r"b\.bias +9 +100\.00%", text)


def test_gc_deletes_what_nobody_needs_and_nothing_else(filled, capsys):
    relay, where = filled
    old = {entry.key: bytes(relay.get(entry.key)) for entry in relay.list()}
    with Publisher(weights_at(5), relay, run=RUN, secret=SECRET) as publisher:
        publisher.publish(5)
        publisher.wait()
    for key, value in old.items():  # as if the trainer had died before it could clean up
        if relay.folder.joinpath(key).exists() is False:
            relay.put_new(key, [value])
    would = said(capsys, "weights", "gc", *where, "--dry-run")
    assert f"{len(old)} keys would be deleted" in would and "of an earlier trainer" in said(
        capsys, "weights", "ls", *where
    )
    assert f"deleted {len(old)} keys" in said(capsys, "weights", "gc", *where)
    assert not old.keys() & {entry.key for entry in relay.list()}
    assert re.search(r"version 5 \(epoch \d+\) is whole", said(capsys, "weights", "verify", *where))
    assert equal(Receiver(relay, RUN, secret=SECRET).fetch().tensors, bits_at(5))


def test_gc_leaves_an_unfinished_publication_alone(filled, capsys):
    relay, where = filled
    epoch = next(entry.key.split("/")[1] for entry in relay.list() if "/v0" in entry.key)
    relay.put_new(f"{RUN}/{epoch}/v0000000005/delta.0000/r00000.b00000.0", [b"on its way"])
    relay.put_new(f"{RUN}/{epoch}/v0000000002/delta.0007/r00000.b00000.0", [b"left behind"])
    said(capsys, "weights", "gc", *where)
    left = {entry.key.split("/")[2] + entry.key.split("/")[3] for entry in relay.list() if "/v0" in entry.key}
    assert "v0000000005delta.0000" in left and "v0000000002delta.0007" not in left


@pytest.mark.parametrize(
    "change, words",
    [
        (["--run", "other"], "holds nothing of run `other`"),
        (["--secret-file", "missing"], "cannot be read"),
        (["--relay", "ftp://x"], "not the address of a relay"),
    ],
)
def test_bad_input_is_a_sentence(filled, capsys, change, words):
    text = said(capsys, "weights", "ls", *filled[1], *change, code=1 if change[0] == "--run" else 2)
    assert words in text and "try:" in text and "Traceback" not in text


def test_a_version_that_is_not_there_is_told_with_those_that_are(filled, capsys):
    assert "version 77 is not in the relay, which has 1 to 4" in said(
        capsys, "weights", "show", *filled[1], "77", code=1
    )


def test_a_strangers_secret_shows_nothing_as_usable(filled, capsys, tmp_path):
    (tmp_path / "other").write_bytes(b"another secret that is long enough\n")
    text = said(capsys, "weights", "ls", *filled[1], "--secret-file", str(tmp_path / "other"))
    assert "newest for a worker that joins: none" in text and "signature" in text
