"""Who bears which token. A header may hold any bytes: what is no text comes as surrogates, and is a wrong token too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rose.front.failures import Failure
from rose.front.tokens import check_bearer

TOKEN = "a-good-token"
WRONG = {
    "none": "",
    "bare": TOKEN,
    "another kind": f"Basic {TOKEN}",
    "no token": "Bearer",
    "wrong": "Bearer a-bad-token",
    "longer": f"Bearer {TOKEN}2",
    "no text at all": "Bearer \udcff\udcfe",
}


def asking(header: str) -> Any:
    return SimpleNamespace(headers={"Authorization": header} if header else {})


@pytest.mark.parametrize("header", WRONG.values(), ids=WRONG)
def test_whoever_does_not_bear_it_is_told_so(header: str) -> None:
    with pytest.raises(Failure) as refused:
        check_bearer(asking(header), TOKEN)
    assert refused.value.status == 401


@pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer  {TOKEN} "], ids=["plain", "with spaces"])
def test_whoever_bears_it_is_let_in(header: str) -> None:
    check_bearer(asking(header), TOKEN)
    with pytest.raises(Failure):
        check_bearer(asking(header), TOKEN + "2")
