"""The trainer of a run on several ranks: rank 0 orders, and every rank, itself included, carries the order out.

Rank 0 is the run itself, in its trainer's thread. The others are processes without a will of their own
(`trainer_rank`). Each order ends with an exchange of answers, so that a failure of any rank is an error of the run, and
ranks that found different figures are noticed at once. A rank that dies ends the connections to it: the others fail in
the collective they are in, rank 0 says so, and the run ends and can be resumed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rose.bounds import TEXT_CHARACTERS_MAX, Text
from rose.core.groups import StepGroups
from rose.core.trajectory import Trajectory
from rose.errors import RoseError, Unavailable
from rose.run.publishing import Publishing, RelayAddress
from rose.train.train_settings import TrainSettings

if TYPE_CHECKING:
    from rose.train.ranks import Ranks
    from rose.train.sharded_step import ShardedTrainer
    from rose.train.step import StepReport
    from rose.weights.publish import PublishedVersion


class LoadOrder(msgspec.Struct, frozen=True, tag=True):
    source: str
    checkpoint: str | None
    train: TrainSettings


class JoinOrder(msgspec.Struct, frozen=True, tag=True):
    """Publish to this relay from now on."""

    relay: RelayAddress
    epoch: int


class LearnOrder(msgspec.Struct, frozen=True, tag=True):
    groups: list[list[Trajectory]]
    counts: StepGroups
    version: str


class PublishRows(msgspec.Struct, frozen=True, tag=True):
    version: int


class SaveOrder(msgspec.Struct, frozen=True, tag=True):
    folder: str


class FinishOrder(msgspec.Struct, frozen=True, tag=True):
    """Bring what is under way to its end."""


class EndOrder(msgspec.Struct, frozen=True, tag=True):
    pass


Order = LoadOrder | JoinOrder | LearnOrder | PublishRows | SaveOrder | FinishOrder | EndOrder
Publish = Callable[[int], Any]


class Answer(msgspec.Struct, frozen=True):
    """What a rank says at the end of an order; `word` depends on the order."""

    error: Text = ""
    word: Text = ""


class RankWorker:
    """What every rank does. `publish` publishes this rank's rows as a version; on rank 0 it is given."""

    def __init__(self, ranks: Ranks, secret: bytes | None = None) -> None:
        self.ranks = ranks
        self.trainer: ShardedTrainer | None = None
        self.is_alone = False  # another rank is gone: no order can be carried out any more
        self.publish: Publish | None = None
        self.wait: Callable[[], Any] = lambda: None
        self._secret = secret

    def obey(self, order: Order) -> tuple[Any, list[str]]:
        """Carry out an order together with the others, and return its result and the words of all ranks.

        Raises the error of this rank, or Unavailable with that of another.
        """
        result, failure, answer = None, None, Answer()
        try:
            result, word = self._do(order)
            answer = Answer(word=word)
        except (RoseError, OSError) as error:
            failure, answer = error, Answer(error=(str(error) or type(error).__name__)[:TEXT_CHARACTERS_MAX])
        try:
            words = self.ranks.exchange(msgspec.json.encode(answer))
        except Unavailable as lost:
            self.is_alone = True
            raise failure or lost from lost
        if failure is not None:
            raise failure
        answers = [msgspec.json.decode(word, type=Answer) for word in words]
        for rank, other in enumerate(answers):
            if other.error:
                raise Unavailable(f"rank {rank} of the trainer: {other.error}")
        return result, [other.word for other in answers]

    def _do(self, order: Order) -> tuple[Any, str]:
        trainer = self.trainer
        if isinstance(order, LoadOrder):
            self.trainer = self._load(order)
            return None, ""
        assert trainer is not None, "the first order loads a model"
        match order:
            case JoinOrder():
                if self.ranks.rank:
                    publisher = order.relay.join(trainer.model.weights, self._secret, order.epoch, self.ranks)
                    self.publish, self.wait = lambda version: publisher.publish(version).result(), publisher.wait
            case LearnOrder():
                report = trainer.learn(order.groups, order.counts, order.version)
                return report, repr((report.verdict, report.loss, report.gradient_norm))
            case PublishRows():
                assert self.publish is not None
                return self.publish(order.version), ""
            case SaveOrder():
                from rose.train.sharded_checkpoint import write_shard

                return None, write_shard(trainer, Path(order.folder))
            case FinishOrder():
                self.wait()
        return None, ""

    def _load(self, order: LoadOrder) -> ShardedTrainer:
        from rose.train.checkpoint import load_checkpoint
        from rose.train.module_model import ModuleModel
        from rose.train.policy_model import use_threads
        from rose.train.sharded_step import ShardedTrainer

        use_threads(1)
        model = ModuleModel(order.source, order.train, self.ranks.mesh)
        trainer = ShardedTrainer(model, order.train, self.ranks)
        if order.checkpoint is not None:
            load_checkpoint(trainer, order.checkpoint)
        return trainer


class RankTeam:
    """All ranks, as rank 0 sees them. One thread calls it."""

    def __init__(self, settings: TrainSettings, publishing: Publishing, meeting: Path | None) -> None:
        """Meet the other ranks (`train.ranks.Ranks`). Raises Unavailable."""
        from rose.train.ranks import Ranks

        self._settings, self._publishing = settings, publishing
        self._ranks = Ranks(0, settings, meeting)
        self._worker = RankWorker(self._ranks)
        self._worker.publish, self._worker.wait = publishing.publish, publishing.wait

    def load(self, source: Path, checkpoint: Path | None) -> None:
        """Load the model on every rank. Raises ModelError."""
        kept = str(checkpoint.resolve()) if checkpoint is not None else None
        self._order(LoadOrder(str(source.resolve()), kept, self._settings))

    def begin(self, version: int, after_epoch: int) -> PublishedVersion:
        """Publish the weights as they are, each rank its own rows. Raises Unavailable."""
        epoch = self._publishing.claim(self._trainer.model.weights, after_epoch, self._ranks)
        self._order(JoinOrder(self._publishing.address_for_ranks(), epoch))
        return self.publish(version)

    def learn(self, groups: Sequence[Sequence[Trajectory]], counts: StepGroups, version: str) -> StepReport:
        report, figures = self._order(LearnOrder([list(group) for group in groups], counts, version))
        if len(set(figures)) > 1:
            hint = "all ranks need the same versions of torch and of ROSE; resume from the last checkpoint"
            raise Unavailable(f"the ranks of the trainer found different figures: {'; '.join(figures)}", hint=hint)
        found: StepReport = report
        return found

    def publish(self, version: int) -> PublishedVersion:
        published: PublishedVersion = self._order(PublishRows(version))[0]
        return published

    def save(self, source: Path, out: Path, extra: dict[str, Any]) -> None:
        from rose.train.sharded_checkpoint import save_sharded

        trainer = self._trainer
        save_sharded(trainer, source, out, extra, lambda to: self._order(SaveOrder(str(to.resolve())))[1])

    def finish(self) -> None:
        """Wait until every rank has done what is under way."""
        self._order(FinishOrder())

    def end(self) -> None:
        """Let the other ranks go, if they are still there."""
        with contextlib.suppress(RoseError):
            self._ranks.send_order(msgspec.msgpack.encode(EndOrder()))
        self._ranks.leave()

    @property
    def _trainer(self) -> ShardedTrainer:
        assert self._worker.trainer is not None
        return self._worker.trainer

    def _order(self, order: Order) -> tuple[Any, list[str]]:
        self._ranks.send_order(msgspec.msgpack.encode(order))
        return self._worker.obey(order)
