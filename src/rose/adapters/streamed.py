"""Publishing for trainers that hand out their weights as an iterator of names and tensors.

Frameworks that shard a model over ranks gather one tensor after the other and free it before the next. The publisher
encodes each tensor as it passes. Its peak memory on the host is one bf16 copy of the model, one tensor, and two
buckets.

Every tensor is compared with the model folder that the workers began with, because a worker refuses weights of another
model. After the first difference nothing more is encoded. The iterator is always advanced to its end: the other ranks
of the trainer take part in each of its steps and would wait for a rank that stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rose.errors import ModelError
from rose.models.model_spec import read_spec
from rose.models.tensors import expected_tensors
from rose.weights.live_tensors import FLOATS, checkpoint_name
from rose.weights.publish import PublishedVersion, Publisher
from rose.weights.relay.relay_base import Relay
from rose.weights.shards import Tensor

DIFFERENCES_SHOWN_MAX = 5  # more lines are no more help: a wrong folder differs in every tensor
HEAD = "lm_head.weight"


class StreamedPublisher:
    """Publishes the tensors of iterators under the run's name, if they are those of the model folder."""

    def __init__(
        self, model_folder: Path | str, relay: Relay | str, *, run: str, secret: bytes | None = None, **options: Any
    ) -> None:
        spec = read_spec(Path(model_folder))
        self._folder, self._shapes = model_folder, expected_tensors(spec)
        self._left_out = {HEAD} if spec.tied_embeddings else set()
        tensors = [Tensor(name, shape) for name, shape in self._shapes.items()]
        self._publisher = Publisher(None, relay, run=run, secret=secret, tensors=tensors, **options)

    def publish(self, version: int, stream: Iterable[tuple[str, Any]]) -> PublishedVersion:
        """Publish what the iterator yields, and return the version once workers can fetch it.

        Raises ModelError for tensors that are not the folder's, and whatever the iterator raises. Then workers keep
        the version before, and the next one goes out whole.
        """
        source = iter(stream)
        try:
            return self._publisher.publish_stream(version, self._checked(source))
        except Exception:
            with suppress(Exception):
                for _ in source:
                    pass
            raise

    def close(self) -> None:
        """Wait for the publication under way, and release all resources."""
        self._publisher.close()

    def _checked(self, source: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the tensors of the model. Raises ModelError at the end if there are others, or some are missing."""
        differences: list[str] = []
        seen: set[str] = set()
        for raw_name, tensor in source:
            name = checkpoint_name(raw_name)
            if name in self._left_out:
                continue
            difference = f"`{name}` came twice" if name in seen else self._difference(name, tensor)
            seen.add(name)
            if difference:
                differences.append(difference)
            elif not differences:
                yield name, tensor
            tensor = None  # before the iterator makes the next one
        differences += [f"`{name}` did not come" for name in self._shapes if name not in seen]
        if differences:
            raise differences_error(self._folder, differences)

    def _difference(self, name: str, tensor: Any) -> str:
        """Return how a tensor differs from the folder's, or an empty text."""
        shape, dtype = self._shapes.get(name), str(tensor.dtype).removeprefix("torch.")
        if shape is None:
            return f"`{name}` is not in the folder"
        if tuple(tensor.shape) != shape:
            return f"`{name}` is {list(tensor.shape)}, in the folder {list(shape)}"
        return "" if dtype in FLOATS else f"`{name}` is {dtype}, not bf16, fp16 or fp32"


def differences_error(folder: Path | str, differences: list[str]) -> ModelError:
    """Return the error of weights that are not the folder's, with the first differences."""
    rest = len(differences) - DIFFERENCES_SHOWN_MAX
    shown = "; ".join(differences[:DIFFERENCES_SHOWN_MAX]) + (f"; and {rest} more" if rest > 0 else "")
    return ModelError(
        f"the trainer's weights are not those of {folder}: {shown}",
        hint="train the model that the gateway was started with, with no parameter frozen, renamed or added",
    )
