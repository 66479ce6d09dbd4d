"""How a device beside a `vllm serve` is lent, in the words of any lent device: for its owner and for the gateway.

KV memory here is the rollout engine's alone, so nothing is told of serving's pages, and of serving's slack only the
rollout engine knows. *Parked* is an engine whose KV cache was squeezed to nothing and whose gate is shut: its requests
were handed back and, on a CPU, the memory is the machine's again. Its weights stay, as everywhere.

An engine counts from nothing, what it lends even beside every serving engine anew; here all of it is added up.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from rose.coserve.messages import DryRunStatus, LendingState, LendingStatus
from rose.coserve.owner import PAUSED
from rose.engines.vllm.desk import Lent, Status

if TYPE_CHECKING:
    from rose.rollout.vllm_agent import VllmSeat

EVICTED = ("evictions", "evicted_tokens")
LENT = ("steps", "tokens", "seconds", "doubtful", "breaker_trips", "requests", "attained")


class LendingTally:
    """Show it the newest status often enough that no account outgrows the one before it unseen."""

    def __init__(self) -> None:
        self._gone = self._newest = Status(0)  # counters of what has ended, and what is

    def total(self, newest: Status) -> Status:
        """Levels are those of `newest`, counters those of all engines and terms so far."""
        before, gone, self._newest = self._newest, self._gone, newest
        is_other = newest.process_id != before.process_id
        if is_other:
            gone = replace(gone, **{name: getattr(gone, name) + getattr(before, name) for name in EVICTED})
        if is_other or _has_fallen(before.lent, newest.lent):
            gone = replace(gone, lent=_sum(gone.lent, before.lent))
        self._gone = gone
        evicted = {name: getattr(newest, name) + getattr(gone, name) for name in EVICTED}
        return replace(newest, lent=_sum(newest.lent, gone.lent), **evicted)


def _has_fallen(before: Lent, newest: Lent) -> bool:
    return any(getattr(newest, name) < getattr(before, name) for name in LENT)


def _sum(one: Lent, other: Lent) -> Lent:
    """Levels are those of the first."""
    counts = {name: getattr(one, name) + getattr(other, name) for name in LENT}
    return replace(one, breaches=dict(Counter(one.breaches) + Counter(other.breaches)), **counts)


def lending_status_of(seat: VllmSeat) -> LendingStatus:
    engine, trouble, wishes = seat.lending_tally.total(seat.status or Status(0)), seat.trouble, seat.wishes
    lent = engine.lent
    dry = DryRunStatus(lent.dry_run_s, lent.dry_run_tokens, lent.dry_run_lent_s) if wishes.get("dry_run") else None
    return LendingStatus(
        state=_state(seat),
        why=trouble.what if trouble is not None else engine.why,
        mode=seat.lending.mode,
        model="resident" if engine.kv_blocks_limit else "parked",
        model_bytes=0,
        activation_s=seat.activation_s,
        parking_s=seat.parking_s,
        running=engine.running,
        waiting=engine.waiting,
        lent_steps=lent.steps,
        lent_tokens=lent.tokens,
        lent_s=lent.seconds,
        evictions=engine.evictions,
        evicted_tokens=engine.evicted_tokens,
        breaches={kind: lent.breaches.get(kind, 0) for kind in ("step", "ttft", "tpot")},
        doubtful=lent.doubtful,
        breaker_trips=lent.breaker_trips,
        page_bytes=engine.block_bytes,
        pages=seat.lending.engine.kv_memory_mb * (1 << 20) // max(1, engine.block_bytes),
        rollout_pages=engine.kv_blocks_used + engine.kv_blocks_cached,
        rollout_pages_max=engine.kv_blocks_limit,
        serving_pages=0,
        headroom_pages=0,
        memory_state="apart",
        lending_stretch=1.0,
        memory_share=seat.memory_share,
        compute_share=float(wishes.get("compute_share", 1.0)),  # type: ignore[arg-type]
        dry_run=dry,
        is_resting=bool(lent.resting),
        shut_s=seat.shut_s,
    )


def _state(seat: VllmSeat) -> LendingState:
    if seat.gave_up.done():
        return "failed"
    if seat.status is None:
        return "activating"
    if seat.stopped:
        return "paused" if seat.stopped == PAUSED else "drained"
    if not seat.is_wanted:
        return "parked"
    return "dry_run" if seat.wishes.get("dry_run") else "lending"
