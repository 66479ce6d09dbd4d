"""The turns of one trajectory, each run once and answered as often as it is asked for.

A turn is known by its key: the trajectory's id and a hash of what was asked (prompt ids, sampling, ordinal). A request
that comes again, because its answer was lost on the way, finds its turn by that hash and gets the same answer, running
or done. Another answer to the same prompt needs another seed or another session.

A turn that goes on from an earlier one begins with that one's prompt and answer, token by token. One that does not is a
*fork*: the trajectory then has more than one branch (`rose.rollout.branches`).

Everything that happens here is told to the ledger, and readers are told only what the ledger has.
"""

from __future__ import annotations

import hashlib
import hmac
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from rose.bounds import Count
from rose.coserve.mailbox import Mailbox
from rose.engines.base import FinishReason, Request, Sampling, TokenEvent
from rose.errors import RoseError, Unavailable
from rose.rollout.branches import leaves
from rose.rollout.ledger import NO_LEDGER, NoLedger
from rose.rollout.produced import Produced
from rose.rollout.room import Room

if TYPE_CHECKING:
    from rose.rollout.trajectories import Group

REWARD_MAX = 1e9  # sums and squares over a group stay finite, also in fp32
Reward = Annotated[float, Meta(ge=-REWARD_MAX, le=REWARD_MAX)]
DIGEST_BYTES = 12
SEED_BYTES = 8
SEED_MASK = 2**63 - 1
TOKEN_BYTES = 40  # about, of one token of a prompt in memory
SECRET_MARK = "."  # between the id of a trajectory and its secret

Message = dict[str, Any]
PromptHash = hashlib.blake2b
_encoder = msgspec.msgpack.Encoder()


