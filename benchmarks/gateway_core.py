"""What the core of a gateway computes for one turn: the CPU time of its decisions and of its ledger, without HTTP.

200 turns of 64 tokens are asked for and placed (`ask`), and come back in eight messages' worth of tokens each
(`tokens`), in one process, with a ledger on disk. A figure is the least of five rounds, so that the machine's other
work disturbs it little. With `--before FOLDER` another checkout is measured too, in processes that take turns.

    python benchmarks/gateway_core.py --json FILE [--quick] [--before ../before]
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

from rose.api.worker_messages import Heartbeat, Join, ToAgent, TokensAdded, Turn, TurnTokens
from rose.config.server_settings import GatewaySettings
from rose.engines.base import Sampling
from rose.engines.token_stream import TokenStream
from rose.gateway.gateway_core import GatewayCore
from rose.gateway.ledger import Ledger
from rose.gateway.pool import PoolWorker

TURNS, ROUNDS, PIECES, PIECE_TOKENS, TURNS_PER_MESSAGE, KV_TOKENS = 200, 5, 8, 8, 16, 1 << 30
FIGURES = ("ask_us", "tokens_us")
COLUMNS = ("what", "n", "before", "after", "ratio", "ratio_low", "ratio_high")


class Bench:
    """A core with one worker that answers at once."""

    def __init__(self, folder: Path) -> None:
        self.core = GatewayCore("m", GatewaySettings(), Ledger(folder / "ledger.sqlite", "m"), vocabulary=100)
        self.sent: list[ToAgent] = []
        self.now_s = 0.0
        join = Join("worker", "dedicated", "m", "0", 4096, KV_TOKENS, 4096)
        self.worker: PoolWorker = self.core.join(join, self.sent.append, self.now_s)

    def round(self, number: int) -> tuple[float, float]:
        """Return the seconds of CPU of asking for the turns, and of taking their tokens."""
        self.sent.clear()
        sampling = Sampling(max_tokens=PIECES * PIECE_TOKENS, seed=1)
        began_s = time.process_time()
        for turn in range(TURNS):
            self.core.ask(f"{number}-{turn}", tuple(range(64)), sampling, TokenStream(), self.now_s)
        self.core.ledger.commit()
        asked_s = time.process_time()
        turns = [message for message in self.sent if isinstance(message, Turn)]
        assert len(turns) == TURNS
        for piece in range(PIECES):
            self.now_s += 0.2
            for start in range(0, TURNS, TURNS_PER_MESSAGE):
                pieces = [self.piece(turn, piece) for turn in turns[start : start + TURNS_PER_MESSAGE]]
                self.core.receive(self.worker, TokensAdded(tuple(pieces)), self.now_s)
            self.core.ledger.commit()
        taken_s = time.process_time()
        beat = Heartbeat(0, 0, 0, KV_TOKENS, "0", True, 0.0)
        self.core.receive(self.worker, beat, self.now_s)
        return asked_s - began_s, taken_s - asked_s

    def piece(self, turn: Turn, number: int) -> TurnTokens:
        finish, cached = ("length" if number == PIECES - 1 else None), (0 if number == 0 else None)
        return TurnTokens(turn.attempt_id, (7,) * PIECE_TOKENS, (-0.5,) * PIECE_TOKENS, "0", finish, cached)  # type: ignore[arg-type]


def measured() -> dict[str, float]:
    gc.disable()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        rounds = [bench.round(number) for number in range(ROUNDS + 1)][1:]
        bench.core.ledger.close()
    return {name: min(figures) / TURNS * 1e6 for name, figures in zip(FIGURES, zip(*rounds))}


def of_checkout(folder: Path) -> dict[str, float]:
    variables = os.environ | {"PYTHONPATH": str(folder / "src")}
    command = [sys.executable, __file__, "--one"]
    return dict(json.loads(subprocess.run(command, env=variables, check=True, capture_output=True).stdout))


def main() -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--one", action="store_true", help="print the figures of this process and end")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured()))
        return 0
    begun = harness.machine()
    before = (arguments.before or harness.PROJECT).resolve()
    pairs: list[dict[Path, dict[str, float]]] = []
    for number in range(3 if arguments.quick else 12):
        order = [before, harness.PROJECT] if number % 2 == 0 else [harness.PROJECT, before]
        pairs.append({folder: of_checkout(folder) for folder in order})
    rows: list[dict[str, Any]] = []
    for name in FIGURES:
        old, new = ([pair[folder][name] for pair in pairs] for folder in (before, harness.PROJECT))
        row = {"what": name, "n": len(pairs), "before": statistics.median(old), "after": statistics.median(new)}
        harness.put_ratio(row, "ratio", [late / early for early, late in zip(old, new)])
        rows.append(row)
    harness.print_table(rows, COLUMNS)
    bars = [harness.wanted(f"{row['what']}, after / before", row["ratio"], 1.03, at_most=True) for row in rows]
    return harness.finish(arguments, "gateway_core", rows, bars, begun)


if __name__ == "__main__":
    sys.exit(main())
