"""The trainer's side: after every step, what changed goes to the relay while the trainer does something else.

    publisher = Publisher(model, "http://relay:7070", run="my-run", optimizer=optimizer)
    for step in range(1, steps + 1):
        ...                                    # loss.backward(); optimizer.step()
        publisher.publish(step)

A thread reads the live weights chunk by chunk, casts them to bf16, and encodes each against the only copy: that of the
version before, which becomes the new one as it goes. Two more threads push encoded buckets, so memory is bounded
whatever the network. `publish` returns when the weights may change again, unless it was given the optimizer, whose next
step then waits for it. Rollouts come before the next step, so in practice nothing waits.

An error is raised by `result`, or by the next `publish`, which then does nothing else. A failed version has no
manifest, so no receiver sees half of it; the copy is half new by then, so the next version goes out whole, as an
anchor. A trainer that was replaced by another gets `Fenced`, from then on every time.

`publish_stream` takes the tensors from an iterator instead, one at a time, as trainers hand them out that gather one
sharded tensor after the other. It encodes in the caller's thread, because advancing the iterator may be a collective
call, and holds the copy, one tensor, and the buckets under way.

With several ranks each has a publisher with the same layout and its own rank. Rank 0 claims the epoch, which the others
are given (`epoch=`), and writes the manifest when all ranks have pushed; the others wait for that manifest.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rose.core.versions import VersionId, anchor_is_due
from rose.errors import RequestRefused, Unavailable
from rose.weights.chain import Folder, RetryPolicy
from rose.weights.coding import Bits, Codec, SparseCodec
from rose.weights.keys import run_secret
from rose.weights.layouts import whole
from rose.weights.live_tensors import LiveTensors, ScratchBuffer, check_finite
from rose.weights.manifest import Manifest
from rose.weights.relay.opening import connect_relay
from rose.weights.relay.relay_base import Relay
from rose.weights.shards import Layout, LayoutError, Tensor, TensorRegion, plan
from rose.weights.weight_metrics import PublishMetrics
from rose.weights.writing import ANCHOR_EVERY, KEEP_VERSIONS, ChainWriter, Draft, Encoded, encode_chunk

BUCKET_DENSE_BYTES = 128 << 20  # one is encoded while another is pushed
CHUNK_ELEMENTS_MAX = 16 << 20  # 32 MiB of bf16: what one thread reads, casts and encodes at a time
PUSHES_MAX = 2  # buckets under way: one on the wire, one behind it


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A version that is in the relay."""

    version: VersionId
    hash: str
    kind: str  # delta or anchor
    size_bytes: int  # what receivers that have the base must fetch
    dense_bytes: int  # what the weights themselves take
    seconds: dict[str, float] = field(default_factory=dict)  # by phase; reading and encoding overlap with pushing
    pushed_bytes: int = 0  # by this rank

    @property
    def ratio(self) -> float:
        return self.dense_bytes / max(1, self.size_bytes)

    @property
    def label(self) -> str:
        """Return a unique name: a number alone means other weights after a trainer was restarted."""
        return f"{self.version.version}-{self.hash[:8]}"


class Publication:
    """A version on its way."""

    def __init__(self) -> None:
        self._read = threading.Event()
        self._done: Future[PublishedVersion] = Future()
        self._ended = threading.Event()
        self._unreported: BaseException | None = None

    def wait_read(self) -> None:
        """Wait until the weights may change again."""
        self._read.wait()

    def result(self, timeout_s: float | None = None) -> PublishedVersion:
        """Wait until receivers can have it. Raises what went wrong."""
        error = self._done.exception(timeout_s)
        if error is not None and error is self._unreported:
            self._unreported = None
        return self._done.result()

    def wait_end(self) -> None:
        """Wait for everything, a due anchor and the sweep too. Raises an error that was not reported yet."""
        self._ended.wait()
        unreported, self._unreported = self._unreported, None
        if unreported is not None:
            raise unreported

    @property
    def is_done(self) -> bool:
        return self._done.done()


def _check_rank(rank: int, epoch: int | None, *, has_layout: bool, has_tensors: bool) -> None:
    if has_layout and not has_tensors:  # a rank's own shards do not say how large the tensors are
        raise LayoutError("a layout was given without the tensors it is about", hint="give tensors= as well")
    if epoch is None and rank != 0:
        hint = "tell the other ranks: epoch=publisher_of_rank_0.epoch"
        raise LayoutError("only rank 0 claims an epoch", hint=hint)


