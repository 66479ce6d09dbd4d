"""Records of a run: the lines of `metrics.jsonl` and `serving.jsonl`, and the figures of `summary.json`.

The loop, the summary, the report, the cost and `rose runs` all read and write these types. A run of an earlier version
may lack the fields that have a default. A field that is UNSET is not written at all: some belong to asynchronous steps
only, some to steps that published weights. Numbers that are not finite are written as null; every other number can be
read again, however large it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from rose.bounds import UNREADABLE, Count, Finite, Integer, Label, Seconds, Serial, Share, Text
from rose.cost.bill import Cost
from rose.run.rotating import before
from rose.run.serving_traffic import UserRequest

Number = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]  # a loss may grow beyond `Finite`
Words = Annotated[str, Meta(max_length=1 << 20)]  # reasons and errors; some quote what an environment printed
Counts = Annotated[dict[Label, Serial], Meta(max_length=1 << 16)]
RoleSeconds = Annotated[dict[Label, Number], Meta(max_length=1 << 16)]
Reasons = Annotated[dict[Words, Count], Meta(max_length=1 << 16)]
Labels = Annotated[tuple[Label, ...], Meta(max_length=1 << 16)]
Notes = Annotated[list[Words], Meta(max_length=1 << 16)]
Names = Annotated[dict[Label, Label], Meta(max_length=1 << 16)]


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """One line of metrics.jsonl."""


R = TypeVar("R", bound=RunRecord)


class InStep(msgspec.Struct, frozen=True):
    """Trajectories that ended within an asynchronous step."""

    trajectories: Count = 0
    successes: Count = 0
    turns: Count = 0
    generated_tokens: Serial = 0


class GroupCounts(msgspec.Struct, frozen=True):
    """What became of the groups of a step (core.groups.StepGroups)."""

    drawn: Count = 0
    kept: Count = 0
    alike: Count = 0
    lost: Count = 0
    surplus: Count = 0
    trajectories: Count = 0
    repeated: Count = 0
    stale: Count = 0


class StepRecord(RunRecord, tag="step", frozen=True, kw_only=True):
    """One step: its times, what was played, what was learnt, and what was published."""

    step: Count
    is_borrowed: bool
    began_s: Number
    rollout_s: Seconds
    train_s: Seconds = 0.0
    publish_s: Seconds
    step_s: Seconds
    version: Label = ""
    trajectories: Count
    successes: Count
    turns: Count
    generated_tokens: Serial
    turns_by_pool: Counts
    cpu_s: RoleSeconds
    verdict: Label
    groups_kept: Count | None = None
    groups_total: Count | None = None
    pool_tokens: Serial | None = None
    reward_mean: Number | None = None
    invalid_turns: Count | None = None
    episodes_failed: Count | None = None
    failures: Reasons | None = None
    groups: GroupCounts | None = None
    trained_trajectories: Count | None = None
    trajectories_refused: Count | None = None
    trajectories_overlong: Count | None = None
    trained_tokens: Serial | None = None
    computed_tokens: Serial | None = None
    loss: Number | None = None
    gradient_norm: Number | None = None
    learning_rate: Number | None = None
    entropy: Number | None = None
    importance_mean: Number | None = None
    truncated_share: Number | None = None
    left_out_share: Number | None = None
    clipped_share: Number | None = None
    drifted_share: Number | None = None
    logprob_gap_mean: Number | None = None
    logprob_gap_max: Number | None = None
    rollout_kl: Number | None = None
    reference_kl: Number | None = None
    staleness_mean: Number | None = None
    staleness_max: Integer | None = None
    tokens_by_version: Counts | None = None
    weights_hash: Label | UnsetType = UNSET  # these only of a step that published
    weights_kind: Label | UnsetType = UNSET
    weights_bytes: Serial | UnsetType | None = UNSET
    weights_ratio: Number | UnsetType | None = UNSET
    weights_s: RoleSeconds | UnsetType = UNSET
    weights_lag: Integer | UnsetType = UNSET
    weight_sync_s: Seconds | UnsetType | None = UNSET
    pause_s: Seconds | UnsetType | None = UNSET
    wait_s: Seconds | UnsetType = UNSET  # these only of an asynchronous run
    train_began_s: Number | UnsetType = UNSET
    turns_while_learning: Integer | UnsetType = UNSET
    in_step: InStep | UnsetType = UNSET

    @property
    def tokens_played(self) -> int:
        """The tokens that a step's time is compared with: those of judged trajectories, or in an asynchronous run
        those that the pool generated."""
        return self.generated_tokens if self.in_step is UNSET else self.pool_tokens or 0


class BalanceRecord(RunRecord, tag="balance", frozen=True, kw_only=True):
    """The ledger of trajectories after a step (trajectory_ledger.Balance)."""

    step: Count | None = None
    begun: Serial | None = None
    returned: Serial | None = None
    written_off: Serial | None = None
    open: Serial | None = None
    lost: Serial | None = None
    doubled: Serial | None = None
    unknown: Serial | None = None
    differing: Serial | None = None


class EvaluationRecord(RunRecord, tag="evaluation", frozen=True, kw_only=True):
    """Held-out games after a step."""

    step: Count
    success_rate: Share
    began_s: Number = 0.0
    took_s: Seconds = 0.0
    episodes_failed: Count | None = None
    failures: Reasons | None = None


class CostsRecord(RunRecord, tag="costs", frozen=True, kw_only=True):
    """Processor time by role and turns so far, at a moment between steps: begin, pause, resume or end."""

    when: Label
    turns: Serial
    roles: RoleSeconds
    at_s: Number = 0.0


class LendingRecord(RunRecord, tag="lending", frozen=True, kw_only=True):
    """Breaches of the lent device so far, by kind."""

    breaches: Counts
    step: Count | None = None

    @property
    def late_requests(self) -> int:
        """Requests of users that lending made late; one that cannot be decided counts."""
        return sum(self.breaches.get(kind, 0) for kind in ("ttft", "tpot", "ambiguous"))


class LentRecord(RunRecord, tag="lent", frozen=True, kw_only=True):
    """What a device has lent so far, by its own count: steps, tokens, milliseconds, evicted_tokens."""

    lender: Label
    counts: Counts
    step: Count | None = None


class SyncRecord(RunRecord, tag="sync", frozen=True, kw_only=True):
    """How long workers took to run the version of an asynchronous step."""

    step: Count
    took_s: Seconds
    version: Label = ""
    behind: Labels = ()
    pause_s: Seconds | None = None


class WeightsRecord(RunRecord, tag="weights", frozen=True, kw_only=True):
    """The trainer's weights at the end, and those that every worker runs."""

    hash: Label = ""
    version: Label = ""
    workers: Names = {}


