"""Routes of operators: orders to one worker or many in one request, and what was ordered.

Only the operator's token gives orders: a trainer cannot undo what the owner of the devices ordered.
"""

from __future__ import annotations

from datetime import UTC, datetime

from aiohttp import web

from rose.api.fleet_orders import OrderBody, OrderReply
from rose.errors import Unavailable
from rose.gateway.gateway_server import Gateway
from rose.openai.http_errors import bad_request
from rose.openai.request_parsing import BodyReader
from rose.openai.response_writing import json_response

ORDER = BodyReader(OrderBody)


async def give_order(gateway: Gateway, request: web.Request) -> web.Response:
    """Carry out an order at once, then wait until it is durable."""
    body = ORDER.read(await gateway.context.read(request))
    if bool(body.workers) + bool(body.labels) + body.all != 1:
        raise bad_request("name `workers`, give `labels`, or say `all`: one of the three", param="workers")
    if body.turns_max is not None and body.action != "limits":
        raise bad_request("`turns_max` belongs to the action `limits`", param="turns_max")
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    record, matched, absent = gateway.core.fleet.apply(body, at, gateway.now_s())
    gateway.changes.notify()
    is_durable = gateway.settings.ledger is not None
    try:
        await gateway.durable()
    except Unavailable:
        is_durable = False
    return json_response(OrderReply(record.number, body.action, matched, absent, is_durable))


async def orders(gateway: Gateway, request: web.Request) -> web.Response:
    return json_response(gateway.core.fleet.stored)
