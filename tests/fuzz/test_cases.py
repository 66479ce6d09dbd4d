"""The fuzzers themselves: cases can be drawn and kept again, and answers are judged as they should be."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st
from tests.fuzz.decoders import READERS
from tests.fuzz.run import Listener, Run
from tests.fuzz.steps import Reply, Step, folded, unfolded
from tests.fuzz.table import LISTENERS
from tests.fuzz.values import Maker

ERROR = b'{"error": {"message": "later", "type": "x", "param": null, "code": null}}'
HTTP = [listener for listener in LISTENERS.values() if listener.case is not None]


@pytest.mark.parametrize(
    "reply, is_wrong",
    [
        (Reply(200, {}, b""), False),
        (Reply(400, {}, b""), False),
        (Reply(503, {"retry-after": "1"}, ERROR), False),
        (Reply(503, {}, ERROR), True),
        (Reply(503, {"retry-after": "1"}, b"later"), True),
        (Reply(500, {"retry-after": "1"}, ERROR), True),
        (Reply(0, {}, b"", is_late=True), True),
    ],
)
def test_only_a_stated_503_is_a_good_answer_above_499(reply: Reply, is_wrong: bool) -> None:
    assert (reply.problem() is not None) == is_wrong


@hypothesis.given(st.lists(st.tuples(st.binary(min_size=1, max_size=8), st.integers(1, 400))))
def test_bytes_that_are_folded_come_back(parts: list[tuple[bytes, int]]) -> None:
    data = b"".join(part * count for part, count in parts)
    assert unfolded(folded(data)) == data
    step = Step(b"GET / HTTP/1.1\r\n\r\n", data, "deaf")
    assert Step.from_json(step.to_json()) == step


@pytest.mark.parametrize("listener", HTTP, ids=lambda listener: listener.name)
def test_the_same_seed_draws_the_same_cases(listener: Listener) -> None:
    assert listener.case is not None
    for number in range(30):
        assert list(listener.case(random.Random(number))) == list(listener.case(random.Random(number)))


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.kind.__name__)
def test_most_values_that_are_not_changed_are_taken_by_their_type(reader: object) -> None:
    kind, taken = reader.kind, 0  # type: ignore[attr-defined]
    for number in range(50):
        maker = Maker(random.Random(number))
        try:
            msgspec.json.decode(maker.encode(maker.valid(msgspec.inspect.type_info(kind))), type=kind)
        except msgspec.ValidationError:
            continue
        taken += 1
    assert taken > 25


@pytest.mark.parametrize("more, is_leak", [(0.05, False), (0.2, True)])
def test_a_process_with_more_live_objects_than_when_warm_is_a_finding(more: float, is_leak: bool) -> None:
    server = SimpleNamespace(live_blocks=lambda: {os.getpid(): int(1000 * (1 + more)), 1 << 30: 5})
    run = Run(HTTP[0], server, "1", 1.0, warm_blocks={os.getpid(): 1000})  # type: ignore[arg-type]
    run.check_live_blocks()
    assert bool(run.findings) == is_leak