class BehindRecord(RunRecord, tag="behind", frozen=True, kw_only=True):
    """A worker that did not take a version in time."""

    worker: Label
    version: Label = ""
    why: Words
    at_s: Number = 0.0


class UnmetRecord(RunRecord, tag="unmet", frozen=True, kw_only=True):
    """A staleness bound that rollouts are too slow for (core.staleness.Unmet)."""

    groups: Count
    versions: Integer
    max_staleness: Count
    speed_needed: Number
    tokens_per_s: Number | None = None
    at_s: Number = 0.0


class AllocationRecord(RunRecord, tag="allocation", frozen=True, kw_only=True):
    """The newest news of one cycle of borrowing a device and giving it back (core.allocation.Cycle)."""

    number: Serial
    name: Label
    wanted_s: Number
    chosen_s: Number
    why: Words = ""
    activated_s: Number | None = None
    synced_s: Number | None = None
    usable_s: Number | None = None
    returned_s: Number | None = None
    released_s: Number | None = None
    why_returned: Words = ""


class AskedRecord(RunRecord, tag="asked", frozen=True, kw_only=True):
    """A request of the run that a device lends or holds back, and when the device had done so."""

    at_s: Number
    is_lent: bool
    answered_s: Number | None = None


class SampleRecord(RunRecord, tag="sample", frozen=True, kw_only=True):
    """Turns ended so far and turns under way by pool, about once a second."""

    at_s: Number
    turns: Counts
    running: Counts = {}
    version: Label | None = None


class ClosedRecord(RunRecord, tag="closed", frozen=True, kw_only=True):
    """A worker that takes no turns for a while."""

    worker: Label
    why: Words
    at_s: Number = 0.0


class RestRecord(RunRecord, tag="rest", frozen=True, kw_only=True):
    """The borrowed device ended no turns any more, and was held back."""

    why: Words
    at_s: Number = 0.0


class DeathRecord(RunRecord, tag="death", frozen=True, kw_only=True):
    """A process of the run that died."""

    at_s: Number
    role: Label
    code: Integer | None = None
    is_restarted: bool


class ResumeRecord(RunRecord, tag="resume", frozen=True, kw_only=True):
    """The run goes on behind this step, after it was killed."""

    step: Count
    at_s: Number = 0.0
    version: Count | None = None
    next_group: Serial | None = None
    checkpoint: Text | None = None


class OriginRecord(RunRecord, tag="origin", frozen=True, kw_only=True):
    """Where a run comes from, so that its report can be judged: version, command, machine and day. One per start."""

    version: Label = ""
    command: Words = ""
    machine: Words = ""
    began_utc: Label = ""


