"""The trainer's side: after every step, what changed goes to the relay, while the trainer does something else.

    publisher = Publisher(model, "tcp://relay:7070", run="my-run", optimizer=optimizer)
    for step in range(1, steps + 1):
        ...                                    # loss.backward(); optimizer.step()
        publisher.publish(step)

A thread reads the live weights piece by piece, casts them to bf16, and encodes each against the only copy there is:
that of the version before, which becomes the new one as it goes. Encoded buckets are pushed by two more threads, at
most two waiting, so memory is bounded whatever the link. Since it reads the live weights, they must stay as they are
until it has read them: `publish` returns when that is so, unless it was given the optimizer, whose next step then
waits for it. Rollouts come before the next step, so in practice nothing waits.

What fails is raised by `result`, or by the next `publish`, which then does nothing else. Nobody sees half a version,
as it has no manifest; but the copy is half new by then, so the version after a failure goes out whole, as an anchor.
Whoever was replaced by another trainer gets `Fenced`, from then on every time.

With several ranks each has a publisher with the same layout and its own rank. Rank 0 claims the epoch, which the
others are told (`epoch=`), and writes the manifest when all parts are there; the others wait for that manifest.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rose.core.versions import VersionId, anchor_is_due
from rose.errors import RequestRefused, Unavailable
from rose.weights.chain import Folder, Patience
from rose.weights.coding import Bits, Codec, SparseCodec
from rose.weights.connecting import reach, run_secret
from rose.weights.layouts import whole
from rose.weights.live import LiveTensors, Room, check_finite
from rose.weights.manifest import Fenced, Manifest
from rose.weights.metrics import PublishMetrics
from rose.weights.relay.base import Relay
from rose.weights.shards import ITEM_BYTES, Box, Holding, Layout, LayoutError, Tensor, plan
from rose.weights.writing import ANCHOR_EVERY, KEEP_VERSIONS, ChainWriter, Draft, Encoded, encode_piece

BUCKET_DENSE_BYTES = 128 << 20  # one is encoded while another is pushed
PIECE_ELEMENTS_MAX = 16 << 20  # 32 MiB of bf16: what one thread reads, casts and encodes at a time
PUSHES_MAX = 2  # buckets under way: one on the wire, one behind it


@dataclass(frozen=True, slots=True)
class Published:
    """A version that is in the relay."""

    version: VersionId
    hash: str
    kind: str  # delta or anchor
    size_bytes: int  # what receivers that have the base must fetch
    dense_bytes: int  # what the weights themselves take
    seconds: dict[str, float] = field(default_factory=dict)  # by phase; reading and encoding overlap with pushing

    @property
    def ratio(self) -> float:
        return self.dense_bytes / max(1, self.size_bytes)

    @property
    def label(self) -> str:
        """A name for ever: a number alone means other weights after a trainer was restarted."""
        return f"{self.version.version}-{self.hash[:8]}"


class Publication:
    """A version on its way."""

    def __init__(self) -> None:
        self._read = threading.Event()
        self._done: Future[Published] = Future()
        self._ended = threading.Event()
        self._untold: BaseException | None = None

    def wait_read(self) -> None:
        """Until the weights may change again."""
        self._read.wait()

    def result(self, timeout_s: float | None = None) -> Published:
        """Until receivers can have it. Raises what went wrong."""
        error = self._done.exception(timeout_s)
        if error is not None and error is self._untold:
            self._untold = None
        return self._done.result()

    def wait_end(self) -> None:
        """Until all is done, the anchor that was due and the cleaning up too. Raises what nobody has heard of yet."""
        self._ended.wait()
        untold, self._untold = self._untold, None
        if untold is not None:
            raise untold

    @property
    def is_done(self) -> bool:
        return self._done.done()

    def _committed(self, published: Published) -> None:
        self._read.set()
        self._done.set_result(published)

    def _failed(self, error: BaseException) -> None:
        self._untold = error
        if not self._done.done():
            self._done.set_exception(error)

    def _end(self) -> None:
        self._read.set()
        self._ended.set()


class Publisher:
    """One per trainer rank. For one thread; `close` it, or use it in a `with`."""

    def __init__(
        self,
        model_or_state_dict: Any,
        relay: Relay | str,
        *,
        run: str,
        secret: bytes | None = None,
        optimizer: Any = None,
        dtype: str | None = "BF16",  # None: every tensor in its own type
        layout: Layout | None = None,
        workers: Sequence[Layout] = (),
        tensors: Sequence[Tensor] | None = None,
        rank: int = 0,
        epoch: int | None = None,  # of rank 0, for the others
        after_epoch: int = 0,  # the trainer's last one, if it knows: clocks may go back
        codec: Codec | None = None,
        threads: int = 1,
        anchor_every: int = ANCHOR_EVERY,
        keep_versions: int = KEEP_VERSIONS,
        piece_elements_max: int = PIECE_ELEMENTS_MAX,
        bucket_dense_bytes: int = BUCKET_DENSE_BYTES,
        patience: Patience | None = None,
        metrics: PublishMetrics | None = None,
    ) -> None:
        self._source = model_or_state_dict
        live = LiveTensors(model_or_state_dict)
        self.tensors = _told(tensors, layout) or live.tensors(dtype)
        self._dtypes = {tensor.name: tensor.dtype for tensor in self.tensors}
        self._shapes = live.shapes()
        self._layout: Layout = layout or [whole(self.tensors)]
        planned = plan(self.tensors, self._layout, workers, piece_elements_max=piece_elements_max)
        self._held = {box: _holding(self._layout[rank], box) for box in planned.pieces_of(rank)}
        self._buckets = list(self._cut(bucket_dense_bytes))
        known = run_secret(secret)
        self.relay, self._owns_relay = reach(relay, known), isinstance(relay, str)
        self._codec = codec or SparseCodec(threads=threads)
        self.writer = ChainWriter(
            self.relay, run=run, secret=known, tensors=self.tensors, codec=self._codec, rank=rank, patience=patience
        )
        self._anchor_every, self._keep_versions = anchor_every, keep_versions
        self._metrics = metrics
        self._copy: dict[Box, Bits] = {}  # the version before, or, halfway, some of the next
        self._hashes: dict[Box, bytes] = {}
        self._room = Room()
        self._is_broken = False  # the copy is of no one version
        self._since_anchor: int | None = None
        self._current: Publication | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights-publish")
        self._hook: Any = None
        if optimizer is not None:
            self._hook = optimizer.register_step_pre_hook(lambda *_: self.wait_read())
        if rank == 0 and epoch is None:
            self.writer.claim(at_least=max(int(time.time()), after_epoch + 1))
        else:
            self.writer.join(_known(epoch))

    # What a trainer calls

    def publish(self, version: int, *, anchor: bool = False) -> Publication:
        """Publish the weights as they are now, which must be a later version than before.

        Raises what went wrong with the one before, if nobody has asked for its result.
        """
        self._settle()
        if self.newest is not None and version <= self.newest.version:
            raise RequestRefused(f"version {version} is not later than {self.newest.version}, the last one published")
        live = LiveTensors(self._source)
        if live.shapes() != self._shapes:
            raise RequestRefused(
                "the model's tensors are not those the publisher began with",
                hint="make a new publisher for a new model",
            )
        return self._begin(lambda publication: self._publish(publication, version, live, anchor))

    def republish(self) -> Publication:
        """Put the newest version into the relay again, whole, from the copy: the relay may have lost everything."""
        self._settle()
        newest = self.newest
        if newest is None or self._is_broken:
            raise RequestRefused("there is no version to publish again", hint="publish the next one; it will be whole")
        return self._begin(lambda publication: self._republish(publication, newest.version))

    def wait_read(self) -> None:
        """Until the weights may change."""
        if self._current is not None:
            self._current.wait_read()

    def wait(self) -> Published | None:
        """Until everything published is in the relay and looked after; the last of it. Raises what went wrong."""
        current = self._current
        if current is None:
            return None
        self._settle()
        return current.result()

    def close(self) -> None:
        """Wait for what is on its way, whatever becomes of it, and let go."""
        self._thread.shutdown()
        if self._hook is not None:
            self._hook.remove()
        if self._owns_relay:
            self.relay.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                self._settle()
        finally:
            self.close()

    @property
    def newest(self) -> VersionId | None:
        return self.writer.newest

    @property
    def epoch(self) -> int:
        return self.writer.epoch

    # In the thread

    def _settle(self) -> None:
        """Let the one before come to its end. If that is an error nobody has seen, it is raised here."""
        current, self._current = self._current, None
        if current is not None:
            current.wait_end()

    def _begin(self, work: Callable[[Publication], None]) -> Publication:
        publication = Publication()
        self._current = publication
        self._thread.submit(self._run, work, publication)
        if self._hook is None:
            publication.wait_read()
            if publication.is_done:  # it failed while it read, or was that quick
                publication.result()
        return publication

    def _run(self, work: Callable[[Publication], None], publication: Publication) -> None:
        try:
            work(publication)
        except BaseException as error:
            if self._metrics is not None:
                self._metrics.failed(error)
            publication._failed(error)
        finally:
            publication._end()

    def _publish(self, publication: Publication, version: int, live: LiveTensors, anchor: bool) -> None:
        base = None if self._is_broken else self.newest
        is_due = base is not None and (anchor or anchor_is_due(self._since_anchor, self._anchor_every))
        self._link(version, base, _Pass(self, publication, live))
        self._since_anchor = 0 if base is None else (self._since_anchor or 0) + 1
        if is_due:
            self._link(version, None, _Pass(self))
            self._since_anchor = 0
        if self.writer.rank == 0:
            self._look_after(version)

    def _republish(self, publication: Publication, version: int) -> None:
        self._link(version, None, _Pass(self, publication))
        self._since_anchor = 0

    def _link(self, version: int, base: VersionId | None, passed: _Pass) -> None:
        """One link to the version, pushed while it is encoded, and committed."""
        begin_s = time.perf_counter()
        self._is_broken |= passed.live is not None
        with self.writer.begin(version, base) as draft:
            with ThreadPoolExecutor(PUSHES_MAX, thread_name_prefix="weights-push") as pool:
                waiting: deque[Future[int]] = deque()
                for bucket in self._buckets:
                    while len(waiting) >= PUSHES_MAX:
                        waiting.popleft().result()
                    waiting.append(pool.submit(passed.push, draft, [passed.encoded(box, base) for box in bucket]))
                passed.end_reading()
                for push in waiting:
                    push.result()
            commit_s = time.perf_counter()
            manifest = self._commit(draft)
            passed.spent("commit", commit_s)
        passed.spent("total", begin_s)
        self._is_broken = False
        published = self._published(draft.folder, manifest, passed.seconds)
        if self._metrics is not None:
            self._metrics.published(published)
        if passed.publication is not None:
            passed.publication._committed(published)

    def _commit(self, draft: Draft) -> Manifest | None:
        """The manifest, for the rank that writes it."""
        if self.writer.rank == 0:
            draft.collect_parts(range(len(self._layout)))
            return draft.commit()
        draft.leave_part()
        self._wait_for(draft.folder)
        self.writer.newest = draft.folder.version
        return None

    def _wait_for(self, folder: Folder) -> None:
        key = self.writer.names.manifest(folder)

        def trial(_: int) -> None:
            if self.writer.read_record(key, Manifest) is None:
                raise Unavailable(f"rank 0 has not committed version {folder.version}")

        self.writer.patience.call(trial)

    def _look_after(self, version: int) -> None:
        """Put back what the relay lost, and take away what nobody needs any more."""
        if not self.writer.check_relay():
            if len(self._layout) > 1:
                raise Unavailable("the relay lost earlier versions", hint="call republish() on every rank")
            self._link(version, None, _Pass(self))
        self.writer.sweep(self._keep_versions)

    def _published(self, folder: Folder, manifest: Manifest | None, seconds: dict[str, float]) -> Published:
        if manifest is None:  # another rank knows
            return Published(folder.version, "", folder.kind, 0, 0, seconds)
        dense = sum(math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in self.tensors)
        size = manifest.size_bytes()
        return Published(manifest.id, manifest.version_hash, manifest.kind, size, dense, seconds)

    def _cut(self, dense_bytes: int) -> Iterator[list[Box]]:
        """Pieces in buckets of about this much dense weight."""
        bucket: list[Box] = []
        room = dense_bytes
        for box in self._held:
            size = box.elements * ITEM_BYTES[self._dtypes[box.tensor]]
            if bucket and size > room:
                yield bucket
                bucket, room = [], dense_bytes
            bucket.append(box)
            room -= size
        yield bucket


class _Pass:
    """One pass over the weights: the live ones, or the copy of them."""

    def __init__(
        self, publisher: Publisher, publication: Publication | None = None, live: LiveTensors | None = None
    ) -> None:
        self.live = live
        self.publication = publication  # that it is all about, if it is not housekeeping
        self.seconds: dict[str, float] = {}
        self._of = publisher
        self._lock = threading.Lock()

    def encoded(self, box: Box, base: VersionId | None) -> Encoded:
        """The piece as it is now; the copy follows it."""
        of, dtype = self._of, self._of._dtypes[box.tensor]
        if self.live is None:
            return encode_piece(of._codec, box, dtype, of._copy[box])
        begin_s = time.perf_counter()
        new = self.live.bits(of._held[box], box, dtype, of._room)
        check_finite(new, dtype, box)
        begin_s = self.spent("read", begin_s)
        if base is None:
            found = encode_piece(of._codec, box, dtype, new)
        else:
            found = encode_piece(of._codec, box, dtype, new, of._copy[box], of._hashes[box])
        begin_s = self.spent("encode", begin_s)
        if box not in of._copy:
            of._copy[box] = new.copy()
        elif found.payload:
            of._copy[box][...] = new
        of._hashes[box] = found.content_hash
        self.spent("copy", begin_s)
        return found

    def end_reading(self) -> None:
        if self.live is not None:
            self.live.check_unchanged()
        if self.publication is not None:
            self.publication._read.set()

    def push(self, draft: Draft, bucket: Sequence[Encoded]) -> int:
        begin_s = time.perf_counter()
        size = draft.push(bucket)
        self.spent("push", begin_s)
        return size

    def spent(self, phase: str, begin_s: float) -> float:
        now_s = time.perf_counter()
        with self._lock:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now_s - begin_s
        return now_s


def _holding(holdings: Sequence[Holding], box: Box) -> Holding:
    return next(held for held in holdings if box.is_within(held.box))


def _told(tensors: Sequence[Tensor] | None, layout: Layout | None) -> list[Tensor] | None:
    """With a layout, the whole tensors must be told: a rank's own shards do not say how large they are."""
    if layout is not None and tensors is None:
        raise LayoutError("a layout was given without the tensors it is about", hint="give tensors= as well")
    return None if tensors is None else list(tensors)


def _known(epoch: int | None) -> int:
    if epoch is None:
        raise LayoutError("only rank 0 claims an epoch", hint="tell the other ranks: epoch=publisher_of_rank_0.epoch")
    return epoch


__all__ = ["Fenced", "Publication", "Published", "Publisher"]
