"""Bodies of the trainer's routes are strict and bounded; batches are the same after the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rose.api.trajectories import (
    REWARD_MAX,
    Batch,
    BeginBody,
    FinishBody,
    FinishedGroup,
    PublishBody,
    PublishReply,
)
from rose.core.trajectory import Trajectory


@pytest.mark.parametrize(
    "kind, body",
    [
        (BeginBody, {"group_size": 0}),
        (BeginBody, {"seed": -1}),
        (BeginBody, {"secret": "short"}),
        (BeginBody, {"secret": "x" * 20 + "\n"}),
        (BeginBody, {"id": ""}),
        (BeginBody, {"groop": "x"}),
        (FinishBody, {"reward": 2 * REWARD_MAX}),
        (FinishBody, {"invalid_turns": -1}),
        (PublishBody, {}),
        (PublishBody, {"version": "1", "wait_s": 3601}),
        (PublishBody, {"version": "1", "file": "x"}),
    ],
)
def test_wrong_bodies_are_refused(kind: Any, body: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(body), type=kind)


def test_a_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(b'{"reward": NaN}', type=FinishBody)
    assert msgspec.json.decode(b"{}", type=FinishBody) == FinishBody()


def test_a_secret_made_by_a_client_is_accepted() -> None:
    assert msgspec.json.decode(b'{"secret": "abc_DEF-0123456789"}', type=BeginBody).secret == "abc_DEF-0123456789"


def test_a_batch_is_the_same_after_the_wire() -> None:
    trajectory = Trajectory("t", "g", (1, 2), (False, True), (0.0, -0.5), ("", "v0"), 1.0, True, 1, 0)
    batch = Batch(1, (FinishedGroup("g", "task", (trajectory,), 1),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=Batch) == batch


def test_a_reply_of_an_earlier_gateway_has_no_times() -> None:
    reply = msgspec.json.decode(b'{"version": "1", "ready": ["w"], "behind": {"x": "slow"}}', type=PublishReply)
    assert (reply.ready, reply.sync_s, reply.pause_s) == (["w"], {}, {})
