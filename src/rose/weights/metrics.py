"""What a publisher, a receiver and a gateway show to Prometheus, all under `rose_weights_`.

    rose_weights_published_bytes_total{kind}     pushed to the relay
    rose_weights_received_versions_total         and rose_weights_received_bytes_total
    rose_weights_ratio                           times smaller than the weights themselves, of the last version
    rose_weights_seconds{phase}                  of a publisher and of a receiver, and stage and commit of an engine
    rose_weights_pause_seconds                   the swap, in which the engine stands still
    rose_weights_lag_versions                    versions there are beyond the one that runs
    rose_weights_version, rose_weights_failures_total{kind}, rose_weights_refused_total
    rose_weights_workers_behind                  of a gateway: its workers that do not run what was published last

A process has a publisher, a receiver or a gateway, so all may use the same names. What a gateway shows is the sum over
its workers, as they reported it; its lag is that of the worker furthest behind. Labels come from fixed sets, and values
that cannot be true are left out: a worker's report never makes the metrics grow or fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from rose.observe.metrics import Metrics

if TYPE_CHECKING:
    from rose.weights.publish import Published
    from rose.weights.receive import Received

PHASE_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
PAUSE_BUCKETS_S = (0.00001, 0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
PHASES = frozenset(
    ("list", "prepare", "bring", "fetch", "decode", "total", "stage", "commit", "read", "encode", "copy", "push")
)
KINDS = frozenset(
    ("ConfigError", "ModelError", "RequestRefused", "Unavailable", "WeightsRefused", "Fenced", "KeyExists")
    + ("KeyMissing", "RangeRefused", "RelayFull", "LayoutError", "CodecError", "QueueFull", "OSError", "MemoryError")
)
OTHER = "other"  # the label of everything else: a label per name that a worker invents would have no end
SIZE_BYTES_MAX = 1 << 50  # a petabyte in one version is a false report
SPENT_S_MAX = 86_400.0  # a phase of more than a day likewise
_COUNTED = "is_counted_weights_failure"


class _Figures:
    """What all three show."""

    def __init__(self, metrics: Metrics) -> None:
        self._seconds = metrics.histogram("rose_weights_seconds", "Time by phase.", PHASE_BUCKETS_S, ["phase"])
        self._failures = metrics.counter("rose_weights_failures", "What went wrong, by kind of error.", ["kind"])

    def spent(self, seconds: Mapping[str, float]) -> None:
        for phase, spent_s in seconds.items():
            if _is_time(spent_s):
                self._seconds.labels(phase if phase in PHASES else OTHER).observe(spent_s)

    def failed(self, error: BaseException) -> None:
        """Counted once, through however many hands the error goes."""
        if _COUNTED not in vars(error):
            vars(error)[_COUNTED] = True
            self.failed_by(type(error).__name__)

    def failed_by(self, kind: str) -> None:
        self._failures.labels(kind if kind in KINDS else OTHER).inc()


class PublishMetrics(_Figures):
    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._ratio, self._version = _ratio(metrics), _version(metrics)
        self._bytes = metrics.counter("rose_weights_published_bytes", "Bytes pushed to the relay.", ["kind"])

    def published(self, published: Published) -> None:
        self._bytes.labels(published.kind).inc(published.size_bytes)
        self._ratio.set(published.ratio)
        self._version.set(published.version.version)
        self.spent(published.seconds)


class ReceiveMetrics(_Figures):
    """Of a receiver, and of the device that it works for."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._ratio, self._version = _ratio(metrics), _version(metrics)
        self._versions, self._bytes, self._pause = _versions(metrics), _bytes(metrics), _pause(metrics)
        self._refused = metrics.counter("rose_weights_refused", "Manifests and payloads that must not be used.")
        self._lag = metrics.gauge("rose_weights_lag_versions", "Versions in the relay beyond the one that runs.")

    def received(self, received: Received) -> None:
        self._versions.inc()
        self._bytes.inc(received.size_bytes)
        self._ratio.set(received.ratio)
        self._version.set(received.version.version)
        self.spent(received.seconds)

    def looked(self, lag_versions: int, refused_new: int) -> None:
        self._lag.set(lag_versions)
        self._refused.inc(refused_new)

    def paused(self, seconds: float) -> None:
        self._pause.observe(seconds)

    def swapped(self, stage_s: float, commit_s: float) -> None:
        """The engine took the weights: its own copy of them, and the swap."""
        self.spent({"stage": stage_s, "commit": commit_s})
        self.paused(commit_s)


class FleetMetrics(_Figures):
    """Of a gateway: what its workers told, and how far they are."""

    def __init__(self, metrics: Metrics, lags: Callable[[], list[int]]) -> None:
        """`lags`: how many versions each worker is behind the one that was published last."""
        super().__init__(metrics)
        self._versions, self._bytes, self._pause = _versions(metrics), _bytes(metrics), _pause(metrics)
        what = "Published versions beyond the one that the worker furthest behind runs."
        metrics.mirror("gauge", "rose_weights_lag_versions", what, lambda: max(lags(), default=0))
        what = "Workers that do not run the version that was published last."
        metrics.mirror("gauge", "rose_weights_workers_behind", what, lambda: sum(lag > 0 for lag in lags()))

    def taken(self, size_bytes: int, seconds: Mapping[str, float]) -> None:
        """A worker runs a version that it did not run before; of its phases, `commit` is the swap."""
        self._versions.inc()
        if 0 <= size_bytes <= SIZE_BYTES_MAX:
            self._bytes.inc(size_bytes)
        self.spent(seconds)
        if _is_time(seconds.get("commit", -1.0)):
            self._pause.observe(seconds["commit"])


def _is_time(spent_s: float) -> bool:
    """Whether a time that a worker reports can be one; not-a-number fails both comparisons."""
    return 0.0 <= spent_s <= SPENT_S_MAX


def _ratio(metrics: Metrics) -> Gauge:
    what = "How many times smaller the last version was than the weights themselves."
    return metrics.gauge("rose_weights_ratio", what)


def _version(metrics: Metrics) -> Gauge:
    return metrics.gauge("rose_weights_version", "The newest version here.")


def _versions(metrics: Metrics) -> Counter:
    return metrics.counter("rose_weights_received_versions", "Versions that arrived whole.")


def _bytes(metrics: Metrics) -> Counter:
    return metrics.counter("rose_weights_received_bytes", "Bytes read from the relay.")


def _pause(metrics: Metrics) -> Histogram:
    what = "How long the engine stood still for new weights."
    return metrics.histogram("rose_weights_pause_seconds", what, PAUSE_BUCKETS_S)
