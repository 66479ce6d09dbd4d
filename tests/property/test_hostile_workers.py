"""Workers that say anything that their types allow: the gateway believes none of it blindly, and none of it stops time.

Every value stands at an edge of its bound. Workers join, beat, send pieces of attempts that they have, had or never had
refuse, and tell versions; the gateway ticks. No error but Unavailable or RequestRefused may come out, what a turn has
stays whole, and a turn that an honest worker gets afterwards ends.
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rose.api.faults import Fault
from rose.api.worker_messages import (
    Heartbeat,
    Join,
    NewVersion,
    TokensAdded,
    Turn,
    TurnRefused,
    TurnTokens,
    VersionReady,
)
from rose.bounds import FLOAT_MAX, INT32_MAX, INT64_MAX, SECONDS_MAX
from rose.config.server_settings import GatewaySettings
from rose.engines.base import Sampling
from rose.engines.token_stream import TokenStream
from rose.errors import RequestRefused, Unavailable
from rose.gateway.gateway_core import GatewayCore
from rose.gateway.ledger import NoLedger

MODEL, VOCABULARY = "model", 50
counts = st.sampled_from([0, 1, 7, INT32_MAX])
serials = st.sampled_from([0, 1, 1000, INT64_MAX])
rates = st.sampled_from([None, 0.0, 1e-300, 1.0, 1e6, FLOAT_MAX])
seconds = st.sampled_from([None, 0.0, 1e-9, 0.5, SECONDS_MAX])
finite = st.sampled_from([None, -FLOAT_MAX, -1.0, 0.0, 1.0, FLOAT_MAX])
versions = st.sampled_from(["0", "v1", "v2", "", "unheard-of"])
places = st.sampled_from(["resident", "parked", "absent", "activating"])

beats = st.builds(
    Heartbeat, counts, counts, serials, serials, versions, st.booleans(), rates.map(lambda rate: rate or 0.0),
    st.just("why"), st.sampled_from(["", "right", "wrong"]), rates, rates, finite, rates, places, st.booleans(),
    seconds, st.booleans(), seconds,
)  # fmt: skip
joins = st.builds(
    Join, st.sampled_from("abc"), st.sampled_from(["dedicated", "borrowed"]), st.just(MODEL), versions,
    st.sampled_from([1, 4, 1 << 16]), serials, st.sampled_from([1, 100, INT32_MAX]), st.sampled_from(["", "right"]),
    places, st.booleans(),
)  # fmt: skip
faults = st.builds(
    Fault, st.sampled_from(["Unavailable", "QueueFull", "RequestRefused", "nonsense"]), st.just("what"), st.none(),
    st.sampled_from([0.0, 1.0, SECONDS_MAX]),
)  # fmt: skip
ready = st.builds(
    VersionReady, versions, st.none() | faults, st.sampled_from(["", "right", "wrong"]), serials,
    st.dictionaries(st.sampled_from(["commit", "x"]), st.sampled_from([0.0, SECONDS_MAX])),
)  # fmt: skip
lists = st.integers(0, 6).map(lambda count: tuple(range(count)))
pieces = st.builds(
    TurnTokens, st.integers(0, 8), lists | st.just((VOCABULARY,)), st.integers(0, 6).map(lambda count: (-1.0,) * count),
    versions, st.sampled_from([None, "stop", "length", "abort"]), st.none() | counts,
    st.just(()) | st.just((((VOCABULARY, -1.0),),)),
)  # fmt: skip
actions = st.one_of(
    st.tuples(st.just("join"), joins),
    st.tuples(st.just("beat"), st.sampled_from("abc"), beats),
    st.tuples(st.just("tokens"), st.sampled_from("abc"), st.lists(pieces, min_size=1, max_size=3)),
    st.tuples(st.just("refused"), st.sampled_from("abc"), st.integers(0, 8), faults),
    st.tuples(st.just("ready"), st.sampled_from("abc"), ready),
    st.tuples(st.just("ask"), st.integers(0, 5)),
    st.tuples(st.just("publish"), st.sampled_from(["v1", "v2"]), st.sampled_from(["", "right"])),
    st.tuples(st.just("tick"), st.sampled_from([0.0, 0.1, 0.9, 1.5, 40.0])),
)


class Hostile:
    def __init__(self) -> None:
        self.core = GatewayCore(MODEL, GatewaySettings(), NoLedger(3), vocabulary=VOCABULARY)
        self.now_s = 0.0
        self.attempt_ids: list[int] = []

    def hear(self, message: Any) -> None:
        if isinstance(message, Turn):
            self.attempt_ids.append(message.attempt_id)

    def attempt_id(self, number: int) -> int:
        """One that some worker has or had, or one of nothing."""
        return self.attempt_ids[number % len(self.attempt_ids)] if self.attempt_ids and number < 8 else number

    def say(self, name: str, message: Any) -> None:
        member = self.core.pool.get(name)
        if member is None:
            return
        try:
            self.core.receive(member, message, self.now_s)
        except Unavailable:
            self.core.remove_worker(member, self.now_s)  # as the connection's handler does

    def do(self, action: tuple[Any, ...]) -> None:
        match action:
            case ("join", join):
                try:
                    self.core.join(join, self.hear, self.now_s)
                except RequestRefused:
                    return
            case ("tokens", name, said):
                told = [TurnTokens(self.attempt_id(p.attempt_id), *list(astuple(p))[1:]) for p in said]
                self.say(name, TokensAdded(tuple(told)))
            case ("refused", name, number, fault):
                self.say(name, TurnRefused(self.attempt_id(number), fault))
            case ("beat" | "ready", name, message):
                self.say(name, message)
            case ("ask", number):
                prompt_ids = (number, 1, 2)
                self.core.ask(f"s{number}", prompt_ids, Sampling(max_tokens=4), TokenStream(), self.now_s)
            case ("publish", version, hash):
                self.core.publish(NewVersion(version, "folder", hash=hash), self.now_s)
            case ("tick", passed_s):
                self.now_s += passed_s
                self.core.tick(self.now_s)


def astuple(piece: TurnTokens) -> tuple[Any, ...]:
    return tuple(getattr(piece, name) for name in TurnTokens.__struct_fields__)


@given(st.lists(actions, max_size=60))
def test_no_worker_can_stop_the_gateway_or_make_a_turn_that_cannot_be(story: list[tuple[Any, ...]]) -> None:
    world = Hostile()
    for action in story:
        world.do(action)
        for session in world.core.trajectories:
            for turn in session.turns:
                produced = turn.produced
                assert len(produced.token_ids) == len(produced.logprobs) <= 4
                assert all(0 <= token_id < VOCABULARY for token_id in produced.token_ids)
                assert all(math.isfinite(logprob) for logprob in produced.logprobs)
    for name in "abc":
        member = world.core.pool.get(name)
        if member is not None:
            world.core.remove_worker(member, world.now_s)
    world.now_s += 100.0
    world.core.tick(world.now_s)
    honest: list[Turn] = []
    version = world.core.pool.newest_version or "0"
    wanted = world.core.pool.newest
    join = Join("honest", "dedicated", MODEL, version, 64, 100_000, 4096, hash=wanted.hash if wanted else "")
    member = world.core.join(join, lambda said: honest.append(said) if isinstance(said, Turn) else None, world.now_s)
    reader = TokenStream()
    world.core.ask("afterwards", (1, 2, 3), Sampling(max_tokens=2), reader, world.now_s)
    for turn in honest:
        left = turn.request.sampling.max_tokens - len(turn.request.partial.token_ids)
        piece = TurnTokens(turn.attempt_id, (1,) * left, (-1.0,) * left, version, "length")
        world.core.receive(member, TokensAdded((piece,)), world.now_s)
    world.core.ledger.commit()
    assert reader._events and reader._events[-1].finish_reason == "length"
