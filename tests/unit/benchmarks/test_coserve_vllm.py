"""What benchmarks/coserve_vllm.py tells of a run: nothing that nobody has counted, and no look that was torn."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from coserve_vllm import looked
from coserving.beside_vllm import GIVEN, REASONS, Answer, Piece, row_of

from rose.vllm.control_segment import LendingAccount, Status
from rose.vllm.seqlock_file import Torn


def test_what_runs_without_admission_is_not_told_as_nothing() -> None:
    begun = Status(7, generated_tokens=10)
    ended = Status(
        7, generated_tokens=60, lent=LendingAccount(seconds=2.0, breaches={"step": 3}, closed_s={"no room": 1.0})
    )
    piece = Piece(begun, ended, seconds=4.0, steps_s=1.0, present_s=2.0, nice=10, answers=[Answer(0.0, 0.1, [0.2])])
    found = row_of("idle", [piece, piece], GIVEN)
    assert (found["lent_share"], found["breaches"], found["waited_share"]) == (0.5, 6, {"no room": 0.25})
    assert (found["requests"], found["attainment"], found["serving_time_share"]) == (2, 0.0, 0.25)
    found = row_of("ungated", [piece, piece], GIVEN)
    assert (found["lent_share"], found["breaches"], found["rollout_tok_s"]) == (None, None, 12.5)
    assert "lent_share" in REASONS


class TornOnce:
    tries = 0

    def read(self) -> None:
        self.tries += 1
        if self.tries == 1:
            raise Torn


def test_a_torn_segment_is_read_again() -> None:
    reader = TornOnce()
    assert looked(reader) is None  # type: ignore[arg-type]
    assert reader.tries == 2
