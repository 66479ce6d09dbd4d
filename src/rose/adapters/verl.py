"""verl trains on ROSE's pool: a checkpoint engine and a rollout replica. `import verl` loads this module, a plugin.

    actor_rollout_ref.rollout.name=rose actor_rollout_ref.rollout.checkpoint_engine.backend=rose

Every rank of the actor advances verl's iterator of weights, because that gathers one sharded tensor after the other.
Rank 0 publishes each tensor as it passes, and tells the gateway when the version is whole. Workers of the pool fetch
versions themselves, so verl's replica has no process of rollouts, no GPU and no port.

With replicas of verl's own in the pool, the engine `rose_NAME` sends by verl's engine NAME and publishes the same
tensors. `verl_rollouts` has what plays turns.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import ray
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry

from rose.adapters.verl_pool import VerlSettings, VerlWeights
from rose.errors import ConfigError

ROSE = "rose"  # verl's name for the replica and for the engine
Weights = Iterable[tuple[str, Any]]
NOT_STREAMS = ("naive", "delta_sharded")  # engines of verl that do not send an iterator of tensors


def settings_of(rollout: Any) -> VerlSettings:
    """Return the settings in verl's configuration of rollouts."""
    engine = rollout.checkpoint_engine
    return VerlSettings.read(dict(engine.engine_kwargs.get(engine.backend) or {}))


class PublishingEngine:
    """What publishes weights for the pool, before the engine of verl that sends them to replicas of verl's own."""

    def __init__(self, bucket_size: int = 0, is_master: bool = False, **settings: Any) -> None:
        known = VerlSettings.read(settings)
        super().__init__(bucket_size=bucket_size, is_master=is_master, **known.own)  # type: ignore[call-arg]
        self._rose_weights = VerlWeights(known) if is_master else None

    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> dict[str, float]:
        """Publish version `global_steps`. If this raises, workers of the pool keep the version before."""
        own: Any = super()
        if self._rose_weights is None:
            return await own.send_weights(weights, global_steps) or {}
        assert global_steps is not None, "verl's trainers number weights"
        passed: queue.Queue[tuple[str, Any] | None] = queue.Queue(1)

        def shared() -> Iterator[tuple[str, Any]]:
            for name, tensor in weights:
                passed.put((name, tensor.detach().cpu()))  # here, since the other thread has another CUDA stream
                yield name, tensor

        with ThreadPoolExecutor(1) as thread:
            publishing = thread.submit(self._rose_weights.publisher.publish, global_steps, iter(passed.get, None))
            try:
                metrics = await own.send_weights(shared(), global_steps) or {}
            finally:
                passed.put(None)  # after an error the publisher misses tensors, and publishes nothing
            new = publishing.result()
        await self._rose_weights.announce(new)
        return metrics | {"rose/published_mb": new.size_bytes / 1e6, "rose/publish_s": new.seconds.get("total", 0.0)}


class IdleEngine(CheckpointEngine):
    """An engine for no replica: it sends nothing, and advances the iterator."""

    def __init__(self, **_: Any) -> None: ...

    @classmethod
    def build_topology(cls, *_: Any) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}

    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> dict[str, float]:
        for _ in weights:
            pass
        return {}

    def no_part(self, **_: Any) -> dict[str, Any]:
        return {}

    prepare = init_process_group = receive_weights = finalize = no_part


class RoseCheckpointEngine(PublishingEngine, IdleEngine):
    """The engine of a pool without replicas of verl's own."""


class IdleWorker:
    """The receiver of a pool, in verl's group of receivers: that must not be empty."""

    def update_weights(self, global_steps: int | None = None) -> None: ...

    def execute_checkpoint_engine(self, method: str, **_: Any) -> None: ...


class RoseReplica(RolloutReplica):
    """verl's view of the whole pool: one replica that reserves nothing."""

    async def init_standalone(self) -> None:
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def init_hybrid(self, *_: Any) -> None:
        hint = "set trainer.v1.trainer_mode=separate_async and actor_rollout_ref.hybrid_engine=False"
        raise ConfigError("the pool runs on no GPU of the trainer", hint=hint)

    async def launch_servers(self) -> None:
        self._server_address = urlsplit(settings_of(self.config).gateway).netloc  # only shown
        self.workers = [ray.remote(num_cpus=0)(IdleWorker).remote()]


def register() -> None:
    """Register the replica, the engine, and one engine beside each of verl's own that is installed."""
    RolloutReplicaRegistry.register(ROSE, lambda: RoseReplica)
    for name, own in list(CheckpointEngineRegistry._registry.items()):
        if name not in NOT_STREAMS and not issubclass(own, PublishingEngine):
            mixed = type("MixedCheckpointEngine", (PublishingEngine, own), {})
            CheckpointEngineRegistry.register(f"{ROSE}_{name}")(mixed)
    CheckpointEngineRegistry.register(ROSE)(RoseCheckpointEngine)


register()
