"""How small and how fast a weight delta is, against what others send, in one run.

Cases: 100M bf16 parameters moved so that about 1, 4, 10 and 50 % of them change (independent normal steps), and two
consecutive AdamW steps of a small language model at learning rates 1e-6 and 1e-5 (deltas/adamw_steps.py, made in a
process of its own). Codecs take turns within a repeat; every decoded array is compared with the original, bit for bit.

Speeds are GB of dense bf16 weights per second of thread CPU time, one thread, the median of the repeats: `encode` reads
base and new and returns bytes, `decode_apply` turns the base in memory into the new weights; `memcpy` copies them.
`bound_iid_bytes` is (n h(p) + k H(step)) / 8: what positions and steps cost at least if they tell nothing about each
other; a codec may go below it where they do.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
from deltas.baselines import Codec, codecs
from deltas.updates import bound_iid_bytes, synthetic
from numpy.typing import NDArray

Bits = NDArray[np.uint16]

NOISES = {"1%": 3e-7, "4%": 1.2e-6, "10%": 4e-6, "50%": 4.5e-5}
LEARNING_RATES = (1e-6, 1e-5)
COLUMNS = (
    "case", "changed_percent", "codec", "bytes", "ratio_full", "ratio_coo", "over_bound", "encode_gb_s_core",
    "decode_apply_gb_s_core", "memcpy_gb_s",
)  # fmt: skip


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.thread_time()
    result = work()
    return time.thread_time() - begun, result


def cases(arguments: Any) -> Iterator[tuple[str, Bits, Bits]]:
    for name, noise in NOISES.items():
        yield name, *synthetic(arguments.parameters, noise, arguments.seed)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "steps.npz"
        script = Path(__file__).parent / "deltas" / "adamw_steps.py"
        subprocess.run([sys.executable, str(script), str(file), "--seed", str(arguments.seed)], check=True)
        steps = np.load(file)
        for rate in LEARNING_RATES:
            yield f"AdamW {rate:g}", steps[f"base_{rate:g}"], steps[f"new_{rate:g}"]


def measure(codec: Codec, base: Bits, new: Bits, held: Bits) -> dict[str, float]:
    """One turn of one codec."""
    encode_s, payload = cpu_seconds(lambda: codec.encode(base, new))
    held[:] = base
    apply_s, _ = cpu_seconds(lambda: codec.apply(payload, held))
    assert np.array_equal(held, new), "a codec lost something"
    return {"encode_s": encode_s, "apply_s": apply_s, "bytes": len(payload)}


def measure_case(name: str, base: Bits, new: Bits, repeats: int) -> list[dict[str, Any]]:
    held, competitors = base.copy(), codecs(len(base))
    turns: dict[str, list[dict[str, float]]] = {who: [] for who in competitors}
    copies: list[float] = []
    order = list(competitors)
    for number in range(-1, repeats):
        for who in order[number % len(order) :] + order[: number % len(order)]:
            turn = measure(competitors[who], base, new, held)
            if number >= 0:  # the first round warms caches and compilers
                turns[who].append(turn)
        copies.append(cpu_seconds(lambda: np.copyto(held, base))[0])
    return summarise(name, base, new, turns, statistics.median(copies))


def summarise(
    name: str, base: Bits, new: Bits, turns: dict[str, list[dict[str, float]]], copy_s: float
) -> list[dict[str, Any]]:
    dense_gb, bound = base.nbytes / 1e9, bound_iid_bytes(base, new)
    changed = int(np.count_nonzero(base != new))
    rows = []
    for who, found in turns.items():
        size = found[0]["bytes"]
        speeds = {key: statistics.median(dense_gb / turn[key] for turn in found) for key in ("encode_s", "apply_s")}
        rows.append({
            "case": name, "changed_percent": round(100 * changed / len(base), 3), "parameters": len(base), "codec": who,
            "bytes": int(size), "ratio_full": round(base.nbytes / size, 3), "ratio_coo": round(6 * changed / size, 3),
            "bound_iid_bytes": round(bound), "over_bound": round(size / bound, 4),
            "encode_gb_s_core": round(speeds["encode_s"], 2), "decode_apply_gb_s_core": round(speeds["apply_s"], 2),
            "memcpy_gb_s": round(dense_gb / copy_s, 2),
        })  # fmt: skip
    return rows


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    at = {(row["case"], row["codec"]): row for row in rows}
    found = []
    for case, encode_bar in (("1%", 2.0), ("4%", 1.0)):
        ours = at[case, "ours"]
        found += [
            harness.wanted(f"{case}: times smaller than COO", ours["ratio_coo"], 4.8),
            harness.wanted(f"{case}: size over the i.i.d. bound", ours["over_bound"], 1.03, at_most=True),
            harness.wanted(f"{case}: encode GB/s per core", ours["encode_gb_s_core"], encode_bar),
            harness.wanted(f"{case}: decode and apply GB/s per core", ours["decode_apply_gb_s_core"], 5.0),
        ]
    best = min(row["bytes"] for row in rows if row["case"] == "50%" and not row["codec"].startswith("ours"))
    over_best = round(at["50%", "ours"]["bytes"] / best, 4)
    return [*found, harness.wanted("50%: size over the best baseline", over_best, 1.01, at_most=True)]


def main() -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--repeats", type=int, default=None, help="turns of each codec (5, or 2 with --quick)")
    arguments = parser.parse_args()
    repeats = arguments.repeats or (2 if arguments.quick else 5)
    begun, rows = harness.machine(), []
    for name, base, new in cases(arguments):
        rows += measure_case(name, base, new, repeats)
        harness.print_table(rows[-len(codecs(0)) :], COLUMNS)
        print(flush=True)
    return harness.finish(arguments, "codec", rows, bars(rows), begun)


if __name__ == "__main__":
    sys.exit(main())