class KeptTurn:
    """One turn of a trajectory, and the clients that read it now. A `Sink` of the scheduler."""

    def __init__(
        self,
        key: str,
        ordinal: int,
        prompt_ids: tuple[int, ...],
        parent: KeptTurn | None,
        *,
        digest: str = "",
        session: Session | None = None,
    ) -> None:
        self.key = key
        self.ordinal = ordinal
        self.prompt_ids = prompt_ids
        self.parent = parent
        self.digest = digest
        self.session = session
        self.session_number = session.number if session is not None else 0
        self.group_id = session.group_id if session is not None else None
        self.size_bytes = TOKEN_BYTES * len(prompt_ids)
        self.produced = Produced()
        self.finish_reason: FinishReason | None = None
        self.is_running = False
        self.is_noted = False  # the ledger has it as one that is under way
        self.is_stopped = False  # the ledger has it as one that was given up, with the tokens it had
        self.run_id = ""  # by which the scheduler knows its newest try
        self.messages: Sequence[Message] | None = None  # of a chat turn
        self.readers: dict[str, Mailbox] = {}  # by request id, those who want every token as it comes
        self.waiters: dict[str, Mailbox] = {}  # those who want the whole answer when it is there
        self.tries = 0
        self.prompt_hash: PromptHash | None = None  # so that the digest of a turn that goes on from it costs little
        self._reply_text: str | None = None
        self._ledger = session.ledger if session is not None else NO_LEDGER

    @property
    def sequence_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.produced)

    @property
    def is_kept(self) -> bool:
        """Its session still knows it: it was not given up between a request for it and now."""
        return self.session is None or self.session.by_digest.get(self.digest) is self

    @property
    def reply_text(self) -> str | None:
        """What the client was told, of a chat turn."""
        return self._reply_text

    @reply_text.setter
    def reply_text(self, text: str | None) -> None:
        if text != self._reply_text:
            self._reply_text = text
            self._ledger.replied(self)

    def hold_messages(self, messages: Sequence[Message], size_bytes: int) -> None:
        """Keep the conversation of a chat turn; `size_bytes` is what was sent."""
        if self.messages is None and self.session is not None:
            self.size_bytes += size_bytes
            self.session.grow(size_bytes)
        self.messages = messages

    def restore_words(self, messages: Sequence[Message], reply_text: str | None) -> None:
        """As the ledger has them."""
        self.messages, self._reply_text = messages, reply_text

    def is_prefix_of(self, prompt_ids: tuple[int, ...]) -> bool:
        start = len(self.prompt_ids)
        end = start + len(self.produced)
        return (
            self.finish_reason is not None
            and len(prompt_ids) >= end
            and prompt_ids[:start] == self.prompt_ids
            and prompt_ids[start:end] == tuple(self.produced.token_ids)
        )

    def runs(self, request: Request) -> None:
        """It is given to the scheduler, in the words of this request."""
        if not self.is_noted:
            self._ledger.turn(self, request)
            self.is_noted, self.is_stopped = True, False
        self.is_running, self.run_id = True, request.request_id

    def give_up(self) -> None:
        """It does not run any more. What it has produced stays; without a token it is as if it had never been asked."""
        self.is_running = False
        if self.is_noted and self.finish_reason is None:
            self._ledger.stopped(self)
            self.is_noted, self.is_stopped = False, bool(self.produced)
        if self.session is not None and not self.produced and self.finish_reason is None:
            self.session.remove(self)

    def put(self, event: TokenEvent) -> None:
        self._ledger.produced(self, event)
        if event.finish_reason is None and not self.readers:
            return
        told = [
            (mailbox, [event if event.request_id == name else msgspec.structs.replace(event, request_id=name)])
            for name, mailbox in self.readers.items()
        ]
        if event.finish_reason is not None:
            self.finish_reason, self.is_running = event.finish_reason, False
            told += [(mailbox, self._so_far(name, event.version)) for name, mailbox in self.waiters.items()]
            self.readers, self.waiters = {}, {}
        if told:
            self._ledger.then(partial(_deliver, told))

    def fail(self, error: RoseError) -> None:
        """What was produced stays: the same request again goes on from there."""
        self.give_up()
        mailboxes = [*self.readers.values(), *self.waiters.values()]
        self.readers, self.waiters = {}, {}
        if mailboxes:
            self._ledger.then(partial(_fail, mailboxes, error))

    def replay(self, request_id: str, mailbox: Mailbox, version: str) -> None:
        """Everything so far, for one reader."""
        self._ledger.then(partial(_deliver, [(mailbox, self._so_far(request_id, version))]))

    def cut(self, tokens: int) -> None:
        """It ends here: its text met a stop string, which the engine knows nothing of."""
        self.is_running = False
        self.produced.cut(tokens)
        self.finish_reason = "stop"
        self._ledger.cut(self, tokens)

    def forget(self, request_id: str) -> None:
        self.readers.pop(request_id, None)
        self.waiters.pop(request_id, None)

    def _so_far(self, request_id: str, version: str) -> list[TokenEvent]:
        return self.produced.events(request_id, version, self.finish_reason)


