"""Seconds of an RL step that no rollout worker spends: training by its FLOPs, and sending the weights."""

from __future__ import annotations

from dataclasses import dataclass

TRAINING_PASSES = 3  # a forward pass and a backward pass of twice its cost
SYNC_COPIES = 2  # a version goes to the relay, then to the workers


def training_s(
    parameters: float, tokens: float, devices: int, device_flops: float, mfu: float, passes: float = TRAINING_PASSES
) -> float:
    """Return the seconds of a training step: a pass takes 2 FLOPs per parameter and token."""
    return 2 * passes * parameters * tokens / (devices * device_flops * mfu)


def sync_s(version_bytes: float, link_gbps: float, latency_s: float = 0.0) -> float:
    """Return the seconds until every worker holds a version that each fetches over a link of its own."""
    return SYNC_COPIES * (latency_s + version_bytes * 8 / (link_gbps * 1e9))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The costs of one job's steps. `passes` counts the forward passes for log-probabilities too."""

    parameters: float
    train_devices: int
    device_flops: float
    mfu: float
    passes: float
    version_bytes: float
    link_gbps: float
    latency_s: float = 0.0

    def training_s(self, tokens: float) -> float:
        return training_s(self.parameters, tokens, self.train_devices, self.device_flops, self.mfu, self.passes)

    @property
    def sync_s(self) -> float:
        return sync_s(self.version_bytes, self.link_gbps, self.latency_s)
