"""`rose load`: bounds of its options, what is refused before any request, and its exit codes."""

from __future__ import annotations

import pytest

from rose.cli.main import main

URL = ["--url", "http://127.0.0.1:9"]


@pytest.mark.parametrize(
    "words, why",
    [
        (["--ttft-ms", "0"], "`0` is not above 0"),
        (["--rate-scale", "inf"], "`inf` is not above 0"),
        (["--start", "-1"], "`-1` is not at least 0"),
        (["--requests", "0"], "`0` is not at least 1"),
        (["--requests", "1.5"], "`1.5` is not a number"),
        (["--seed", "-1"], "`-1` is not at least 0"),
    ],
)
def test_numbers_out_of_bounds_are_refused(words, why, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["load", "poisson:rate=1", *URL, *words])
    assert ended.value.code == 2 and why in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, why",
    [
        (["poisson:rate=1", "--json", "no/such/folder/out.json"], "there is no folder"),
        (["poisson:rate=1", "--api-key-env", "NO_SUCH_VARIABLE"], "export NO_SUCH_VARIABLE="),
        (["missing.csv"], "missing.csv"),
        (["gaussian:rate=1"], "gaussian"),
    ],
)
def test_what_cannot_work_is_refused_before_any_request(words, why, capsys, monkeypatch):
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    assert main(["load", *words, *URL]) == 2
    assert why in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_a_failure(capsys):
    assert main(["load", "poisson:rate=1", *URL, "--duration", "1"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err
