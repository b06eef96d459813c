"""The benchmark of the metrics' cost replaces methods of the instruments: they must be where it looks for them."""

from benchmarks.metrics import codes, exchange
from smq.replication.monitoring.measures import Histogram


def test_what_the_benchmark_takes_out_can_be_taken_out_and_put_back() -> None:
    counted, plain = codes()
    histogram = Histogram("a", "b")
    exchange(plain)
    histogram.observe(1)
    exchange(counted)
    histogram.observe(2)
    assert (histogram.rows[()].count, histogram.rows[()].total) == (1, 2)
