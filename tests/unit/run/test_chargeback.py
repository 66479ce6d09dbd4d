"""The bill between the lender of a device and a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.launch_lines import run_lines, served, step
from tests.unit.launch_lines import summary_of as summed_up

from rose.cli import main as cli
from rose.cost.bill import CostSettings
from rose.run.chargeback import LenderBill, chargeback
from rose.run.run_records import read_served, records_in

PRICES = CostSettings(
    serving_usd_per_hour=3600.0, energy_usd_per_hour=36.0, transfer_usd_per_gb=2.0, breach_usd=0.5, charged_share=0.25
)
LENT = {"steps": 40, "tokens": 900, "milliseconds": 2500, "evicted_tokens": 30}


def bill_of(*lines: dict[str, Any], rows: Any = (), headroom_share: float = 0.0) -> LenderBill | None:
    records = list(records_in("".join(json.dumps(line) + "\n" for line in lines).encode(), is_lenient=False))
    return chargeback("mine", records, list(rows), PRICES, headroom_share)


def test_the_bill_has_what_the_device_counted() -> None:
    steps = [step(n, 3.1 * n, weights_bytes=500_000_000) for n in (1, 2, 3)]
    late = {"kind": "lending", "breaches": {"ttft": 2, "tpot": 1, "ambiguous": 4, "step": 9}}
    bill = bill_of(*steps, late, {"kind": "lent", "lender": "borrowed", "step": 3, "counts": LENT})
    assert bill is not None
    assert (bill.lender, bill.borrower, bill.steps, bill.turns) == ("borrowed", "mine", 3, 600)
    assert (bill.lent_s, bill.lent_tokens, bill.lent_steps, bill.evicted_tokens) == (2.5, 900, 40, 30)
    assert (bill.lost, bill.ambiguous, bill.losses_basis) == (3.0, 4, "counted")
    assert bill.borrowed_s == pytest.approx(9.3) and bill.borrowed_rollout_s == pytest.approx(6.0)
    assert bill.energy_usd == pytest.approx(0.06) and bill.transfer_usd == pytest.approx(3.0)
    assert bill.losses_usd == pytest.approx(3.5) and bill.charged_usd == pytest.approx(6.0 * 0.25)
    assert bill.due_usd == pytest.approx(0.06 + 3.0 + 3.5 + 1.5)


def test_steps_without_the_device_are_not_billed() -> None:
    with_device, without = ([step(n, 3.1 * n, is_borrowed=is_lent) for n in (1, 2, 3)] for is_lent in (True, False))
    assert bill_of(*with_device, *without) == bill_of(*with_device)


def test_a_run_that_borrowed_nothing_has_no_bill() -> None:
    assert bill_of(step(1, 0.0, is_borrowed=False)) is None
    assert bill_of(step(1, 0.0, turns_by_pool={"dedicated": 300})) is None
    assert bill_of() is None


def test_an_older_run_has_no_count_of_what_was_lent_and_its_losses_are_estimated() -> None:
    rows = read_rows(served(101.0, ttft_ms=900.0), served(101.5))
    bill = bill_of(step(1, 100.0), rows=rows)
    assert bill is not None and bill.lent_s is bill.lent_tokens is None
    assert (bill.lost, bill.ambiguous, bill.losses_basis) == (1.0, 0, "estimated")


def read_rows(*rows: dict[str, Any]) -> Any:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
        file.flush()
        return read_served(Path(file.name))


def test_the_bill_agrees_with_the_cost_of_the_run() -> None:
    lines = [*run_lines(), {"kind": "lending", "breaches": {"ttft": 2}}]
    bill, cost = bill_of(*lines, headroom_share=0.2), summed_up(lines, [], PRICES, 0.2)["cost"]
    assert bill is not None
    parts = ("energy", "transfer", "headroom", "slo_risk")
    assert bill.borne_usd == pytest.approx(sum(cost["bill"][part] for part in parts))


def folder_of(tmp_path: Path, *lines: dict[str, Any]) -> Path:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "settings.yaml").write_text("name: one\ncost: {serving_usd_per_hour: 36.0, charged_share: 1.0}\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_command_prints_the_bill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of(tmp_path, step(1, 0.0), {"kind": "lent", "lender": "borrowed", "counts": LENT})
    assert cli.main(["runs", "bill", "one", "--runs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for words in ("device borrowed to run one", "2.5 s, 900 tokens in 40 steps (30 evicted)", "USD 0.02"):
        assert words in printed
    assert cli.main(["runs", "bill", "one", "--runs", str(tmp_path), "--json"]) == 0
    bill = json.loads(capsys.readouterr().out)
    assert bill["lent_tokens"] == 900 and bill["charged_usd"] == pytest.approx(0.02)


@pytest.mark.parametrize(
    "lines, words", [([step(1, 0.0, is_borrowed=False)], "borrowed nothing"), ([{"kind": "step"}], "cannot be read")]
)
def test_a_run_without_a_bill_says_why(
    lines: list[dict[str, Any]], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of(tmp_path, *lines)
    assert cli.main(["runs", "bill", "one", "--runs", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_a_folder_without_records_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder_of(tmp_path) / "metrics.jsonl").unlink()
    assert cli.main(["runs", "bill", "one", "--runs", str(tmp_path)]) == 2
    assert "has no records" in capsys.readouterr().err
