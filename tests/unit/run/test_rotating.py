"""Files of which only the newest part is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rose.run.rotating import RotatingFile, before


def test_the_older_part_has_a_name_of_its_own(tmp_path):
    assert before(tmp_path / "serving.jsonl") == tmp_path / "serving.1.jsonl"


@given(st.lists(st.binary(min_size=1, max_size=30).filter(lambda line: b"\n" not in line), max_size=40))
def test_two_files_hold_the_newest_lines_in_order(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("rotating") / "x.log"
    file = RotatingFile(path, 100)
    for line in lines:
        file.write(line + b"\n")
    file.close()
    older = before(path).read_bytes() if before(path).exists() else b""
    kept = older + path.read_bytes()
    whole = b"".join(line + b"\n" for line in lines)
    assert whole.endswith(kept) and len(kept) >= min(100, len(whole)) - 31
    assert len(older) <= 100 and path.stat().st_size <= 100


def test_a_file_is_continued_and_half_a_line_is_cut(tmp_path):
    path = tmp_path / "x.log"
    path.write_bytes(b"one\ntw")
    file = RotatingFile(path, 100)
    file.write(b"two\n")
    assert file.size_bytes == 8
    file.close()
    file.close()
    assert path.read_bytes() == b"one\ntwo\n"
