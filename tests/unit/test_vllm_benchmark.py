"""What benchmarks/coserve_vllm.py tells of a run: nothing that nobody has counted, and no look that was torn."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from coserve_vllm import REASONS, lent_between, looked

from rose.engines.vllm.board import Torn
from rose.engines.vllm.desk import Lent, Status


def test_what_runs_without_admission_is_not_told_as_nothing() -> None:
    begun, ended = Status(7), Status(7, generated_tokens=50, lent=Lent(seconds=2.0, breaches={"step": 3}))
    found = lent_between(begun, ended, 4.0, is_accounted=True)
    assert (found["lent_share"], found["breaches"]) == (0.5, 3)
    found = lent_between(begun, ended, 4.0, is_accounted=False)
    assert (found["lent_share"], found["breaches"], found["rollout_tok_s"]) == (None, None, 12.5)
    assert "lent_share" in REASONS


class TornOnce:
    tries = 0

    def look(self) -> None:
        self.tries += 1
        if self.tries == 1:
            raise Torn


def test_a_torn_board_is_looked_at_again() -> None:
    reader = TornOnce()
    assert looked(reader) is None  # type: ignore[arg-type]
    assert reader.tries == 2
