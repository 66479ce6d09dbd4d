"""One trajectory: its turns, each run once and answered as often as it is asked for.

A turn is identified by its key: the trajectory's id and a hash of what was asked (prompt ids, sampling, ordinal). A
repeated request, whose answer was lost on the way, finds its turn by that hash and gets the same answer, whether the
turn runs or has ended. Another answer to the same prompt needs another seed or another session.

A turn that continues an earlier one begins with that one's prompt and answer, token by token. One that does not is a
*fork*: the trajectory then has more than one branch, and each sampled token carries a loss in one branch only.
Everything that happens here is noted in the ledger, and readers get only what the ledger has.
"""

from __future__ import annotations

import hashlib
import hmac
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from rose.api.trajectories import SECRET_MARK, Reward
from rose.bounds import Count
from rose.core.trajectory import NO_VERSION, Trajectory
from rose.engines.base import FinishReason, Request, Sampling, TokenEvent
from rose.engines.token_stream import TokenSink
from rose.errors import QueueFull, RoseError, Unavailable
from rose.gateway.ledger import NO_LEDGER, NoLedger
from rose.gateway.turn_state import PartialOutput

if TYPE_CHECKING:
    from rose.gateway.trajectory_table import Group


RETRY_AFTER_S = 5.0
MIB = 1 << 20


class MemoryLimit:
    """A bound on the memory that agents can make the gateway keep, over all trajectories and of one trajectory.

    Sizes are estimates from requests and tokens. They count until the trainer has confirmed the batch, so a trainer
    that takes no batches slows agents down instead of filling the memory.
    """

    def __init__(self, most_bytes: int = 1 << 62, session_most_bytes: int = 1 << 62) -> None:
        self.used_bytes = 0
        self._most, self._session_most = most_bytes, session_most_bytes

    def check(self, session_bytes: int, more_bytes: int) -> None:
        """Raise QueueFull if a session of this size may not keep so much more."""
        if self.used_bytes + more_bytes > self._most:
            what = f"the gateway keeps {self.used_bytes // MIB} MiB of turns, and the most is {self._most // MIB} MiB"
            hint = "finish trajectories and take batches, or raise max_kept_mb"
            raise QueueFull(what, hint=hint, retry_after_s=RETRY_AFTER_S)
        if session_bytes + more_bytes > self._session_most:
            what = f"this trajectory holds {session_bytes // MIB} MiB, and the most is {self._session_most // MIB} MiB"
            hint = "finish it and begin another one, or raise max_session_mb"
            raise QueueFull(what, hint=hint, retry_after_s=RETRY_AFTER_S)

    def take(self, size_bytes: int) -> None:
        """Count bytes; a negative number gives them back."""
        self.used_bytes += size_bytes


DIGEST_BYTES = 12
SEED_BYTES = 8
SEED_MASK = 2**63 - 1
TOKEN_BYTES = 40  # about, of one token of a prompt in memory
ENTRY_BYTES = 160  # about, of one token among the log-probabilities of a prompt

