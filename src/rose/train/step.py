"""One step of learning: groups of trajectories in, changed weights out, or unchanged ones and the reason why.

The weights that remain are always finite and may be published. An update whose loss or gradient is not finite is
refused, and one whose gradient is far beyond the usual is skipped. A ruined model fails everywhere alike: every group
is without variance, nothing is left to learn from, and training would stand still for ever. After several such batches
the trainer restores the weights from *before* the last healthy batch, with a smaller learning rate, or gives up.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from rose.core.groups import StepGroups
from rose.core.staleness import version_number
from rose.core.trajectory import Trajectory
from rose.errors import RoseError
from rose.train.advantages import member_advantages, overlong_loss
from rose.train.batch import MicroBatch, Sample, micro_batches
from rose.train.losses import LossSums, ScoredTokens, compute_loss, find_loss
from rose.train.policy_model import PolicyModel, are_finite
from rose.train.train_settings import TrainSettings, check_train

ADAM_BETAS = (0.9, 0.95)
ROLL_BACK_RATE_FACTOR = 0.5
NORMS_MIN = 5  # fewer gradient norms say little about what is usual
NORMS_KEPT = 30

Verdict = Literal["updated", "spike", "not_finite", "starved", "rolled_back"]


class TrainingStarved(RoseError):
    """The error that ends a job whose groups had nothing to learn from for too long."""


class SpikeGuard:
    """The gradient norms of accepted updates, which say what is usual."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.norms: deque[float] = deque(maxlen=NORMS_KEPT)

    def is_spike(self, norm: float) -> bool:
        """Return whether to skip this update. A skipped norm does not count as usual."""
        assert math.isfinite(norm)
        if len(self.norms) >= NORMS_MIN and norm > self.factor * median(self.norms):
            return True
        if norm > 0:  # a batch that is clipped altogether says nothing about what is usual
            self.norms.append(norm)
        return False


class StarvationGuard:
    """The steps in a row that kept no group."""

    def __init__(self, steps_max: int, roll_backs_max: int) -> None:
        self.steps_max = steps_max
        self.roll_backs_max = roll_backs_max
        self.starved_steps = 0
        self.roll_backs = 0

    def observe(self, groups_kept: int) -> Literal["fine", "starved", "roll_back", "stop"]:
        """Count a step, and return what to do."""
        self.starved_steps = 0 if groups_kept else self.starved_steps + 1
        if self.starved_steps < self.steps_max:
            return "starved" if self.starved_steps else "fine"
        self.starved_steps = 0
        if self.roll_backs >= self.roll_backs_max:
            return "stop"
        self.roll_backs += 1
        return "roll_back"


@dataclass(frozen=True, slots=True)
class StepReport:
    """The figures of one step. Shares and means are over the trained tokens; without any they are 0.

    The *gap* is how far apart trainer and engine are on the same token, in nats: near 0 with the same weights, and the
    first thing to look at when a job does not learn. *Staleness* is in versions.
    """

    step: int
    verdict: Verdict
    groups_kept: int
    groups_total: int
    trajectories: int = 0
    trajectories_refused: int = 0  # with log-probabilities that are no numbers
    trajectories_overlong: int = 0  # that lost reward for their length
    trained_tokens: int = 0
    computed_tokens: int = 0  # context and padding included
    loss: float = 0.0
    gradient_norm: float = 0.0
    learning_rate: float = 0.0
    entropy: float = 0.0
    importance_mean: float = 0.0
    truncated_share: float = 0.0
    left_out_share: float = 0.0
    clipped_share: float = 0.0
    drifted_share: float = 0.0
    logprob_gap_mean: float = 0.0
    logprob_gap_max: float = 0.0
    rollout_kl: float = 0.0  # of the trainer from the engine
    reference_kl: float = 0.0  # of the model from the one the job began with, if the loss uses it
    staleness_mean: float | None = None  # None where versions are no numbers
    staleness_max: int | None = None
    tokens_by_version: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Snapshot:
    """Weights and optimiser state, copied."""

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]


