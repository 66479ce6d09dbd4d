"""The secrets of a run, and which of its processes gets which of them.

Tokens are made for every run and travel in the environment of a process, never on its command line. Each process gets
only what its role needs: a serving device that was broken into cannot take batches or publish weights. A token that
only the process itself uses is made by that process.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from rose.front.tokens import OWNER_VARIABLE
from rose.rollout.roles import VARIABLES
from rose.weights.connecting import SECRET, SECRET_FILE

FOR_GATEWAY = frozenset(VARIABLES.values())
FOR_WORKER = frozenset({VARIABLES["worker"], SECRET, SECRET_FILE})  # joins the gateway, reads weights from the relay
FOR_LENDER = FOR_WORKER | {OWNER_VARIABLE}  # a worker that the run lends and holds back


@dataclass(frozen=True, slots=True)
class Tokens:
    agent: str
    trainer: str
    owner: str
    variables: dict[str, str]


def make_tokens() -> Tokens:
    made = {variable: secrets.token_urlsafe(24) for variable in (*VARIABLES.values(), OWNER_VARIABLE)}
    return Tokens(made[VARIABLES["agent"]], made[VARIABLES["trainer"]], made[OWNER_VARIABLE], made)


def secrets_of_run(tokens: Tokens, of_relay: Mapping[str, str]) -> dict[str, str]:
    """Return all secrets by variable. The relay's are those of this run, or else what the operator has set."""
    given = {variable: os.environ[variable] for variable in (SECRET, SECRET_FILE) if variable in os.environ}
    of_relay = {variable: value for variable, value in of_relay.items() if value}
    return {**tokens.variables, **(of_relay or given)}
