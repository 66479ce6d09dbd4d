"""The trainer's side of vLLM's weight transfer, with the backend `rose`: weights go to the whole pool through a relay.

    init_info = RoseTrainerInitInfo(MODEL, "http://relay:7070", "my-run", rank=rank)
    client = HTTPVLLMWeightSyncClient("http://:TOKEN@gateway:8002")
    engine = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=ModuleSource(model))
    engine.send_weights()          # after every step, on every rank

vLLM chooses the engine by the class of the init info, so importing this module registers the engine. The client speaks
to a gateway with `--door vllm`. Rank 0 encodes each tensor as the source yields it. The other ranks only advance their
source, because gathering a tensor is a collective call.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from rose.adapters.streamed import StreamedPublisher
from rose.errors import ConfigError
from rose.weights.relay.opening import relay_kind

BACKEND = "rose"


@dataclass
class RoseTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The model folder that the gateway was started with, and the run in a relay (secret: the environment)."""

    backend: ClassVar[str] = BACKEND

    model_folder: str
    relay: str
    run: str


class RoseTrainerWeightTransfer(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Publishes a weight source as versions 1, 2, ... of a run; a trainer that starts again begins a later epoch."""

    init_info_cls = RoseTrainerInitInfo

    def __init__(self, init_info: RoseTrainerInitInfo, **common: Any) -> None:
        super().__init__(is_sender=init_info.is_sender, **common)
        is_folder = relay_kind(init_info.relay) == "folder"
        self._relay = os.path.abspath(init_info.relay.removeprefix("file:")) if is_folder else init_info.relay
        self._run, self._count = init_info.run, 0
        self._publisher: StreamedPublisher | None = None
        if self.is_sender:
            self._publisher = StreamedPublisher(init_info.model_folder, self._relay, run=init_info.run)

    @classmethod
    def trainer_init(
        cls, init_info: RoseTrainerInitInfo, *, client: Any, source: Any = None
    ) -> RoseTrainerWeightTransfer:
        """Claim the run in the relay and tell the gateway. Raises RoseError and what the client raises."""
        if source is None:
            raise ConfigError("the backend rose publishes a weight source, and none was given", hint="pass source=")
        engine = cls(init_info, client=client, source=source)
        if engine.is_sender:
            client.init_weight_transfer_engine({"backend": BACKEND, "relay": engine._relay, "run": engine._run})
        return engine

    def send_weights(self) -> None:
        """Publish the source, and return when the workers run it. If this raises, they keep the version before."""
        if self._publisher is None:
            for _ in _tensors(self.source):
                pass
            return
        self._count += 1
        self.client.start_weight_update()
        published = self._publisher.publish(self._count, _tensors(self.source))
        self.client.update_weights(
            {"version": published.label, "relay": self._relay, "run": self._run, "hash": published.hash}
        )
        self.client.finish_weight_update(published.label)

    def shutdown(self) -> None:
        """Wait for the publication under way, and release all resources."""
        if self._publisher is not None:
            self._publisher.close()


def _tensors(source: Any) -> Iterator[tuple[str, Any]]:
    """Return one pass over whole tensors: `iter_full` since vLLM 0.33, the source itself before."""
    whole = getattr(source, "iter_full", None)
    return iter(source) if whole is None else whole()


if BACKEND not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(BACKEND, RoseTrainerWeightTransfer)
