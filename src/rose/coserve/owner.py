"""The owner's controls of a lent device: one word each, obeyed between two steps, answered with the whole status.

`pause`    no rollout step from now on; requests and memory stay, so that `resume` goes on where it stopped.
`drain`    out within one step: requests end with "abort", every page goes to serving, new ones are refused; the
           model stays parked (see guest.py).
`remove`   the same, and its weights go too.
`resume`   lend again, whatever stopped it; the circuit breaker starts afresh.
`dry_run`  lend nothing, and add up what lending would have given, whatever else stops it; `resume` ends it.
`limits`   the most memory and time that rollouts may have.

An engine that follows another takes over what held there, before its first step.
"""

from __future__ import annotations

from collections.abc import Callable

from rose.core.dry_run import DryRun
from rose.core.ration import Ration
from rose.coserve import messages
from rose.coserve.guest import Guest
from rose.coserve.lending import Lender
from rose.coserve.tenancy import SharedMemory
from rose.errors import RequestRefused

PAUSED, DRAINED = "paused by the owner", "drained by the owner"


class Owner:
    """One per lent device."""

    def __init__(self, lender: Lender, guest: Guest, memory: SharedMemory, now_s: Callable[[], float]) -> None:
        self._lender, self._guest, self._memory, self._now_s = lender, guest, memory, now_s
        self._memory_share = 1.0
        guest.status = self.status

    def obey(self, control: messages.Control) -> None:
        match control.action:
            case "pause":
                self._lender.stop(PAUSED)
            case "resume":
                self._resume()
            case "drain":
                self._lender.stop(DRAINED)
                self._guest.leave("parked", DRAINED)
            case "remove":
                self._lender.stop(DRAINED)
                self._guest.leave("absent", DRAINED)
            case "dry_run":
                self._guest.check()
                self._lender.dry_run = DryRun(self._lender.admission, self._now_s())
            case "limits":
                self.limit(control.memory_share, control.compute_share)
        if control.action != "status":
            self._guest.tell()

    def take_over(self, lend: messages.Lend) -> None:
        """What held in the engine before this one: obeyed again, and rollouts held back if they may have ended it."""
        if lend.held_back:
            self._lender.stop(lend.held_back)
            self._guest.leave("parked", lend.held_back)
        for word in lend.words:
            self.obey(word)

    def limit(self, memory_share: float | None, compute_share: float | None) -> None:
        for name, share in (("memory", memory_share), ("compute", compute_share)):
            if share is not None and not 0 <= share <= 1:
                raise RequestRefused(f"a {name} limit of {share} is not a share", hint="give 0 to 1")
        if memory_share is not None:
            self._memory_share = memory_share
            pages = int(memory_share * self._memory.pages.pages)
            self._memory.owner_limit_pages = pages if memory_share < 1 else None
            if self._guest.is_here:
                self._memory.observe()
        if compute_share is not None:
            self._lender.ration = Ration(compute_share)

    def _resume(self) -> None:
        self._guest.call_back()
        self._lender.dry_run = None
        self._lender.resume()
        if self._lender.admission.breaker is not None:
            self._lender.admission.breaker.resume()

    # Status

    def status(self) -> messages.LendingStatus:
        """Raises whatever rollouts' code raises; one that has failed is not asked again."""
        lender, guest, memory = self._lender, self._guest, self._memory
        memory_status, facts = memory.policy.status(), None if guest.failure else guest.engine.facts()
        return messages.LendingStatus(
            state=self._state(),
            why=lender.stopped or guest.closed or lender.last_grant.reason,
            mode=lender.admission.mode,
            model=guest.place,
            model_bytes=guest.engine.weights_bytes if facts is not None else 0,
            activation_s=guest.activation_s,
            parking_s=guest.parking_s,
            running=facts.running if facts is not None else 0,
            waiting=facts.waiting if facts is not None else 0,
            lent_steps=lender.lent_steps,
            lent_tokens=lender.lent_tokens,
            lent_s=lender.ledger.total_lent_s,
            evictions=guest.evictions,
            evicted_tokens=guest.evicted_tokens + memory.evicted_tokens,
            breaches={kind: lender.breaches[kind] for kind in ("step", "ttft", "tpot")},
            doubtful=lender.ledger.doubtful,
            breaker_trips=lender.admission.breaker.trips if lender.admission.breaker is not None else 0,
            page_bytes=memory.pages.page_bytes,
            pages=memory.pages.pages,
            rollout_pages=memory.rollout.share.held,
            rollout_pages_max=memory.rollout.share.budget_pages,
            serving_pages=memory.serving.share.held,
            headroom_pages=memory_status.headroom_pages,
            memory_state=memory_status.state.value,
            lending_stretch=memory_status.lending_stretch,
            memory_share=self._memory_share,
            compute_share=lender.ration.share,
            dry_run=self._dry_run(),
            slack_s=lender.slack_s(self._now_s()),
            is_resting=lender.is_resting(self._now_s()),
            shut_s=lender.gate.shut_s(self._now_s()),
        )

    def _state(self) -> messages.LendingState:
        if self._guest.failure:
            return "failed"
        if self._guest.is_coming and not self._lender.stopped:
            return "activating"
        if self._lender.stopped == PAUSED:
            return "paused"
        if self._lender.stopped:
            return "drained"
        if not self._guest.is_here:
            return "drained" if self._guest.is_wanted else "parked"
        if self._lender.dry_run is not None:
            return "dry_run"
        return "lending"

    def _dry_run(self) -> messages.DryRunStatus | None:
        dry_run = self._lender.dry_run
        if dry_run is None:
            return None
        now_s = self._now_s()
        dry_run.settle(now_s)
        return messages.DryRunStatus(now_s - dry_run.since_s, dry_run.tokens, dry_run.lent_s)
