"""The tables of docs/weights.md, out of a JSON file of benchmarks/sync.py: `python -m syncing.paper FILE`.

The second table scales the measured figures, on paper, to models that do not fit here. What a core does per GB of
dense weights (read, encode and copy on the trainer's side; decode, verify on the worker's) is taken from the row with
one receiver and no limit on the link, and divided by the cores that work at it; bytes grow with the parameters; the
link carries each version once, to a relay beside the workers; what a relay costs per call is taken as it is here.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORES_PER_RANK = 8
LINKS_GBIT_S = (20, 200)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the trainer's ranks that share it, and the tensor-parallel ranks of a worker; as in the paper."""

    name: str
    parameters: float
    trainer_ranks: int
    worker_ranks: int


CASES = (Case("8B", 8.2e9, 8, 1), Case("32B", 32.8e9, 32, 4))


def measured(found: dict[str, Any]) -> list[str]:
    lines = [
        "| relay | receivers | Mbit/s | method | total s | publish s | receive s | MB sent | pause ms | full / this |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        if row.get("total_s") is None:
            continue
        name = row["method"] if row["case"] == "step" else f"{row['case']}, {row['method']}"
        link = row["link_mbit_s"] or "-"
        figures = [row["total_s"], row.get("publish_s"), row.get("receive_s"), row["bytes"] / 1e6]
        figures += [row["pause_s"] * 1e3, row.get("ratio_full_time")]
        where = f"{row['relay']}, {row['parameters'] // 10**6}M"
        lines.append(f"| {where} | {row['receivers']} | {link} | {name} | " + " | ".join(map(_text, figures)) + " |")
    return lines


def scaled(found: dict[str, Any]) -> list[str]:
    row = next(row for row in found["rows"] if (row["case"], row["method"], row["link_mbit_s"], row["receivers"])
               == ("step", "ours", None, 1))  # fmt: skip
    dense_gb = row["parameters"] * 2 / 1e9
    publish_s_gb = (row["read_s"] + row["encode_s"] + row["copy_s"]) / dense_gb
    receive_s_gb = max(row["bring_s"] - row["fetch_s"], row["decode_s"]) / dense_gb
    calls_s = row["list_s"] + row["commit_s"]
    lines = [
        "| model | link Gbit/s | encode s | link s | decode and verify s | total s | COO: link s | full: link s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        model_gb = case.parameters * 2 / 1e9
        sent_gb, coo_gb = model_gb * row["bytes"] / 1e9 / dense_gb, model_gb / 2 * row["changed_share"] * 6
        encode_s = publish_s_gb * model_gb / case.trainer_ranks / CORES_PER_RANK
        decode_s = receive_s_gb * model_gb / case.worker_ranks / CORES_PER_RANK
        for gbit_s in LINKS_GBIT_S:
            link_s, coo_s, full_s = (size * 8 / gbit_s for size in (sent_gb, coo_gb, model_gb))
            total_s = encode_s + link_s + decode_s + calls_s
            figures = (encode_s, link_s, decode_s, total_s, coo_s, full_s)
            lines.append(f"| {case.name} | {gbit_s} | " + " | ".join(map(_text, figures)) + " |")
    return lines


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    found = json.loads(Path(sys.argv[1]).read_text())
    print("\n".join([*measured(found), "", *scaled(found)]))


if __name__ == "__main__":
    main()
