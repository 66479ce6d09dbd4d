"""Requests and token events: their encoding on sockets, bounds, and names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rose.api.requests import Partial, Request, Sampling, TokenEvent, VersionSpan
from rose.bounds import TOKENS_MAX

PARTIAL = Partial((5, 6), (-0.5, -1.0), (VersionSpan("v1", 0, 2),))


def test_a_request_is_the_same_after_a_socket() -> None:
    request = Request("r", (1, 2), Sampling(temperature=0.5, stop_token_ids=(7,)), "tenant", -3, 4.5, PARTIAL)
    data = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(data, type=Request) == request


def test_a_token_event_has_no_field_names_on_the_socket() -> None:
    event = TokenEvent("r", (1,), (-0.5,), "v0", "stop", cached_tokens=3)
    data = msgspec.msgpack.encode(event)
    assert msgspec.msgpack.decode(data) == ["r", [1], [-0.5], "v0", "stop", [], 3, [], []]
    assert msgspec.msgpack.decode(data, type=TokenEvent) == event


def test_a_request_under_another_id_goes_on_from_what_is_known() -> None:
    request = Request("r", (1,), Sampling(seed=9), "tenant", 1, 2.0, PARTIAL)
    assert request.named("s") == msgspec.structs.replace(request, request_id="s")
    assert request.named("s", Partial()).partial == Partial()


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_ids": [-1]},
        {"prompt_ids": [0] * (TOKENS_MAX + 1)},
        {"arrival_s": float("nan")},
        {"priority": 1 << 40},
        {"sampling": {"top_p": 2.0}},
        {"sampling": {"temperature": float("inf")}},
        {"partial": {"logprobs": [1.0]}},
    ],
    ids=["token", "tokens", "not a number", "priority", "share", "infinity", "probability"],
)
def test_values_out_of_bounds_are_refused_while_decoding(change: dict[str, Any]) -> None:
    data = msgspec.msgpack.encode({"request_id": "r", "prompt_ids": [1]} | change)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=Request)
