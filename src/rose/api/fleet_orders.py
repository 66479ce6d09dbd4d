"""Schemas of an operator's orders to workers, of the reply, and of what the gateway keeps of them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from rose.api.worker_messages import CONCURRENCY_MAX, WorkerLabels
from rose.bounds import ITEMS_MAX, Label, Name, Serial, Text
from rose.core.fleet_orders import TARGETS_MAX, OrderAction, OrderedState

HISTORY_MAX = 64  # orders that are shown; what holds is kept without a limit in time
TurnsMax = Annotated[int, Meta(ge=1, le=CONCURRENCY_MAX)]


class OrderBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One order to the workers of these names, to those with all these labels, or to all; exactly one of the three.

    `limits` bounds the turns that run at once on each of them; without a number it takes the bound away.
    """

    action: OrderAction
    workers: Annotated[list[Name], Meta(max_length=ITEMS_MAX)] = []
    labels: WorkerLabels = {}
    all: bool = False
    turns_max: TurnsMax | None = None


class OrderReply(msgspec.Struct):
    """What an order did. It also holds for the `absent` workers, from when they join.

    Without `is_durable` a gateway that starts again does not know the order: it has no ledger, or cannot write it.
    """

    number: Serial
    action: OrderAction
    matched: Annotated[list[Name], Meta(max_length=ITEMS_MAX)]
    absent: Annotated[list[Name], Meta(max_length=ITEMS_MAX)]
    is_durable: bool


class OrderRecord(msgspec.Struct, frozen=True):
    """One order of the past, and how many workers it matched then."""

    number: Serial
    at: Label  # UTC, as text
    action: OrderAction
    target: Text
    turns_max: TurnsMax | None
    matched: Serial


class StandingRow(msgspec.Struct, frozen=True, array_like=True):
    """What one target was last ordered, as `core.fleet_orders` keeps it."""

    name: Label
    labels: WorkerLabels
    state: OrderedState
    state_number: Serial
    turns_max: TurnsMax | None
    limit_number: Serial


class StoredOrders(msgspec.Struct, frozen=True):
    """Everything that the gateway keeps of orders, in its ledger and for `GET /v1/pool/orders`."""

    number: Serial = 0  # of the newest order
    standing: Annotated[list[StandingRow], Meta(max_length=TARGETS_MAX)] = []
    history: Annotated[list[OrderRecord], Meta(max_length=HISTORY_MAX)] = []