@dataclass(slots=True, eq=False)
class Session:
    """One trajectory. Without a group it is a session of a client that trains elsewhere, or not at all."""

    trajectory_id: str
    seed: int
    touched_s: float
    group: Group | None = None
    task: str = ""
    number: int = 0
    ledger: NoLedger = NO_LEDGER
    turns: list[KeptTurn] = field(default_factory=list)
    by_digest: dict[str, KeptTurn] = field(default_factory=dict)
    finish: Finish | None = None
    turn_count: int = 0  # this and the next are known when it has finished
    forks: int = 0
    secret: str | None = None  # of one that was begun: an agent that shows it may act on the trajectory
    room: Room = field(default_factory=Room)
    size_bytes: int = 0

    @property
    def key(self) -> str:
        """By which it is kept."""
        return session_key(self.trajectory_id, is_begun=self.secret is not None)

    @property
    def name(self) -> str:
        """By which requests name it."""
        return self.trajectory_id if self.secret is None else f"{self.trajectory_id}{SECRET_MARK}{self.secret}"

    @property
    def group_id(self) -> str | None:
        return self.group.name if self.group is not None else None

    def close(self, finish: Finish) -> None:
        turn_count, forks = len(self.turns), max(0, len(leaves(self.turns)) - 1)
        self.ledger.finished(self, finish, turn_count, forks)
        self.finish, self.turn_count, self.forks = finish, turn_count, forks

    def clear(self) -> None:
        """Forget all turns, whose content is needed no more."""
        self.turns, self.by_digest = [], {}
        self.room.give(self.size_bytes)
        self.size_bytes = 0

    def turn_of(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int | None, stops: Sequence[str] = ()
    ) -> tuple[KeptTurn, int]:
        """The turn that this request asks for, new or known, and the seed of its dice. Raises QueueFull."""
        parent = next((turn for turn in reversed(self.turns) if turn.is_prefix_of(prompt_ids)), None)
        prompt_hash = hash_prompt(prompt_ids, parent)
        asked = digest(prompt_hash, sampling, seed, stops)
        turn = self.by_digest.get(asked)
        if turn is None:
            ordinal = self.turns[-1].ordinal + 1 if self.turns else 0
            self.room.check(self.size_bytes, TOKEN_BYTES * len(prompt_ids))
            turn = self.add(ordinal, asked, prompt_ids, parent)
            turn.prompt_hash = prompt_hash
        return turn, self._seed_of(turn.ordinal) if seed is None else seed & SEED_MASK

    def add(self, ordinal: int, asked: str, prompt_ids: tuple[int, ...], parent: KeptTurn | None) -> KeptTurn:
        key = f"{self.trajectory_id}/{ordinal}-{asked}"
        turn = KeptTurn(key, ordinal, prompt_ids, parent, digest=asked, session=self)
        self.by_digest[asked] = turn
        self.turns.append(turn)
        self.grow(turn.size_bytes)
        return turn

    def remove(self, turn: KeptTurn) -> None:
        """Forget a turn that has produced nothing."""
        if self.by_digest.get(turn.digest) is turn:
            del self.by_digest[turn.digest]
            self.turns.remove(turn)
            self.grow(-turn.size_bytes)

    def grow(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self.room.take(size_bytes)

    def _seed_of(self, ordinal: int) -> int:
        text = f"{self.seed}/{ordinal}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=SEED_BYTES).digest(), "little") & SEED_MASK


class Finish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a trajectory ended. One that is lost counts for its group's completeness and is not handed out."""

    reward: Reward = 0.0
    is_success: bool = False
    invalid_turns: Count = 0
    is_lost: bool = False


def hash_prompt(prompt_ids: tuple[int, ...], parent: KeptTurn | None) -> PromptHash:
    """Return the hash of a prompt, computed from where the prompt of its parent ends."""
    if parent is None or parent.prompt_hash is None:
        return hashlib.blake2b(array("q", prompt_ids), digest_size=DIGEST_BYTES)
    found = parent.prompt_hash.copy()
    found.update(array("q", prompt_ids[len(parent.prompt_ids) :]))
    return found


def digest(prompt_hash: PromptHash, sampling: Sampling, seed: int | None, stops: Sequence[str]) -> str:
    """Return the hash of what was asked; `seed` as the caller gave it."""
    found = prompt_hash.copy()
    found.update(_encoder.encode((_asked(sampling), seed, tuple(stops))))
    return found.hexdigest()


_asked = attrgetter(*(name for name in Sampling.__struct_fields__ if name != "seed"))


def _deliver(told: Sequence[tuple[Mailbox, Sequence[TokenEvent]]], trouble: Unavailable | None) -> None:
    for mailbox, events in told:
        if trouble is not None:
            mailbox.fail(trouble)
            continue
        for event in events:
            mailbox.put(event)


def _fail(mailboxes: Sequence[Mailbox], error: RoseError, trouble: Unavailable | None) -> None:
    for mailbox in mailboxes:
        mailbox.fail(error)


def session_key(trajectory_id: str, *, is_begun: bool) -> str:
    """Sessions that were not begun have names of their own, so that none can take the place of one that is."""
    return trajectory_id if is_begun else f"\0{trajectory_id}"


def is_secret_of(session: Session, secret: str) -> bool:
    given = secret.encode(errors="surrogateescape")
    return session.secret is not None and hmac.compare_digest(session.secret.encode(), given)


def seed_from(trajectory_id: str) -> int:
    found = hashlib.blake2b(trajectory_id.encode(), digest_size=SEED_BYTES).digest()
    return int.from_bytes(found, "little") & SEED_MASK
