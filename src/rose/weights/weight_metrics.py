"""The Prometheus metrics of a publisher, a receiver and a gateway, all under `rose_weights_` (docs/weights.md).

A process has a publisher, a receiver or a gateway, so all may use the same names. What a gateway shows is the sum over
its workers, as they reported it; its lag is that of the worker furthest behind. Labels come from fixed sets, and
impossible values are left out: a worker's report never makes the metrics grow or fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rose.observe.metrics import Metrics

if TYPE_CHECKING:
    from rose.weights.publish import PublishedVersion
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


class _WeightMetrics:
    """The metrics that all three have."""

    def __init__(self, metrics: Metrics) -> None:
        self._seconds = metrics.histogram("rose_weights_seconds", "Time by phase.", PHASE_BUCKETS_S, ["phase"])
        self._failures = metrics.counter("rose_weights_failures", "What went wrong, by kind of error.", ["kind"])

    def spent(self, seconds: Mapping[str, float]) -> None:
        for phase, spent_s in seconds.items():
            if _is_time(spent_s):
                self._seconds.labels(phase if phase in PHASES else OTHER).observe(spent_s)

    def failed(self, error: BaseException) -> None:
        """Count an error once, however often it is passed on."""
        if _COUNTED not in vars(error):
            vars(error)[_COUNTED] = True
            self.failed_by(type(error).__name__)

    def failed_by(self, kind: str) -> None:
        self._failures.labels(kind if kind in KINDS else OTHER).inc()


class _VersionMetrics(_WeightMetrics):
    """The metrics of the newest version at an end of the chain."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        what = "How many times smaller the last version was than the weights themselves."
        self._ratio = metrics.gauge("rose_weights_ratio", what)
        self._version = metrics.gauge("rose_weights_version", "The newest version here.")

    def _moved(self, version: PublishedVersion | Received) -> None:
        self._ratio.set(version.ratio)
        self._version.set(version.version.version)
        self.spent(version.seconds)


class _Arrivals:
    """The metrics of versions that arrived, at a worker or at all workers of a gateway."""

    def __init__(self, metrics: Metrics) -> None:
        what = "How long the engine stood still for new weights."
        self.versions = metrics.counter("rose_weights_received_versions", "Versions that arrived whole.")
        self.bytes = metrics.counter("rose_weights_received_bytes", "Bytes read from the relay.")
        self.pause = metrics.histogram("rose_weights_pause_seconds", what, PAUSE_BUCKETS_S)


class PublishMetrics(_VersionMetrics):
    """The metrics of a publisher."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._bytes = metrics.counter("rose_weights_published_bytes", "Bytes pushed to the relay.", ["kind"])

    def published(self, published: PublishedVersion) -> None:
        self._bytes.labels(published.kind).inc(published.size_bytes)
        self._moved(published)


class ReceiveMetrics(_VersionMetrics):
    """The metrics of a receiver, and of the device that it works for."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._arrivals = _Arrivals(metrics)
        self._refused = metrics.counter("rose_weights_refused", "Manifests and payloads that must not be used.")
        self._lag = metrics.gauge("rose_weights_lag_versions", "Versions in the relay beyond the one that runs.")

    def received(self, received: Received) -> None:
        self._arrivals.versions.inc()
        self._arrivals.bytes.inc(received.size_bytes)
        self._moved(received)

    def looked(self, lag_versions: int, refused_new: int) -> None:
        self._lag.set(lag_versions)
        self._refused.inc(refused_new)

    def paused(self, seconds: float) -> None:
        self._arrivals.pause.observe(seconds)

    def swapped(self, stage_s: float, commit_s: float) -> None:
        """Count an engine's own copy of new weights, and the swap."""
        self.spent({"stage": stage_s, "commit": commit_s})
        self.paused(commit_s)


class FleetMetrics(_WeightMetrics):
    """The metrics of a gateway: what its workers reported, and how many versions each is behind (`lags`)."""

    def __init__(self, metrics: Metrics, lags: Callable[[], list[int]]) -> None:
        super().__init__(metrics)
        self._arrivals = _Arrivals(metrics)
        what = "Published versions beyond the one that the worker furthest behind runs."
        metrics.mirror("gauge", "rose_weights_lag_versions", what, lambda: max(lags(), default=0))
        what = "Workers that do not run the version that was published last."
        metrics.mirror("gauge", "rose_weights_workers_behind", what, lambda: sum(lag > 0 for lag in lags()))

    def taken(self, size_bytes: int, seconds: Mapping[str, float]) -> None:
        """Count a version that a worker runs for the first time; of its phases, `commit` is the swap."""
        self._arrivals.versions.inc()
        if 0 <= size_bytes <= SIZE_BYTES_MAX:
            self._arrivals.bytes.inc(size_bytes)
        self.spent(seconds)
        if _is_time(seconds.get("commit", -1.0)):
            self._arrivals.pause.observe(seconds["commit"])


def _is_time(spent_s: float) -> bool:
    """Return whether a reported time can be one; not-a-number fails both comparisons."""
    return 0.0 <= spent_s <= SPENT_S_MAX