class Publisher:
    """Publishes the weights of one trainer rank to a relay. For one thread; `close` it, or use it in a `with`."""

    def __init__(
        self,
        model_or_state_dict: Any,  # None: only `publish_stream` is used, and `tensors` says what it gets
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
        chunk_elements_max: int = CHUNK_ELEMENTS_MAX,
        bucket_dense_bytes: int = BUCKET_DENSE_BYTES,
        retry: RetryPolicy | None = None,
        metrics: PublishMetrics | None = None,
    ) -> None:
        _check_rank(rank, epoch, has_layout=layout is not None, has_tensors=tensors is not None)
        self._source = model_or_state_dict
        if model_or_state_dict is not None or tensors is None:
            live = LiveTensors(model_or_state_dict)
            self._shapes, tensors = live.shapes(), live.tensors(dtype) if tensors is None else tensors
        self.tensors = list(tensors)
        self._dtypes = {tensor.name: tensor.dtype for tensor in self.tensors}
        self._layout: Layout = layout or [whole(self.tensors)]
        planned = plan(self.tensors, self._layout, workers, chunk_elements_max=chunk_elements_max)
        chunks = planned.chunks_of(rank)
        self._placements = {
            region: next(placement for placement in self._layout[rank] if region.is_within(placement.region))
            for region in chunks
        }
        self._bucket_dense_bytes = bucket_dense_bytes
        known = run_secret(secret)
        self.relay, self._owns_relay = connect_relay(relay, known), isinstance(relay, str)
        self._codec = codec or SparseCodec(threads=threads)
        self.writer = ChainWriter(
            self.relay, run=run, secret=known, tensors=self.tensors, codec=self._codec, rank=rank, retry=retry
        )
        self._anchor_every, self._keep_versions = anchor_every, keep_versions
        self._metrics = metrics
        self._copy: dict[TensorRegion, Bits] = {}  # the version before, or, halfway, some of the next
        self._hashes: dict[TensorRegion, bytes] = {}
        self._scratch = ScratchBuffer()
        self._is_broken = False  # the copy is a mixture of versions
        self._since_anchor: int | None = None
        self._current: Publication | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights-publish")
        self._hook = optimizer and optimizer.register_step_pre_hook(lambda *_: self.wait_read())
        if epoch is None:
            self.writer.claim(at_least=max(int(time.time()), after_epoch + 1))
        else:
            self.writer.join(epoch)

    # What a trainer calls

    def publish(self, version: int, *, anchor: bool = False) -> Publication:
        """Publish the weights as they are now, which must be a later version than before.

        Raises the error of the publication before, if its result was not asked for.
        """
        self._check_next(version)
        live = LiveTensors(self._source)
        if live.shapes() != self._shapes:
            raise RequestRefused(
                "the model's tensors are not those the publisher began with",
                hint="make a new publisher for a new model",
            )
        return self._begin(lambda publication: self._publish(publication, version, live, anchor))

    def publish_stream(self, version: int, stream: Iterable[tuple[str, Any]]) -> PublishedVersion:
        """Publish the tensors that the iterator yields, each whole and once, in any order, and return the version.

        Raises what the iterator raises; then nothing is published, and the next version goes out whole.
        """
        self._check_next(version)
        publication = Publication()
        try:
            is_due = self._put_next(version, _StreamPass(self, publication, stream), anchor=False)
        except BaseException as error:
            if self._metrics is not None:
                self._metrics.failed(error)
            raise
        self._current = publication
        self._thread.submit(self._run, lambda _: self._keep_house(version, is_due), publication)
        return publication.result()

    def republish(self) -> Publication:
        """Put the newest version into the relay again, as a full snapshot: the relay may have lost everything."""
        self._settle()
        newest = self.newest
        if newest is None or self._is_broken:
            raise RequestRefused("there is no version to publish again", hint="publish the next one; it will be whole")
        return self._begin(lambda publication: self._put_anchor(newest.version, publication))

    def begin_anew(self) -> None:
        """Publish the next version whole. Every rank calls this if one of them could not publish the last version."""
        self._is_broken = True

    def wait_read(self) -> None:
        """Wait until the weights may change."""
        if self._current is not None:
            self._current.wait_read()

    def wait(self) -> PublishedVersion | None:
        """Wait until everything is in the relay, and return the last publication. Raises its error."""
        current = self._current
        if current is None:
            return None
        self._settle()
        return current.result()

    def close(self) -> None:
        """Wait for the publication under way, ignore its error, and release all resources."""
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
        """Return the newest version that was published."""
        return self.writer.newest

    @property
    def epoch(self) -> int:
        """Return the number of this publisher among all publishers of the run."""
        return self.writer.epoch

    def _check_next(self, version: int) -> None:
        """Raise the error of the publication before, or RequestRefused if this version is not later."""
        self._settle()
        if self.newest is not None and version <= self.newest.version:
            raise RequestRefused(f"version {version} is not later than {self.newest.version}, the last one published")

    def _settle(self) -> None:
        """Wait for the publication before, and raise its error if that was not reported yet."""
        current, self._current = self._current, None
        if current is not None:
            current.wait_end()

    def _begin(self, work: Callable[[Publication], None]) -> Publication:
        self._current = publication = Publication()
        self._thread.submit(self._run, work, publication)
        if self._hook is None:
            publication.wait_read()
            if publication.is_done:  # it failed while it read, or was that quick
                publication.result()
        return publication

    # In the thread

    def _run(self, work: Callable[[Publication], None], publication: Publication) -> None:
        try:
            work(publication)
        except BaseException as error:
            if self._metrics is not None:
                self._metrics.failed(error)
            publication._unreported = error
            if not publication._done.done():
                publication._done.set_exception(error)
        finally:
            publication._read.set()
            publication._ended.set()

    def _publish(self, publication: Publication, version: int, live: LiveTensors, anchor: bool) -> None:
        self._keep_house(version, self._put_next(version, _Pass(self, publication, live), anchor))

    def _put_next(self, version: int, passed: _Pass, anchor: bool) -> bool:
        """Put the next version into the relay, and return whether an anchor of it is due."""
        base = None if self._is_broken else self.newest
        is_due = base is not None and (anchor or anchor_is_due(self._since_anchor, self._anchor_every))
        self._put_record(version, base, passed)
        self._since_anchor = 0 if base is None else (self._since_anchor or 0) + 1
        return is_due

    def _keep_house(self, version: int, is_due: bool) -> None:
        """Put the anchor that is due, and repair and sweep the relay."""
        if is_due:
            self._put_anchor(version)
        if self.writer.rank == 0:
            if not self.writer.check_relay():
                if len(self._layout) > 1:
                    raise Unavailable("the relay lost earlier versions", hint="call republish() on every rank")
                self._put_record(version, None, _Pass(self))
            self.writer.sweep(self._keep_versions)

    def _put_anchor(self, version: int, publication: Publication | None = None) -> None:
        self._put_record(version, None, _Pass(self, publication))
        self._since_anchor = 0

    def _put_record(self, version: int, base: VersionId | None, passed: _Pass) -> None:
        """Push one record of the version while it is encoded, and commit it."""
        begin_s = time.perf_counter()
        self._is_broken |= passed.is_new
        with self.writer.begin(version, base) as draft:
            with ThreadPoolExecutor(PUSHES_MAX, thread_name_prefix="weights-push") as pool:
                waiting: deque[Future[int]] = deque()
                for bucket in self._buckets(passed, base):
                    waiting.append(pool.submit(passed.push, draft, bucket))
                    while len(waiting) >= PUSHES_MAX:
                        waiting.popleft().result()
                passed.end_reading()
                for push in waiting:
                    push.result()
            commit_s = time.perf_counter()
            manifest = self._commit(draft)
            passed.spent("commit", commit_s)
        passed.spent("total", begin_s)
        self._is_broken = False
        folder = draft.folder
        if manifest is None:  # another rank knows
            published = PublishedVersion(folder.version, "", folder.kind, 0, 0, passed.seconds, passed.pushed_bytes)
        else:
            size, dense = manifest.size_bytes(), sum(tensor.size_bytes for tensor in self.tensors)
            published = PublishedVersion(
                manifest.id, manifest.version_hash, manifest.kind, size, dense, passed.seconds, passed.pushed_bytes
            )
        if self._metrics is not None:
            self._metrics.published(published)
        if passed.publication is not None:
            passed.publication._read.set()
            passed.publication._done.set_result(published)

    def _commit(self, draft: Draft) -> Manifest | None:
        """Return the manifest on the rank that writes it; wait for it on the others."""
        if self.writer.rank == 0:
            draft.collect_rank_manifests(range(len(self._layout)))
            return draft.commit()
        draft.put_rank_manifest()
        self.writer.retry.call(lambda: self._check_committed(draft.folder))
        self.writer.newest = draft.folder.version
        return None

    def _check_committed(self, folder: Folder) -> None:
        if self.writer.read_signed(self.writer.names.manifest(folder), Manifest) is None:
            raise Unavailable(f"rank 0 has not committed version {folder.version}")

    def _buckets(self, passed: _Pass, base: VersionId | None) -> Iterator[list[Encoded]]:
        """Yield the encoded chunks in buckets, each of about as much dense weight as a bucket may have."""
        bucket: list[Encoded] = []
        free_bytes = self._bucket_dense_bytes
        for region in passed.regions():
            size = Tensor(region.tensor, region.shape, self._dtypes[region.tensor]).size_bytes
            if bucket and size > free_bytes:
                yield bucket
                bucket, free_bytes = [], self._bucket_dense_bytes
            bucket.append(passed.encoded(region, base))
            free_bytes -= size
        yield bucket