Message = dict[str, Any]
PromptHash = hashlib.blake2b
_encoder = msgspec.msgpack.Encoder()
_NEW_FIELDS = ("prompt_logprobs", "weight_version", "min_weight_version")  # not part of older ledgers' digests
_sampling_fields = attrgetter(*(name for name in Sampling.__struct_fields__ if name not in ("seed", *_NEW_FIELDS)))
_new_fields = attrgetter(*_NEW_FIELDS)
_NOT_SET = _new_fields(Sampling())


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
        self.produced = PartialOutput()
        self.finish_reason: FinishReason | None = None
        self.is_running = False
        self.is_noted = False  # the ledger has it as one that is under way
        self.is_stopped = False  # the ledger has it as one that was given up, with the tokens it had
        self.run_id = ""  # the request id of its newest try
        self.messages: Sequence[Message] | None = None  # of a chat turn
        self.readers: dict[str, TokenSink] = {}  # by request id, of clients that want every token as it comes
        self.waiters: dict[str, TokenSink] = {}  # of clients that want the whole answer at the end
        self.tries = 0
        self.prompt_hash: PromptHash | None = None  # makes the digest of a turn that continues this one cheap
        self._reply_text: str | None = None
        self._ledger = session.ledger if session is not None else NO_LEDGER

    @property
    def sequence_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.produced)

    @property
    def is_kept(self) -> bool:
        """False once its session has dropped it, which may happen between a request for it and now."""
        return self.session is None or self.session.by_digest.get(self.digest) is self

    @property
    def reply_text(self) -> str | None:
        """The text that the client of a chat turn got."""
        return self._reply_text

    @reply_text.setter
    def reply_text(self, text: str | None) -> None:
        if text != self._reply_text:
            self._reply_text = text
            self._ledger.set_reply(self)

    def hold_messages(self, messages: Sequence[Message], size_bytes: int) -> None:
        """Keep the conversation of a chat turn; `size_bytes` is the size of the request."""
        if self.messages is None and self.session is not None:
            self.size_bytes += size_bytes
            self.session.grow(size_bytes)
        self.messages = messages

    def restore_messages(self, messages: Sequence[Message], reply_text: str | None) -> None:
        """Set the conversation as the ledger has it."""
        self.messages, self._reply_text = messages, reply_text

    def is_prefix_of(self, prompt_ids: tuple[int, ...]) -> bool:
        start, end = len(self.prompt_ids), self.sequence_tokens
        return (
            self.finish_reason is not None
            and len(prompt_ids) >= end
            and prompt_ids[:start] == self.prompt_ids
            and prompt_ids[start:end] == tuple(self.produced.token_ids)
        )

    def start(self, request: Request) -> None:
        """Note that the scheduler runs the turn by this request."""
        if not self.is_noted:
            self._ledger.start_turn(self, request)
            self.is_noted, self.is_stopped = True, False
        self.is_running, self.run_id = True, request.request_id

    def give_up(self) -> None:
        """Stop the turn. What it has produced stays; without a token it is as if it had never been asked for."""
        self.is_running = False
        if self.is_noted and self.finish_reason is None:
            self._ledger.stop_turn(self)
            self.is_noted, self.is_stopped = False, bool(self.produced)
        if self.session is not None and not self.produced and self.finish_reason is None:
            self.session.remove(self)

    def put(self, event: TokenEvent) -> None:
        """Note the event, and send it to the readers once it is durable."""
        self._ledger.add_tokens(self, event)
        if event.finish_reason is None and not self.readers:
            return
        deliveries = [
            (sink, [event if event.request_id == name else msgspec.structs.replace(event, request_id=name)])
            for name, sink in self.readers.items()
        ]
        if event.finish_reason is not None:
            self.finish_reason, self.is_running = event.finish_reason, False
            for name, sink in self.waiters.items():
                deliveries.append((sink, self.produced.events(name, event.version, event.finish_reason)))
            self.readers, self.waiters = {}, {}
        if deliveries:
            self._deliver(deliveries)

    def fail(self, error: RoseError) -> None:
        """Stop the turn and fail its readers. What was produced stays: a repeated request continues from there."""
        self.give_up()
        sinks = [*self.readers.values(), *self.waiters.values()]
        self.readers, self.waiters = {}, {}

        def fail_all(trouble: Unavailable | None) -> None:
            for sink in sinks:
                sink.fail(error)

        if sinks:
            self._ledger.when_durable(fail_all)

    def replay(self, request_id: str, sink: TokenSink, version: str) -> None:
        """Send everything so far to one reader."""
        self._deliver([(sink, self.produced.events(request_id, version, self.finish_reason))])

    def cut(self, tokens: int) -> None:
        """End the turn after so many tokens: its text met a stop string, which the engine knows nothing of."""
        self.is_running = False
        self.produced.cut(tokens)
        self.finish_reason = "stop"
        self._ledger.cut_turn(self)

    def forget(self, request_id: str) -> None:
        """Remove a reader that has left."""
        self.readers.pop(request_id, None)
        self.waiters.pop(request_id, None)

    def _deliver(self, deliveries: Sequence[tuple[TokenSink, Sequence[TokenEvent]]]) -> None:
        def deliver(trouble: Unavailable | None) -> None:
            for sink, events in deliveries:
                if trouble is not None:
                    sink.fail(trouble)
                    continue
                for event in events:
                    sink.put(event)

        self._ledger.when_durable(deliver)


@dataclass(slots=True, eq=False)
class Session:
    """One trajectory. Without a group it is the session of a client that trains elsewhere, or not at all."""

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
    room: MemoryLimit = field(default_factory=MemoryLimit)
    size_bytes: int = 0

    @property
    def key(self) -> str:
        """The name under which the gateway keeps it."""
        return session_key(self.trajectory_id, is_begun=self.secret is not None)

    @property
    def name(self) -> str:
        """The name by which requests address it."""
        return self.trajectory_id if self.secret is None else f"{self.trajectory_id}{SECRET_MARK}{self.secret}"

    @property
    def group_id(self) -> str | None:
        return self.group.name if self.group is not None else None

    def close(self, finish: Finish) -> None:
        turn_count, forks = len(self.turns), max(0, len(leaves(self.turns)) - 1)
        self.ledger.finish_session(self, finish, turn_count, forks)
        self.finish, self.turn_count, self.forks = finish, turn_count, forks

    def clear(self) -> None:
        """Forget all turns."""
        self.turns, self.by_digest = [], {}
        self.grow(-self.size_bytes)

    def turn_of(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int | None, stops: Sequence[str] = ()
    ) -> tuple[KeptTurn, int]:
        """Return the turn that a request asks for, new or known, and the seed of its sampling. Raises QueueFull."""
        parent = next((turn for turn in reversed(self.turns) if turn.is_prefix_of(prompt_ids)), None)
        prompt_hash = hash_prompt(prompt_ids, parent)
        asked = digest(prompt_hash, sampling, seed, stops)
        turn = self.by_digest.get(asked)
        if turn is None:
            ordinal = self.turns[-1].ordinal + 1 if self.turns else 0
            scores_bytes = ENTRY_BYTES * len(prompt_ids) * (1 + (sampling.prompt_logprobs or 0))
            scores_bytes *= sampling.prompt_logprobs is not None
            self.room.check(self.size_bytes, TOKEN_BYTES * len(prompt_ids) + scores_bytes)
            turn = self.add(ordinal, asked, prompt_ids, parent)
            turn.prompt_hash = prompt_hash
            turn.size_bytes += scores_bytes
            self.grow(scores_bytes)
        return turn, seed_from(f"{self.seed}/{turn.ordinal}") if seed is None else seed & SEED_MASK

    def add(self, ordinal: int, asked: str, prompt_ids: tuple[int, ...], parent: KeptTurn | None) -> KeptTurn:
        """Add a turn; `asked` is the digest of its request."""
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


