"""One step of learning: groups of trajectories in, changed weights out, or unchanged ones and the reason why.

Whatever happens, the weights that remain are finite and may be published. An update with a loss or gradient that is
not finite is refused; one whose gradient is far beyond the usual is skipped; a batch without a single group to
learn from changes nothing, and after several of them in a row the trainer goes back to the weights of the last
healthy batch with a smaller learning rate, or gives up. Those weights are kept in memory for that: taken *before*
the healthy batch's own update, which is the one under suspicion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rose.core.groups import StepGroups
from rose.core.trajectory import Trajectory
from rose.errors import RoseError
from rose.train.advantages import member_advantages, overlong_loss
from rose.train.batch import MicroBatch, Sample, micro_batches
from rose.train.guards import SpikeGuard, StarvationGuard
from rose.train.losses import ScoredTokens, compute_loss, find_loss
from rose.train.model import CausalModel, are_finite
from rose.train.reporting import StepReport, Sums, Verdict, staleness, tokens_by_version
from rose.train.settings import TrainSettings, check_train

ADAM_BETAS = (0.9, 0.95)
ROLL_BACK_RATE_FACTOR = 0.5


class TrainingStarved(RoseError):
    """No group had anything to learn from, for too long."""


@dataclass(slots=True)
class Snapshot:
    """Weights and optimiser state, copied."""

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]


class Trainer:
    """Owns a model's weights and the optimiser's state. One thread calls it.

    `reference` is what the loss keeps near, if its settings want that; without one, the model as it is now.
    """

    def __init__(
        self, model: CausalModel, settings: TrainSettings | None = None, reference: CausalModel | None = None
    ) -> None:
        self.model = model
        self.settings = settings or TrainSettings()
        find_loss(self.settings.loss.name)
        check_train(self.settings)
        self.reference = (reference or _copied(model)) if self.settings.loss.kl_beta else None
        self.step = 0
        self.learning_rate_factor = 1.0
        self.spikes = SpikeGuard(self.settings.spike_factor)
        self.starvation = StarvationGuard(self.settings.starved_steps_max, self.settings.roll_backs_max)
        self._optimiser = torch.optim.AdamW(
            model.parameters(), lr=self.settings.learning_rate, betas=ADAM_BETAS, weight_decay=0.0
        )
        self.healthy: Snapshot | None = None

    def learn(
        self, groups: Sequence[Sequence[Trajectory]], counts: StepGroups | None = None, version: str | None = None
    ) -> StepReport:
        """Update the weights from whole groups. Raises TrainingStarved when there is no way on.

        `counts` says how many groups were drawn to find these; without it all of them were kept. `version` is that of
        the weights as they are now, from which staleness counts; without it, the newest that wrote a token.
        """
        self.step += 1
        total = counts.total if counts else len(groups)
        samples, refused = self._samples(groups)
        if not any(sample.advantage for sample in samples):
            return self._starved(total, refused)
        self.starvation.observe(len(groups))
        self.healthy = self.snapshot()
        verdict, sums, norm = self._update_all(samples)
        written = tokens_by_version([sample.trajectory for sample in samples])
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
            tokens_by_version=written,
            **sums.shown(),
        )

    def snapshot(self) -> Snapshot:
        weights = {name: weight.detach().clone() for name, weight in self.model.weights.items()}
        return Snapshot(weights, {name: _cloned(state) for name, state in self.moments().items()})

    def restore(self, snapshot: Snapshot) -> None:
        """Weights and optimiser as they were then; the snapshot stays usable."""
        with torch.no_grad():
            for name, weight in self.model.weights.items():
                weight.copy_(snapshot.weights[name])
        for name, weight in self.model.weights.items():
            self._optimiser.state[weight] = _cloned(snapshot.moments.get(name, {}))

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """The optimiser's state by weight name; empty before the first update."""
        states = ((name, self._optimiser.state.get(weight)) for name, weight in self.model.weights.items())
        return {name: state for name, state in states if state}

    def learning_rate(self) -> float:
        warm_up = min(1.0, self.step / self.settings.warm_up_steps) if self.settings.warm_up_steps else 1.0
        return self.settings.learning_rate * warm_up * self.learning_rate_factor

    # One batch

    def _samples(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[Sample], int]:
        """Every trajectory with its advantage; those with broken log-probabilities are left out."""
        found: list[tuple[Trajectory, float]] = []
        refused = 0
        for group in groups:
            whole = [trajectory for trajectory in group if _is_sound(trajectory)]
            refused += len(group) - len(whole)
            rewards = [(each.trajectory_id, each.reward - self._overlong_loss(each)) for each in whole]
            found += zip(whole, member_advantages(rewards, self.settings.advantage_scale) or ())
        if not found:
            return [], refused
        weights = find_loss(self.settings.loss.name).weigh([trajectory.generated_tokens for trajectory, _ in found])
        return [
            Sample(trajectory, advantage, weight) for (trajectory, advantage), weight in zip(found, weights)
        ], refused

    def _overlong_loss(self, trajectory: Trajectory) -> float:
        settings = self.settings
        if not settings.overlong_tokens:
            return 0.0
        limits = settings.overlong_tokens, settings.overlong_buffer_tokens, settings.overlong_penalty
        return overlong_loss(trajectory.generated_tokens, *limits)

    def _update_all(self, samples: Sequence[Sample]) -> tuple[Verdict, Sums, float]:
        """Every update of the batch; the first that is refused ends it."""
        # What has no advantage has no gradient either, unless the loss looks at the reference: it counts in the
        # weights of the others and is not computed.
        useful = [sample for sample in samples if sample.advantage or self.reference is not None]
        batches = micro_batches(useful, self.settings.rows_max, self.settings.tokens_max)
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

    def _logprobs_of(self, model: CausalModel, batches: Sequence[MicroBatch]) -> list[Tensor]:
        with torch.no_grad():
            return [model.logprobs(b.token_ids, b.scored, self.settings.temperature)[0] for b in batches]

    def _accumulate(
        self, batches: Sequence[MicroBatch], old: Sequence[Tensor] | None, reference: Sequence[Tensor] | None
    ) -> Sums:
        """Gradients of the whole batch, micro-batch by micro-batch."""
        self._optimiser.zero_grad(set_to_none=True)
        sums = Sums()
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
            result = compute_loss(tokens, self.settings.loss)
            result.value.backward()
            sums.add(result, float(entropy.sum()), len(new), batch.tokens)
        return sums

    def _apply(self, loss: float, before: Snapshot) -> tuple[Verdict, float]:
        """The optimiser's step, unless loss, gradient or result forbid it."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.gradient_norm_max))
        if not math.isfinite(loss) or not math.isfinite(norm):
            return "not_finite", norm
        if self.spikes.is_spike(norm):
            return "spike", norm
        for group in self._optimiser.param_groups:
            group["lr"] = self.learning_rate()
        self._optimiser.step()
        if not self.model.is_finite() or not _are_moments_finite(self.moments()):
            self.restore(before)
            return "not_finite", norm
        return "updated", norm

    def _starved(self, total: int, refused: int) -> StepReport:
        verdict = self.starvation.observe(0)
        if verdict == "stop" or (verdict == "roll_back" and self.healthy is None):
            raise TrainingStarved(
                f"no group of the last {self.settings.starved_steps_max} steps had anything to learn from "
                f"(0 of {total} kept in the last one)",
                hint="lower train.learning_rate, draw larger groups, or begin from a better warm start",
            )
        if verdict == "roll_back":
            assert self.healthy is not None
            self.restore(self.healthy)
            self.learning_rate_factor *= ROLL_BACK_RATE_FACTOR
        name: Verdict = "rolled_back" if verdict == "roll_back" else "starved"
        return StepReport(self.step, name, 0, total, trajectories_refused=refused)


def _is_sound(trajectory: Trajectory) -> bool:
    return trajectory.generated_tokens > 0 and all(map(math.isfinite, trajectory.logprobs))


def _copied(model: CausalModel) -> CausalModel:
    return CausalModel(model.spec, {name: weight.detach().clone() for name, weight in model.weights.items()})


def _cloned(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in state.items()}


def _are_moments_finite(moments: dict[str, dict[str, Tensor]]) -> bool:
    return all(are_finite(state.values()) for state in moments.values())
