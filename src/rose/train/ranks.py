"""The ranks of a trainer: how they find each other, and what they tell each other beside weights and gradients.

Three groups of the same processes: one for weights and gradients (nccl on GPUs, gloo on CPUs), one for words, and one
on which ranks wait for the next order, which may take as long as rollouts do. Words are bytes, never pickles: who can
reach a rank's port can spoil a batch, but cannot run code. Ranks that `rose run` starts meet through a file in a
private folder and listen on the loopback device only; ranks of `torchrun` meet as its variables say.

A sum over ranks is taken from the values of all ranks, in their order: every rank finds the same bits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rose.errors import Unavailable
from rose.train.train_settings import TrainSettings

ORDER_S_MAX = 30 * 86_400.0  # a rank whose rank 0 ended learns it from the connection, not from this
WORD_BYTES_MAX = 1 << 30  # of one order: a batch of trajectories
REASON_CHARACTERS_MAX = 200
SOURCE_LINE = re.compile(r"^\[\S*:\d+\]")  # of torch's own code
LOOPBACK = "lo"
NETWORK_VARIABLE = "GLOO_SOCKET_IFNAME"


class Ranks:
    """This process among the ranks of a trainer. One thread calls it."""

    def __init__(self, rank: int, settings: TrainSettings, meeting: Path | None = None) -> None:
        """Meet the others in a file, or else where torchrun's variables say. Raises Unavailable if one stays away."""
        self.rank, self.count = rank, settings.ranks
        patience = timedelta(seconds=settings.rank_patience_s)
        if meeting is not None:
            os.environ.setdefault(NETWORK_VARIABLE, LOOPBACK)
        if settings.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
        address = f"file://{meeting}" if meeting is not None else "env://"
        with others_ended():
            backend = "nccl" if settings.device == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=address, rank=rank, world_size=self.count, timeout=patience)
            self._words: Any = dist.new_group(backend="gloo", timeout=patience)
            waiting = timedelta(seconds=ORDER_S_MAX) if rank else patience  # rank 0 is the one that does not wait
            self._orders: Any = dist.new_group(backend="gloo", timeout=waiting)
            self.mesh: Any = dist.init_device_mesh(settings.device, (self.count,))

    def send_order(self, order: bytes) -> None:
        """Send an order from rank 0 to all others."""
        assert self.rank == 0 and len(order) <= WORD_BYTES_MAX
        with others_ended():
            dist.broadcast(torch.tensor([len(order)]), src=0, group=self._orders)
            dist.broadcast(torch.frombuffer(bytearray(order), dtype=torch.uint8), src=0, group=self._words)

    def receive_order(self) -> bytes:
        """Wait for the next order of rank 0."""
        with others_ended():
            size = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(size, src=0, group=self._orders)
            if not 0 < int(size) <= WORD_BYTES_MAX:
                raise Unavailable(f"rank 0 announced an order of {int(size)} bytes", hint="restart all ranks")
            order = torch.zeros(int(size), dtype=torch.uint8)
            dist.broadcast(order, src=0, group=self._words)
        return order.numpy().tobytes()

    def exchange(self, word: bytes) -> list[bytes]:
        """Return the words of all ranks, by rank."""
        sizes = [int(size) for [size] in self.all_values([len(word)])]
        longest = max(1, *sizes)
        if longest > WORD_BYTES_MAX:
            raise Unavailable(f"a rank announced a word of {longest} bytes", hint="restart all ranks")
        mine = torch.frombuffer(bytearray(word.ljust(longest, b"\0")), dtype=torch.uint8)
        found = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
        with others_ended():
            dist.all_gather(found, mine, group=self._words)
        return [each.numpy().tobytes()[:size] for each, size in zip(found, sizes)]

    def all_values(self, values: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all ranks, by rank."""
        mine = torch.tensor(values, dtype=torch.float64)
        found = [torch.zeros_like(mine) for _ in range(self.count)]
        with others_ended():
            dist.all_gather(found, mine, group=self._words)
        return [each.tolist() for each in found]

    def leave(self) -> None:
        dist.destroy_process_group()


@contextmanager
def others_ended() -> Iterator[None]:
    """Turn torch's error about a lost or silent rank into Unavailable."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(name in str(error) for name in ("gloo", "NCCL", "store")):
            raise
        reason = SOURCE_LINE.sub("", str(error)).strip().partition(". ")[0].splitlines()[0][:REASON_CHARACTERS_MAX]
        raise Unavailable(
            f"another rank of the trainer ended, or was silent for train.rank_patience_s: {reason}",
            hint="see the logs of the other ranks, then resume the run",
        ) from error
