"""Prometheus metrics of one process: a registry of its own, buckets that fit latencies, and the text that is scraped.

Every process makes one `Metrics` and hands it down; nothing registers itself globally, so tests and two devices in one
process do not meet. What the engine already counts is not counted again: `mirror` reads it at every scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST

# Upper edges in seconds. Fine around the budgets people set (TTFT 0.5 s, TPOT 0.15 s), coarse far from them.
FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0)
TOKEN_GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
REQUEST_BUCKETS_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0)
TOKEN_COUNT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

MirrorKind = Literal["counter", "gauge"]
Read = Callable[[], float | None]


class Metrics:
    """The metrics of one process."""

    def __init__(self, *, process_facts: bool = True) -> None:
        self.registry = CollectorRegistry()
        if process_facts:
            ProcessCollector(registry=self.registry)

    def counter(self, name: str, what: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, what, labels, registry=self.registry)

    def gauge(self, name: str, what: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(name, what, labels, registry=self.registry)

    def histogram(self, name: str, what: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        return Histogram(name, what, labels, buckets=buckets, registry=self.registry)

    def mirror(
        self,
        kind: MirrorKind,
        name: str,
        what: str,
        read: Read,
        labels: dict[str, str] | None = None,
    ) -> None:
        """Show a number that is kept elsewhere; `read` is called at every scrape, and None leaves it out."""
        self.registry.register(_Mirror(kind, name, what, [(labels or {}, read)]))

    def mirror_by(self, kind: MirrorKind, name: str, what: str, label: str, reads: dict[str, Read]) -> None:
        """Show one number per value of a label, each kept elsewhere."""
        self.registry.register(_Mirror(kind, name, what, [({label: value}, read) for value, read in reads.items()]))

    def info(self, name: str, what: str, read: Callable[[], dict[str, str]]) -> None:
        """Show labels that are read at every scrape, with the value 1."""
        self.registry.register(_Info(name, what, read))

    def exposition(self) -> bytes:
        """Return the text that Prometheus scrapes, to be sent as CONTENT_TYPE."""
        return generate_latest(self.registry)


class _Mirror(Collector):
    def __init__(self, kind: MirrorKind, name: str, what: str, reads: Sequence[tuple[dict[str, str], Read]]) -> None:
        self.kind, self.name, self.what, self.reads = kind, name, what, reads

    def describe(self) -> Iterator[Metric]:
        yield self._family()

    def collect(self) -> Iterator[Metric]:
        family = self._family()
        for labels, read in self.reads:
            value = read()
            if value is not None:
                family.add_metric(list(labels.values()), value)
        if family.samples:
            yield family

    def _family(self) -> CounterMetricFamily | GaugeMetricFamily:
        family = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        return family(self.name, self.what, labels=list(self.reads[0][0]))


class _Info(Collector):
    def __init__(self, name: str, what: str, read: Callable[[], dict[str, str]]) -> None:
        self.name, self.what, self.read = name, what, read

    def describe(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(self.name, self.what)

    def collect(self) -> Iterator[Metric]:
        labels = self.read()
        family = GaugeMetricFamily(self.name, self.what, labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        yield family
