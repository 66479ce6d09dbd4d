"""Who bears which token. A header may hold any bytes: what is no text comes as surrogates, and is a wrong token too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rose.errors import ConfigError
from rose.front import service
from rose.front.failures import Failure
from rose.front.tokens import (
    API_KEY_VARIABLE,
    OWNER_VARIABLE,
    ROLLOUT_VARIABLE,
    SHORTEST,
    api_key_from_environment,
    check_bearer,
    check_distinct,
    token_from,
)

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
    return SimpleNamespace(headers={"Authorization": header} if header else {}, protocol=None)


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


STRONG = "sixteen-letters."


@pytest.mark.parametrize("variable", [ROLLOUT_VARIABLE, OWNER_VARIABLE])
def test_a_token_has_at_least_sixteen_characters(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, STRONG)
    assert token_from(variable) == STRONG
    for weak in (STRONG[:-1], "", "sixteen letters.", STRONG + "\u00e9", STRONG + "\n"):
        monkeypatch.setenv(variable, weak)
        with pytest.raises(ConfigError, match=variable):
            token_from(variable)
    monkeypatch.delenv(variable)
    assert len(token_from(variable)) >= SHORTEST


def test_the_key_of_the_serving_port_is_as_strong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert api_key_from_environment() is None
    monkeypatch.setenv(API_KEY_VARIABLE, STRONG[:-1])
    with pytest.raises(ConfigError, match=API_KEY_VARIABLE):
        api_key_from_environment()


def test_two_roles_with_the_same_token_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_distinct({"A": "one", "B": "two", "C": None, "D": None})
    with pytest.raises(ConfigError, match="A and C"):
        check_distinct({"A": "one", "B": "two", "C": "one"})
    for one, other in ((OWNER_VARIABLE, ROLLOUT_VARIABLE), (OWNER_VARIABLE, API_KEY_VARIABLE)):
        with monkeypatch.context() as scope:
            scope.setenv(one, STRONG)
            scope.setenv(other, STRONG)
            with pytest.raises(ConfigError, match="same token"):
                service._tokens()
