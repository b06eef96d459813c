"""Counters and histograms, and the stages of a batch's way."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state.ids import Offset, PartitionId
from smq.replication.monitoring.measures import Counter, Histogram, NodeMeasures, Series, instruments, sized
from smq.replication.partition.waiters import Stages
from tests.unit.replication.support import ME, PEER_A, Host


def test_a_counter_counts_by_the_values_of_its_labels() -> None:
    counter = Counter("c", "text", "command", "result")
    counter.add(2, "a", "ok")
    counter.add(1, "a", "failed")
    counter.add(1, "a", "ok")
    assert counter.values == {("a", "ok"): 3, ("a", "failed"): 1}


def test_a_counter_without_labels_begins_at_zero() -> None:
    counter = Counter("c", "text")
    assert counter.values == {(): 0}
    counter.amount += 3
    assert counter.values == {(): 3}


def test_a_value_on_a_bound_belongs_to_that_bucket_and_a_larger_one_to_the_last() -> None:
    histogram = sized("h", "text", bounds=(10, 100))
    for amount in (10, 11, 100, 101):
        histogram.observe(amount)
    series = histogram.series()
    assert (series.buckets, series.total, series.count) == ([1, 2, 1], 222, 4)


@given(st.lists(st.lists(st.integers(0, 130))))
def test_what_is_put_off_is_counted_as_if_it_had_been_observed_immediately(turns: list[list[int]]) -> None:
    observed, put_off = Series((10, 100, 120)), Series((10, 100, 120))
    for number, turn in enumerate(turns):
        for amount in turn:
            observed.observe(amount)
        put_off.later.extend(turn)
        if number % 2:
            put_off.fold()
    assert (put_off.total, put_off.count) == (observed.total, observed.count)
    assert put_off.buckets == observed.buckets


def test_a_reader_sees_what_was_put_off_in_each_figure() -> None:
    for read, found in ((lambda s: s.buckets, [1, 1]), (lambda s: s.total, 27), (lambda s: s.count, 2)):
        series = Series((10,))
        series.later += [20, 7]
        assert read(series) == found  # type: ignore[no-untyped-call]  # one of the three above


def test_the_instruments_of_a_group_have_distinct_names_and_a_text() -> None:
    found = list(instruments(NodeMeasures()))
    assert len({instrument.name for instrument in found}) == len(found)
    assert all(instrument.text.endswith(".") for instrument in found)


class Timed:
    """Stages under a clock that the test advances."""

    def __init__(self) -> None:
        self.now_ns = 1_000
        self.stage = Histogram("s", "text", "stage")
        clock: Any = self
        self.stages = Stages(clock, self.stage)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def totals(self) -> dict[tuple[str, ...], int]:
        return {labels: series.total for labels, series in self.stage.rows.items()}

    def at(self, now_ns: int) -> Stages:
        self.now_ns = now_ns
        return self.stages


@pytest.fixture
def timed() -> Timed:
    return Timed()


def test_each_stage_takes_the_time_between_its_events(timed: Timed) -> None:
    timed.at(1_000).begin(Offset(5))
    timed.at(1_100).note(Offset(4), Offset(4))  # an earlier batch
    timed.at(1_300).note(Offset(5), Offset(4))
    timed.at(1_700).note(Offset(5), Offset(6))
    answered_ns = timed.at(1_750).answered()
    timed.at(1_790).left(answered_ns)
    assert timed.totals() == {("fsync",): 300, ("replicate",): 700, ("commit",): 50, ("answer",): 40}
    assert not timed.stages.is_timing


def test_a_disk_that_is_slower_than_the_others_is_timed_to_its_end(timed: Timed) -> None:
    timed.at(1_000).begin(Offset(5))
    timed.at(1_200).note(Offset(0), Offset(5))
    assert timed.at(1_250).answered() == 1_250
    assert timed.stages.is_timing
    assert timed.at(1_300).answered() == 0  # a repetition of the same batch
    timed.at(9_000).note(Offset(5), Offset(5))
    assert timed.totals()[("fsync",)] == 8_000
    assert not timed.stages.is_timing


def test_a_batch_without_a_majority_has_no_commit_yet(timed: Timed) -> None:
    timed.at(1_000).begin(Offset(5))
    timed.at(1_100).note(Offset(5), Offset(0))
    assert timed.at(1_200).answered() == 1_200  # acks=1
    timed.at(1_500).note(Offset(5), Offset(5))
    assert timed.totals() == {("fsync",): 100, ("replicate",): 500}
    assert not timed.stages.is_timing


def test_the_samples_of_a_replica_that_loses_its_leadership_leave_place_for_the_next() -> None:
    """Otherwise the partition would never be timed again."""
    host = Host()
    host.create_partition()
    lost = host.produce(is_timed=True)
    assert host.live._waiters._stages.is_timing
    host.elect(PEER_A)
    host.elect(ME)
    host.settle()
    assert lost.error == "APPEND_LOST"
    assert not host.live._waiters._stages.is_timing


def test_what_a_partition_took_counts_on_when_this_node_has_it_no_longer() -> None:
    measures, pids = NodeMeasures(), [PartitionId(bytes([number]) * 20) for number in (1, 2)]
    for pid in pids:
        measures.traffic_of(pid).produced_records += 3
        measures.traffic_of(pid).produced_bytes += 50
    for pid in pids[:1] * 2:
        measures.forget_traffic(pid)
    assert list(measures.traffic) == pids[1:]
    assert (measures.produced_records.values, measures.produced_bytes.values) == ({(): 6}, {(): 100})