class Trainer:
    """A model's weights and the optimiser's state. One thread calls it.

    The loss keeps near `reference` if its settings say so; without one, near the model as it is now.
    """

    rank, rank_count = 0, 1

    def __init__(
        self, model: PolicyModel, settings: TrainSettings | None = None, reference: PolicyModel | None = None
    ) -> None:
        self.model = model
        self.settings = settings or TrainSettings()
        find_loss(self.settings.loss.name)
        check_train(self.settings)
        self.reference: PolicyModel | None = None
        if self.settings.loss.kl_beta:
            self.reference = reference or model.frozen_copy()
        self.step = 0
        self.learning_rate_factor = 1.0
        self.spikes = SpikeGuard(self.settings.spike_factor)
        self.starvation = StarvationGuard(self.settings.starved_steps_max, self.settings.roll_backs_max)
        self._optimiser = torch.optim.AdamW(
            model.parameters(), lr=self.settings.learning_rate, betas=ADAM_BETAS, weight_decay=0.0
        )
        self.healthy: Snapshot | None = None  # from before the last healthy batch, whose update is under suspicion

    def learn(
        self, groups: Sequence[Sequence[Trajectory]], counts: StepGroups | None = None, version: str | None = None
    ) -> StepReport:
        """Update the weights from whole groups. Raises TrainingStarved when there is no way on.

        `counts` says how many groups were drawn to find these; without it all of them were kept. `version` is that of
        the current weights, from which staleness counts; without it, the newest that wrote a token.
        """
        self.step += 1
        total = counts.total if counts else len(groups)
        samples, refused = self._samples(groups)
        if not any(sample.advantage for sample in samples):
            return self._starved(total, refused)
        self.starvation.observe(len(groups))
        self.healthy = self.snapshot()
        verdict, sums, norm = self._update_all(samples)
        written = Counter(version for sample in samples for version in sample.trajectory.versions if version)
        stale_mean, stale_max = staleness(written, version)
        return StepReport(
            step=self.step,
            verdict=verdict,
            groups_kept=len(groups),
            groups_total=total,
            trajectories=len(samples),
            trajectories_refused=refused,
            trajectories_overlong=sum(self._overlong_loss(sample.trajectory) > 0 for sample in samples),
            gradient_norm=norm,
            learning_rate=self.learning_rate(),
            staleness_mean=stale_mean,
            staleness_max=stale_max,
            tokens_by_version=dict(written),
            **sums.report_fields(),
        )

    def snapshot(self) -> Snapshot:
        weights = {name: weight.detach().clone() for name, weight in self.model.weights.items()}
        return Snapshot(weights, {name: _cloned(state) for name, state in self.moments().items()})

    def restore(self, snapshot: Snapshot) -> None:
        """Set weights and optimiser to what they were then; the snapshot stays usable."""
        with torch.no_grad():
            for name, weight in self.model.weights.items():
                weight.copy_(snapshot.weights[name])
        for name, weight in self.model.weights.items():
            self._optimiser.state[weight] = _cloned(snapshot.moments.get(name, {}))

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimiser's state by weight name; empty before the first update."""
        states = ((name, self._optimiser.state.get(weight)) for name, weight in self.model.weights.items())
        return {name: state for name, state in states if state}

    def learning_rate(self) -> float:
        warm_up = min(1.0, self.step / self.settings.warm_up_steps) if self.settings.warm_up_steps else 1.0
        return self.settings.learning_rate * warm_up * self.learning_rate_factor

    # One batch

    def _samples(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[Sample], int]:
        """Return every trajectory with its advantage, and how many were left out as broken."""
        found: list[tuple[Trajectory, float]] = []
        refused = 0
        for group in groups:
            whole = [each for each in group if each.generated_tokens > 0 and all(map(math.isfinite, each.logprobs))]
            refused += len(group) - len(whole)
            rewards = [(each.trajectory_id, each.reward - self._overlong_loss(each)) for each in whole]
            found += zip(whole, member_advantages(rewards, self.settings.advantage_scale) or ())
        if not found:
            return [], refused
        weights = find_loss(self.settings.loss.name).weigh([trajectory.generated_tokens for trajectory, _ in found])
        samples = [Sample(trajectory, advantage, weight) for (trajectory, advantage), weight in zip(found, weights)]
        return samples, refused

    def _overlong_loss(self, trajectory: Trajectory) -> float:
        limits = self.settings.overlong_tokens, self.settings.overlong_buffer_tokens, self.settings.overlong_penalty
        return overlong_loss(trajectory.generated_tokens, *limits)

    def _update_all(self, samples: Sequence[Sample]) -> tuple[Verdict, LossSums, float]:
        """Make every update of the batch, up to the first that is refused."""
        # A sample without advantage has no gradient either, unless the loss looks at the reference: it counts in the
        # weights of the others and is not computed.
        useful = [sample for sample in samples if sample.advantage or self.reference is not None]
        batches = self._micro_batches(useful)
        old = self._logprobs_of(self.model, batches) if self.settings.updates > 1 else None
        reference = self._logprobs_of(self.reference, batches) if self.reference is not None else None
        before = self.healthy
        for _ in range(self.settings.updates):
            sums = self._accumulate(batches, old, reference)
            verdict, norm = self._apply(sums.loss, before or self.snapshot())
            if verdict != "updated":
                break
            before = None
        return verdict, sums, norm

    # What a trainer on several ranks does in another way

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """Return the batch as this process computes it."""
        batches = micro_batches(samples, self.settings.rows_max, self.settings.tokens_max)
        return batches if self.settings.device == "cpu" else [batch.to(self.settings.device) for batch in batches]

    def _clip(self) -> float:
        """Shorten a gradient that is too long, and return how long it was."""
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.gradient_norm_max))

    def _is_finite(self) -> bool:
        return self.model.is_finite() and all(are_finite(state.values()) for state in self.moments().values())

    def _logprobs_of(self, model: PolicyModel, batches: Sequence[MicroBatch]) -> list[Tensor]:
        with torch.no_grad():
            return [model.logprobs(b.token_ids, b.scored, self.settings.temperature)[0] for b in batches]

    def _accumulate(
        self, batches: Sequence[MicroBatch], old: Sequence[Tensor] | None, reference: Sequence[Tensor] | None
    ) -> LossSums:
        """Compute the gradients of the whole batch, micro-batch by micro-batch."""
        self._optimiser.zero_grad(set_to_none=True)
        total = LossSums()
        for index, batch in enumerate(batches):
            new, entropy = self.model.logprobs(batch.token_ids, batch.scored, self.settings.temperature)
            tokens = ScoredTokens(
                new=new,
                old=new.detach() if old is None else old[index],
                rollout=batch.rollout,
                advantages=batch.advantages,
                weights=batch.weights,
                sequences=batch.sequences,
                reference=None if reference is None else reference[index],
            )
            value, sums = compute_loss(tokens, self.settings.loss)
            value.backward()
            sums.entropy, sums.computed_tokens = float(entropy.sum()), batch.token_ids.numel()
            total.add(sums)
        return total

    def _apply(self, loss: float, before: Snapshot) -> tuple[Verdict, float]:
        """Make the optimiser's step, unless loss, gradient or result forbid it."""
        norm = self._clip()
        if not math.isfinite(loss) or not math.isfinite(norm):
            return "not_finite", norm
        if self.spikes.is_spike(norm):
            return "spike", norm
        for group in self._optimiser.param_groups:
            group["lr"] = self.learning_rate()
        self._optimiser.step()
        if not self._is_finite():
            self.restore(before)
            return "not_finite", norm
        return "updated", norm

    def _starved(self, total: int, refused: int) -> StepReport:
        action = self.starvation.observe(0)
        if action == "stop" or (action == "roll_back" and self.healthy is None):
            raise TrainingStarved(
                f"no group of the last {self.settings.starved_steps_max} steps had anything to learn from "
                f"(0 of {total} kept in the last one)",
                hint="lower train.learning_rate, draw larger groups, or begin from a better warm start",
            )
        verdict: Verdict = "starved"
        if action == "roll_back":
            assert self.healthy is not None
            self.restore(self.healthy)
            self.learning_rate_factor *= ROLL_BACK_RATE_FACTOR
            verdict = "rolled_back"
        return StepReport(self.step, verdict, 0, total, trajectories_refused=refused)


def staleness(written: Mapping[str, int], version: str | None = None) -> tuple[float | None, int | None]:
    """Return how many versions tokens are behind, mean and most; behind `version` or the newest. None if unknown.

    The name of a version begins with its number: `12`, or `12-` and a hash.
    """
    numbers = {name: version_number(name) for name in [*written, *([version] if version else [])]}
    known = {name: number for name, number in numbers.items() if number is not None}
    if not written or len(known) < len(numbers):
        return None, None
    newest = known[version] if version else max(known.values())
    behind = {name: max(0, newest - known[name]) for name in written}
    mean = sum(behind[name] * tokens for name, tokens in written.items()) / sum(written.values())
    return mean, max(behind.values())


def _cloned(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in state.items()}
