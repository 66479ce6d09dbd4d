"""The owner's routes of a lent device, on its serving port and behind the owner's token.

`GET /rose/lending` shows how lending goes; `POST /rose/lending/ACTION` says what to do and answers with the same.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from rose.bounds import Share
from rose.coserve.messages import Control
from rose.front.answering import json_response
from rose.front.bodies import BodyReader
from rose.front.context import Front
from rose.front.failures import Failure
from rose.front.lending import LendingDesk
from rose.front.tokens import check_bearer

ACTIONS = ("pause", "resume", "drain", "remove", "dry-run", "limits")


class ControlBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Only `limits` has anything to say: shares of the KV memory and of the device's time, 0 to 1."""

    memory_share: Share | None = None
    compute_share: Share | None = None


READER = BodyReader(ControlBody)


async def status(front: Front, request: web.Request) -> web.Response:
    return json_response(await _desk(front, request).ask(Control("status")))


async def control(front: Front, request: web.Request) -> web.Response:
    desk, action = _desk(front, request), request.match_info["action"]
    if action not in ACTIONS:
        raise Failure(404, f"there is no action `{action[:40]}`; there are {', '.join(ACTIONS)}", code="not_found")
    raw = await front.read(request)
    body = READER.read(raw) if raw else ControlBody()
    name: Any = action.replace("-", "_")
    return json_response(await desk.ask(Control(name, body.memory_share, body.compute_share)))


def _desk(front: Front, request: web.Request) -> LendingDesk:
    assert front.desk is not None
    check_bearer(request, front.desk.token)
    return front.desk
