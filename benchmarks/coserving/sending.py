"""The load generator as a process of its own, so that nothing else of the benchmark delays a request.

    python -m coserving.sending ORDER RESULT

It replays the requests of an order, open loop, and writes every token's time and how busy the cores were.
"""

from __future__ import annotations

import asyncio
import io
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from coserving.children import environment, loop_factory
from coserving.options import CONTEXT_TOKENS
from coserving.processes import Cores, CoreWatch, Shares
from coserving.store import Row
from rose.load.driver import Record, RequestOutcome
from rose.load.load_report import LatencyBudget
from rose.load.load_run import LoadPlan, run_load
from rose.load.terminal import LoadProgress
from rose.load.traces import Trace, made_trace

TIMEOUT_S = 60.0
DIGITS = 6


class Order(msgspec.Struct):
    """What to send where. Two orders with the same seed send the same prompts."""

    url: str
    arrival_s: list[float]
    prompt_tokens: list[int]
    output_tokens: list[int]
    seed: int
    cores: Cores
    timeout_s: float = TIMEOUT_S


class Sent(msgspec.Struct):
    """`began_s` is on the monotonic clock, which all processes of a machine share."""

    began_s: float
    duration_s: float
    rows: list[Row]
    shares: Shares


def order_of(trace: Trace, url: str, seed: int, cores: Cores, timeout_s: float = TIMEOUT_S) -> Order:
    arrival_s, prompts, outputs = trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist()
    return Order(url, arrival_s, prompts, outputs, seed, cores, timeout_s)


def row_of(record: Record) -> Row:
    return Row(
        record.index,
        record.scheduled_s,
        record.prompt_tokens,
        record.wanted_tokens,
        _known(record.sent_s),
        _known(record.ended_s),
        str(record.outcome),
        record.detail,
        record.tokens_counted,
        record.was_held,
        [round(at_s, DIGITS) for at_s in record.token_s],
    )


def record_of(row: Row, *, offset_s: float = 0.0, first_index: int = 0) -> Record:
    """As it was, in the time and the numbering of the whole run."""
    record = Record(first_index + row.index, row.scheduled_s + offset_s, row.prompt_tokens, row.wanted_tokens)
    record.sent_s = math.nan if row.sent_s is None else row.sent_s + offset_s
    record.ended_s = math.nan if row.ended_s is None else row.ended_s + offset_s
    record.token_s.extend(at_s + offset_s for at_s in row.token_s)
    record.tokens_counted = row.tokens_counted
    record.outcome = RequestOutcome(row.outcome)
    record.detail, record.was_held = row.detail, row.was_held
    return record


def _known(value: float) -> float | None:
    return None if math.isnan(value) else round(value, DIGITS)


def send(order: Order, folder: Path) -> Sent:
    """Replay an order in a process of its own and wait for its end."""
    order_path, result_path = folder / "order.json", folder / "sent.json"
    order_path.write_bytes(msgspec.json.encode(order))
    result_path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "coserving.sending", str(order_path), str(result_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if not result_path.exists():
        raise SystemExit(f"the load generator ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return msgspec.json.decode(result_path.read_bytes(), type=Sent)


async def _replay(order: Order) -> Sent:
    columns = (np.array(order.prompt_tokens), np.array(order.output_tokens))
    trace = made_trace("order", np.array(order.arrival_s, dtype=np.float64), *columns)
    plan = LoadPlan(
        order.url, context_tokens=CONTEXT_TOKENS, lengths="keep", timeout_s=order.timeout_s, seed=order.seed
    )
    watch = CoreWatch(order.cores)
    finished = await run_load(trace, plan, progress=LoadProgress(LatencyBudget(), stream=io.StringIO()))
    now_s = time.monotonic()
    shares = watch.shares()
    rows = [row_of(record) for record in finished.records]
    return Sent(now_s - finished.duration_s, finished.duration_s, rows, shares)


def main(arguments: Sequence[str]) -> int:
    order = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Order)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        sent: Any = runner.run(_replay(order))
    Path(arguments[1]).write_bytes(msgspec.json.encode(sent))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