class Finish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of a trajectory. A lost one counts for its group's completeness and is not handed out."""

    reward: Reward = 0.0
    is_success: bool = False
    invalid_turns: Count = 0
    is_lost: bool = False


def hash_prompt(prompt_ids: tuple[int, ...], parent: KeptTurn | None) -> PromptHash:
    """Return the hash of a prompt, computed from where the prompt of its parent ends."""
    if parent is None or parent.prompt_hash is None:
        return hashlib.blake2b(array("q", prompt_ids), digest_size=DIGEST_BYTES)
    prompt_hash = parent.prompt_hash.copy()
    prompt_hash.update(array("q", prompt_ids[len(parent.prompt_ids) :]))
    return prompt_hash


def digest(prompt_hash: PromptHash, sampling: Sampling, seed: int | None, stops: Sequence[str]) -> str:
    """Return the hash of what was asked; `seed` as the caller gave it."""
    request_hash = prompt_hash.copy()
    request_hash.update(_encoder.encode((_sampling_fields(sampling), seed, tuple(stops))))
    if _new_fields(sampling) != _NOT_SET:
        request_hash.update(_encoder.encode(_new_fields(sampling)))
    return request_hash.hexdigest()


def session_key(trajectory_id: str, *, is_begun: bool) -> str:
    """Return the key of a session. Those that were not begun have a key of their own and cannot replace others."""
    return trajectory_id if is_begun else f"\0{trajectory_id}"


def is_secret_of(session: Session, secret: str) -> bool:
    given = secret.encode(errors="surrogateescape")
    return session.secret is not None and hmac.compare_digest(session.secret.encode(), given)


def seed_from(text: str) -> int:
    """Return the seed of a trajectory from its id, or of a turn from the trajectory's seed and its ordinal."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=SEED_BYTES).digest(), "little") & SEED_MASK


def leaves(turns: Sequence[KeptTurn]) -> list[KeptTurn]:
    """Return the turns that have ended and that no ended turn continues."""
    ended = [turn for turn in turns if turn.finish_reason is not None]
    parents = {turn.parent for turn in ended}
    return [turn for turn in ended if turn not in parents]


def branches(session: Session, group_id: str) -> list[Trajectory]:
    """Return what is learnt from a finished session: each line of turns, from a first prompt to a leaf."""
    counted: set[KeptTurn] = set()
    trajectories = []
    for number, leaf in enumerate(leaves(session.turns)):
        line = [leaf]
        while line[-1].parent is not None:
            line.append(line[-1].parent)
        name = session.trajectory_id if number == 0 else f"{session.trajectory_id}~{number}"
        trajectories.append(_branch(session, name, group_id, line[::-1], counted))
        counted.update(line)
    return trajectories


def _branch(session: Session, name: str, group_id: str, line: Sequence[KeptTurn], counted: set[KeptTurn]) -> Trajectory:
    """Join a line of turns into one line of tokens. Turns in `counted` carry their loss in another branch."""
    finish = session.finish
    assert finish is not None
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[str] = []
    for turn in line:
        context = turn.prompt_ids[len(ids) :]
        produced = turn.produced
        ids += [*context, *produced.token_ids]
        mask += [False] * len(context) + [turn not in counted] * len(produced)
        logprobs += [0.0] * len(context) + produced.logprobs
        versions += [NO_VERSION] * len(context)
        for span in produced.spans:
            versions += [span.version] * (span.end - span.start)
    return Trajectory(
        name,
        group_id,
        tuple(ids),
        tuple(mask),
        tuple(logprobs),
        tuple(versions),
        finish.reward,
        finish.is_success,
        len(line),
        finish.invalid_turns,
    )
