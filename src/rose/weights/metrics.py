"""What a publisher and a receiver show to Prometheus, all under `rose_weights_`.

    rose_weights_published_bytes_total{kind}     rose_weights_received_bytes_total
    rose_weights_ratio                           times smaller than the weights themselves, of the last version
    rose_weights_seconds{phase}                  read, encode, push, commit; list, fetch, decode, verify, prepare
    rose_weights_pause_seconds                   how long the engine stood still for a swap
    rose_weights_lag_versions                    versions there are beyond the one that runs
    rose_weights_version, rose_weights_failures_total{kind}, rose_weights_refused_total

A process has a publisher or a receiver, so both may use the same names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose.observe.metrics import Metrics

if TYPE_CHECKING:
    from rose.weights.publish import Published
    from rose.weights.receive import Received

PHASE_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
PAUSE_BUCKETS_S = (0.00001, 0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class _Common:
    def __init__(self, metrics: Metrics) -> None:
        what = "How many times smaller the last version was than the weights themselves."
        self._ratio = metrics.gauge("rose_weights_ratio", what)
        self._seconds = metrics.histogram("rose_weights_seconds", "Time by phase.", PHASE_BUCKETS_S, ["phase"])
        self._version = metrics.gauge("rose_weights_version", "The newest version here.")
        self._failures = metrics.counter("rose_weights_failures", "What went wrong, by kind of error.", ["kind"])

    def failed(self, error: BaseException) -> None:
        self._failures.labels(type(error).__name__).inc()

    def _observe(self, version: int, ratio: float, seconds: dict[str, float]) -> None:
        self._version.set(version)
        self._ratio.set(ratio)
        for phase, spent_s in seconds.items():
            self._seconds.labels(phase).observe(spent_s)


class PublishMetrics(_Common):
    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._bytes = metrics.counter("rose_weights_published_bytes", "Bytes pushed to the relay.", ["kind"])

    def published(self, published: Published) -> None:
        self._bytes.labels(published.kind).inc(published.size_bytes)
        self._observe(published.version.version, published.ratio, published.seconds)


class ReceiveMetrics(_Common):
    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._bytes = metrics.counter("rose_weights_received_bytes", "Bytes read from the relay.")
        self._refused = metrics.counter("rose_weights_refused", "Manifests and payloads that must not be used.")
        what = "How long the engine stood still for new weights."
        self._pause = metrics.histogram("rose_weights_pause_seconds", what, PAUSE_BUCKETS_S)
        self._lag = metrics.gauge("rose_weights_lag_versions", "Versions in the relay beyond the one that runs.")

    def received(self, received: Received) -> None:
        self._bytes.inc(received.size_bytes)
        self._observe(received.version.version, received.ratio, received.seconds)

    def looked(self, lag_versions: int, refused_new: int) -> None:
        self._lag.set(lag_versions)
        self._refused.inc(refused_new)

    def paused(self, seconds: float) -> None:
        self._pause.observe(seconds)
