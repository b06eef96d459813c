"""The counters and histograms of a process, in the form that Prometheus reads.

Owns the translation from the plain numbers of `replication.monitoring.measures`: units, cumulative buckets, labels.
Only the composition root makes one.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from smq.replication.monitoring.measures import Counter, Histogram, all_instruments


class InstrumentCollector(Collector):
    """`groups` are dataclasses of instruments."""

    def __init__(self, groups: Iterable[object]) -> None:
        self._instruments = all_instruments(groups)

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is read before the first scrape

    def collect(self) -> Iterator[Metric]:
        for instrument in self._instruments:
            yield family_of(instrument)


def family_of(instrument: Counter | Histogram) -> Metric:
    """The instrument as it is now."""
    if isinstance(instrument, Counter):
        counter = CounterMetricFamily(instrument.name, instrument.text, labels=instrument.labels)
        for labels, count in instrument.values.items():
            counter.add_metric(labels, count)
        return counter
    histogram = HistogramMetricFamily(instrument.name, instrument.text, labels=instrument.labels)
    bounds = [*(f"{bound / instrument.divisor:g}" for bound in instrument.bounds), "+Inf"]
    for labels, series in list(instrument.rows.items()):
        buckets = list(zip(bounds, accumulate(series.buckets), strict=True))
        histogram.add_metric(labels, buckets, sum_value=series.total / instrument.divisor)
    return histogram
