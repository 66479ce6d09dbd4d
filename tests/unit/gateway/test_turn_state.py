"""The output of one turn."""

from __future__ import annotations

from rose.gateway.sessions import KeptTurn


def test_output_of_two_versions_keeps_both_spans_and_can_be_cut() -> None:
    turn = KeptTurn("k", 0, (1,), None)
    turn.produced.add((1, 2), (-1.0, -1.0), "0")
    turn.produced.add((3, 4), (-1.0, -1.0), "1")
    events = turn.produced.events("r", "1", "length")
    assert [(event.token_ids, event.version, event.finish_reason) for event in events] == [
        ((1, 2), "0", None),
        ((3, 4), "1", "length"),
    ]
    turn.produced.cut(3)
    assert turn.produced.token_ids == [1, 2, 3]
    assert [(span.version, span.start, span.end) for span in turn.produced.spans] == [("0", 0, 2), ("1", 2, 3)]