class EndedRecord(RunRecord, tag="ended", frozen=True, kw_only=True):
    """How a run ended early: interrupted or failed."""

    how: Label = ""
    why: Words = ""
    at_s: Number = 0.0


class FinishedRecord(RunRecord, tag="finished", frozen=True, kw_only=True):
    """The run has had all its steps."""

    step: Count


KINDS = {kind.__struct_config__.tag: kind for kind in RunRecord.__subclasses__()}
_decoders = {tag: msgspec.json.Decoder(kind) for tag, kind in KINDS.items()}


class _Tagged(msgspec.Struct):
    """The kind of a line, before it is known whether this version has records of that kind."""

    kind: Label


_tagged_decoder = msgspec.json.Decoder(_Tagged)
_served_decoder = msgspec.json.Decoder(UserRequest)


def of_kind(records: Sequence[RunRecord], kind: type[R]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]


def read_records(path: Path, *, is_lenient: bool = False) -> list[RunRecord]:
    """Return the records of a file and of its older part; a torn line or an unknown kind is left out.

    Raises msgspec.ValidationError for a line that is no record, unless such lines are left out too.
    """
    return list(records_in(_bytes_of(path), is_lenient=is_lenient))


def records_in(data: bytes, *, is_lenient: bool) -> Iterator[RunRecord]:
    """Yield the records of some lines, as `read_records` does."""
    for line in data.split(b"\n"):
        try:
            decoder = _decoders.get(_tagged_decoder.decode(line).kind)
            record = decoder.decode(line) if decoder is not None else None
        except msgspec.ValidationError:
            if not is_lenient:
                raise
        except UNREADABLE:
            continue
        else:
            if record is not None:
                yield record


def read_served(path: Path) -> list[UserRequest]:
    """Return the requests of users; a torn line is left out. Raises msgspec.ValidationError for any other line."""
    requests = []
    for line in _bytes_of(path).split(b"\n"):
        try:
            requests.append(_served_decoder.decode(line))
        except msgspec.ValidationError:
            raise
        except UNREADABLE:
            continue
    return requests


def _bytes_of(path: Path) -> bytes:
    older = before(path)
    return (older.read_bytes() if older.exists() else b"") + path.read_bytes()


def fields_of(record: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that are set, by name."""
    return {key: value for key, value in msgspec.structs.asdict(record).items() if value is not UNSET}


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a whole run; None for what was not measured, or what an earlier version did not know."""

    name: Text = ""
    steps: Count = 0
    success_before: Share | None = None
    success_after: Share | None = None
    trajectories: Serial = 0
    turns: Serial = 0
    generated_tokens: Serial = 0
    tokens_per_turn: Finite | None = None
    invalid_share: Finite | None = None
    step_s: Seconds | None = None
    rollout_share: Finite | None = None
    trajectories_per_s: Finite | None = None
    turns_by_pool: Counts = {}
    serving_requests: Count | None = None
    serving_requests_lent: Count | None = None
    serving_requests_alone: Count | None = None  # while nothing was lent
    serving_attainment: Share | None = None
    serving_attainment_alone: Share | None = None
    serving_ttft_p99_ms: Finite | None = None
    serving_tpot_p99_ms: Finite | None = None
    resumes: Count = 0
    restarts: Count = 0
    begun: Serial | None = None
    returned: Serial | None = None
    written_off: Serial | None = None
    lost: Serial | None = None
    doubled: Serial | None = None
    differing: Serial | None = None
    idle_share: Finite | None = None
    weight_sync_s: Seconds | None = None
    pause_s: Seconds | None = None
    allocation_overhead_share: Finite | None = None
    borrow_cycles: Count = 0
    logprob_gap_mean: Finite | None = None
    staleness_max: Integer | None = None
    cpu_s_by_role: RoleSeconds | None = None
    control_cpu_ms_per_turn: Finite | None = None
    rollout_speedup: Finite | None = None
    rollout_speedup_low: Finite | None = None
    rollout_speedup_high: Finite | None = None
    throughput_ratio: Finite | None = None
    throughput_ratio_low: Finite | None = None
    throughput_ratio_high: Finite | None = None
    cost_per_correct: Finite | None = None
    cost_per_correct_fixed: Finite | None = None
    cost: Cost | None = None
    notes: Notes | None = None

    @property
    def borrowed_share(self) -> float | None:
        """The share of turns that the borrowed device played."""
        turns = sum(self.turns_by_pool.values())
        return self.turns_by_pool.get("borrowed", 0) / turns if turns else None


def summary_text(summary: Summary) -> str:
    return msgspec.json.format(msgspec.json.encode(summary), indent=1).decode() + "\n"