class _Pass:
    """One pass over the weights: the live ones, or the copy of them."""

    def __init__(
        self, publisher: Publisher, publication: Publication | None = None, live: LiveTensors | None = None
    ) -> None:
        self.live = live
        self.is_new = live is not None  # it brings the copy to another version
        self.publication = publication  # None if it is housekeeping
        self.seconds: dict[str, float] = {}
        self.pushed_bytes = 0
        self._of = publisher
        self._lock = threading.Lock()

    def regions(self) -> Iterator[TensorRegion]:
        """Yield the chunks in the order in which they are encoded."""
        return iter(self._of._placements)

    def encoded(self, region: TensorRegion, base: VersionId | None) -> Encoded:
        """Return the chunk as it is now, and bring the copy to it."""
        of, dtype = self._of, self._of._dtypes[region.tensor]
        if self.live is None:
            return encode_chunk(of._codec, region, dtype, of._copy[region])
        begin_s = time.perf_counter()
        new = self.live.bits(of._placements[region], region, dtype, of._scratch)
        check_finite(new, dtype, region)
        begin_s = self.spent("read", begin_s)
        if base is None:
            chunk = encode_chunk(of._codec, region, dtype, new)
        else:
            chunk = encode_chunk(of._codec, region, dtype, new, of._copy[region], of._hashes[region])
        begin_s = self.spent("encode", begin_s)
        if region not in of._copy:
            of._copy[region] = new.copy()
        elif chunk.payload:
            of._copy[region][...] = new
        of._hashes[region] = chunk.content_hash
        self.spent("copy", begin_s)
        return chunk

    def end_reading(self) -> None:
        if self.live is not None:
            self.live.check_unchanged()
        if self.publication is not None:
            self.publication._read.set()

    def push(self, draft: Draft, bucket: Sequence[Encoded]) -> int:
        begin_s = time.perf_counter()
        size = draft.push(bucket)
        self.spent("push", begin_s)
        with self._lock:
            self.pushed_bytes += size
        return size

    def spent(self, phase: str, begin_s: float) -> float:
        now_s = time.perf_counter()
        with self._lock:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now_s - begin_s
        return now_s


class _StreamPass(_Pass):
    """One pass over tensors that an iterator yields; `live` is the one at hand."""

    def __init__(self, publisher: Publisher, publication: Publication, stream: Iterable[tuple[str, Any]]) -> None:
        super().__init__(publisher, publication)
        self.is_new, self._stream = True, stream

    def regions(self) -> Iterator[TensorRegion]:
        missing: dict[str, list[TensorRegion]] = defaultdict(list)
        for region in self._of._placements:
            missing[region.tensor].append(region)
        for name, tensor in self._stream:
            if name not in missing:
                hint = "yield every tensor of the publisher's `tensors` once"
                raise RequestRefused(f"the stream yielded `{name}` twice, or it is no tensor of the model", hint=hint)
            self.live = LiveTensors({name: tensor})
            yield from missing.pop(name)
            self.live.check_unchanged()
            self.live = tensor = None  # before the iterator makes the next one
        if missing:
            raise RequestRefused(f"the stream ended without {len(missing)} tensors, `{min(missing)}` first")
