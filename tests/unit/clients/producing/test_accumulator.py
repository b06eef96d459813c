"""The accumulator, scenario by scenario. Time is a number that the test advances."""

import random
from collections.abc import Iterable

import pytest

from smq.clients.producing.accumulator import Accumulator, BatchingSettings, Polled
from smq.clients.producing.partition_queue import Batch, PartitionQueue, ProducerIdentity
from smq.clients.retry import REFUSALS_UNTIL_FINAL, Verdict
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import NodeId, key_partition
from smq.records import INT32_MAX, decode_batch, parse_header, validate_produced

T = "t"
NODE = "node-1"
FIRST = ProducerIdentity(producer_id=7, producer_epoch=0)
FRESH = ProducerIdentity(producer_id=8, producer_epoch=0)
BROKEN = SmqError(ErrorCode.TIMED_OUT, "the stream broke")
OVERLOADED = SmqError(ErrorCode.OVERLOADED, "busy")
OUT_OF_ORDER = SmqError(ErrorCode.OUT_OF_ORDER_SEQUENCE, "a hole")


class World:
    def __init__(self, *, partitions: int = 1, **changes: object) -> None:
        defaults: dict[str, object] = {"batch_bytes": 300, "linger_ms": 5.0, "delivery_timeout_ms": 1_000.0}
        settings = BatchingSettings(**{**defaults, **changes})  # type: ignore[arg-type]  # fields by name
        self.accumulator = Accumulator(settings, random.Random(1).random)
        self.now = 0.0
        self.leader: str | None = NODE
        self.topic = self.accumulator.topic(T)
        if partitions:
            self.accumulator.set_partition_count(T, partitions)
        if self.accumulator.settings.is_idempotent:
            self.accumulator.set_identity(FIRST)

    def add(self, *values: bytes, partition: int | None = 0, key: bytes | None = None) -> None:
        for value in values:
            self.accumulator.add(self.topic, key, value, (), partition, 1, value, self.now)

    def add_batches(self, *values: bytes, partition: int = 0) -> None:
        """Sends each value in a batch of its own, however small."""
        for value in values:
            self.add(value, partition=partition)
            self.queue(partition).seal()

    def queue(self, partition: int = 0) -> PartitionQueue:
        return self.topic.queues[partition]

    def poll(self, *, after_ms: float = 0.0) -> Polled:
        self.now += after_ms
        return self.accumulator.poll(self.now, lambda _topic, _partition: self.leader)

    def sends(self, *, after_ms: float = 0.0) -> list[Batch]:
        return [batch for _, batch in self.poll(after_ms=after_ms).sends]

    def refuse(self, batch: Batch, error: SmqError) -> Verdict | None:
        return self.accumulator.refused(batch, error, self.now)

    def prime(self, partition: int = 0) -> None:
        """One batch acknowledged: the leader knows the producer id."""
        self.add_batches(b"first", partition=partition)
        [batch] = self.sends()
        assert self.accumulator.acked(batch)


def values(batches: Iterable[Batch]) -> list[bytes | None]:
    return [r.value for b in batches for r in decode_batch(b.data)]


def test_idle_producer_does_not_linger() -> None:
    w = World()
    w.add(b"a", b"b")
    assert values(w.sends()) == [b"a", b"b"]


def test_batch_lingers_while_another_is_in_flight() -> None:
    w = World(partitions=2)
    w.prime()
    w.add(b"a")
    [flying] = w.sends()
    w.add(b"b", partition=1)
    w.add(b"c", partition=0)
    assert w.sends(after_ms=4.9) == []
    assert w.accumulator.next_wakeup_ms(w.now) == 5.0
    assert set(values(w.sends(after_ms=0.1))) == {b"b", b"c"}
    assert w.accumulator.acked(flying)


def test_batch_that_lingers_leaves_with_the_last_answer() -> None:
    w = World()
    w.prime()
    w.add(b"a")
    [flying] = w.sends()
    w.add(b"b", b"c")
    assert w.sends(after_ms=1.0) == []
    assert w.accumulator.acked(flying)
    assert w.accumulator.needs_poll
    assert values(w.sends()) == [b"b", b"c"]


def test_full_batch_is_sent_immediately() -> None:
    w = World()
    w.add(*[b"x" * 50] * 10)
    [batch] = w.sends()
    assert batch.count < 10
    assert len(batch.data) <= 300


def test_flush_sends_without_linger() -> None:
    w = World()
    w.add(b"a")
    assert [b.count for b in w.accumulator.mark_due()] == [1]
    assert values(w.sends()) == [b"a"]


def test_record_larger_than_a_batch_is_sent_alone() -> None:
    w = World()
    w.add(b"a", b"x" * 1_000, b"b")
    assert [b.count for b in w.queue().batches()] == [1, 1, 1]


def test_first_batch_is_sent_alone_until_the_leader_knows_the_producer() -> None:
    w = World()
    w.add_batches(b"a", b"b", b"c")
    [first] = w.sends()
    assert w.sends() == []
    w.accumulator.acked(first)
    assert values(w.sends()) == [b"b", b"c"]


def test_window_holds_five_batches_of_a_partition() -> None:
    w = World()
    w.prime()
    w.add_batches(*[b"%d" % i for i in range(8)])
    flying = w.sends()
    assert values(flying) == [b"%d" % i for i in range(5)]
    w.accumulator.acked(flying[0])
    assert values(w.sends()) == [b"5"]


def test_sequences_count_records_and_wrap() -> None:
    w = World()
    w.prime()
    w.queue().next_sequence = INT32_MAX
    w.add(b"a", b"b")
    w.queue().seal()
    w.add_batches(b"c")
    headers = [parse_header(b.data) for b in w.sends()]
    assert [h.base_sequence for h in headers] == [INT32_MAX, 1]
    assert headers[0].last_sequence == 0


def test_batches_are_valid_and_carry_the_identity() -> None:
    w = World(compression="zstd")
    w.add(*[b"x" * 40] * 4)
    [batch] = w.sends(after_ms=5)
    header = validate_produced(batch.data)
    assert (header.producer_id, header.producer_epoch, header.base_sequence, header.count) == (7, 0, 0, 4)


def test_retry_is_the_same_bytes_in_the_same_order_one_at_a_time() -> None:
    w = World(delivery_timeout_ms=1e9)
    w.prime()
    w.add_batches(b"a", b"b", b"c")
    first = w.sends()
    before = [b.data for b in first]
    for batch in first:
        assert w.refuse(batch, BROKEN) is Verdict.RETRY
    again = []
    for _ in first:
        [batch] = w.sends(after_ms=500)
        again.append(batch.data)
        w.accumulator.acked(batch)
    assert again == before
    assert w.accumulator.retries == 3


def test_nothing_is_resent_while_a_later_batch_is_in_flight() -> None:
    w = World()
    w.prime()
    w.add_batches(b"a", b"b")
    a, b = w.sends()
    w.refuse(a, OVERLOADED)
    assert w.sends(after_ms=500) == []
    w.refuse(b, OUT_OF_ORDER)
    assert values(w.sends(after_ms=400)) == [b"a"]


def test_append_lost_resends_everything_in_order() -> None:
    w = World()
    w.prime()
    w.add_batches(b"a", b"b", b"c")
    lost = SmqError(ErrorCode.APPEND_LOST, "truncated")
    for batch in reversed(w.sends()):
        w.refuse(batch, lost)
    seen: list[bytes | None] = []
    for _ in range(3):
        [batch] = w.sends(after_ms=300)
        seen += values([batch])
        w.accumulator.acked(batch)
    assert seen == [b"a", b"b", b"c"]


def test_hint_is_followed_without_a_pause_once() -> None:
    w = World()
    w.add_batches(b"a")
    hinted = SmqError(ErrorCode.NOT_LEADER, "moved", ErrorDetails(leader=NodeId(2), leader_address="node-2"))
    [batch] = w.sends()
    w.refuse(batch, hinted)
    w.leader = "node-2"
    [(address, batch)] = w.poll().sends
    assert address == "node-2"
    w.refuse(batch, hinted)
    assert w.sends() == []


def test_pause_from_the_server_is_respected() -> None:
    w = World()
    w.add_batches(b"a")
    [batch] = w.sends()
    w.refuse(batch, SmqError(ErrorCode.OVERLOADED, "busy", ErrorDetails(retry_after_ms=700)))
    assert w.sends(after_ms=699) == []
    assert len(w.sends(after_ms=1)) == 1


def test_too_large_batch_fails_and_the_next_continues_under_a_new_identity() -> None:
    w = World()
    w.prime()
    w.add_batches(b"large", b"next")
    large, following = w.sends()
    assert w.refuse(large, SmqError(ErrorCode.BATCH_TOO_LARGE, "too large")) is Verdict.FAIL
    assert w.refuse(following, OUT_OF_ORDER) is Verdict.RETRY
    polled = w.poll(after_ms=500)
    assert [(values([b]), e.code) for b, e in polled.failed] == [([b"large"], ErrorCode.BATCH_TOO_LARGE)]
    assert polled.need_identity == [w.queue()]
    assert polled.sends == []
    w.accumulator.give_identity(w.queue(), FRESH)
    [batch] = w.sends()
    header = validate_produced(batch.data)
    assert (header.producer_id, header.base_sequence) == (8, 0)
    assert values([batch]) == [b"next"]


def test_identity_is_abandoned_only_when_nothing_is_in_flight_under_it() -> None:
    """Otherwise the next batch would overtake the one in flight, which is refused and resent under the new identity."""
    w = World()
    w.prime()
    w.add_batches(b"large", b"following")
    large, following = w.sends()
    w.refuse(large, SmqError(ErrorCode.BATCH_TOO_LARGE, "too large"))
    w.add_batches(b"third")
    polled = w.poll()
    assert (polled.need_identity, polled.sends) == ([], [])
    w.refuse(following, OUT_OF_ORDER)
    assert w.poll(after_ms=500).need_identity == [w.queue()]
    w.accumulator.give_identity(w.queue(), FRESH)
    seen: list[bytes | None] = []
    for _ in range(2):
        [batch] = w.sends()
        seen += values([batch])
        w.accumulator.acked(batch)
    assert seen == [b"following", b"third"]


def test_neighbour_of_an_expired_batch_that_may_be_stored_is_reported_not_resent() -> None:
    w = World()
    w.prime()
    w.add_batches(b"old")
    w.now = 200.0
    w.add_batches(b"young")
    for batch in w.sends():
        w.refuse(batch, BROKEN)
    polled = w.poll(after_ms=900)
    polled.failed += w.poll().failed
    assert [(values([b]), e.code) for b, e in polled.failed] == [
        ([b"old"], ErrorCode.TIMED_OUT),
        ([b"young"], ErrorCode.TIMED_OUT),
    ]
    assert w.accumulator.is_empty or w.poll().sends == []


def test_expired_batch_that_was_never_sent_fails_definitely() -> None:
    w = World()
    w.leader = None
    w.add(b"a")
    polled = w.poll(after_ms=10)
    assert polled.unrouted == {T}
    [(_, error)] = w.poll(after_ms=1_000).failed
    assert error.code is ErrorCode.LEADER_UNAVAILABLE
    assert w.accumulator.is_empty
    assert w.accumulator.buffered_bytes == 0


def test_expired_batch_reports_the_last_definite_answer() -> None:
    w = World()
    w.add_batches(b"a")
    w.refuse(w.sends()[0], SmqError(ErrorCode.STORAGE_FULL, "the disk is full"))
    [(_, error)] = w.poll(after_ms=1_000).failed
    assert error.code is ErrorCode.STORAGE_FULL
    assert "the disk is full" in error.message


def test_expired_batch_whose_leader_is_gone_does_not_send_the_user_to_look_for_the_cluster() -> None:
    w = World()
    w.add_batches(b"a")
    w.refuse(w.sends()[0], SmqError(ErrorCode.UNREACHABLE, "no node answers at h:1"))
    [(_, error)] = w.poll(after_ms=1_000).failed
    assert error.code is ErrorCode.LEADER_UNAVAILABLE
    assert "no acknowledgement in 1000 ms of 1 record for" in error.message
    assert "h:1" in error.message


def test_batch_in_flight_does_not_expire_before_its_answer() -> None:
    w = World()
    w.add_batches(b"a")
    [batch] = w.sends()
    assert w.poll(after_ms=5_000).failed == []
    w.refuse(batch, BROKEN)
    [(_, error)] = w.poll().failed
    assert error.code is ErrorCode.TIMED_OUT


def test_out_of_order_at_the_head_is_final_only_when_repeated() -> None:
    w = World(delivery_timeout_ms=1e9)
    w.prime()
    w.add_batches(b"a")
    for _ in range(REFUSALS_UNTIL_FINAL - 1):
        [batch] = w.sends(after_ms=500)
        assert w.refuse(batch, OUT_OF_ORDER) is Verdict.RETRY
    [batch] = w.sends(after_ms=500)
    assert w.refuse(batch, OUT_OF_ORDER) is Verdict.FAIL
    [(_, error)] = w.poll().failed
    assert error.code is ErrorCode.OUT_OF_ORDER_SEQUENCE


def test_loss_that_acks_leader_allows_is_survived_under_a_new_identity() -> None:
    w = World(acks_all=False, delivery_timeout_ms=1e9)
    w.prime()
    w.add_batches(b"a")
    w.refuse(w.sends()[0], BROKEN)  # in doubt until the leader has said that the record is not there
    for _ in range(REFUSALS_UNTIL_FINAL):
        [batch] = w.sends(after_ms=500)
        w.refuse(batch, OUT_OF_ORDER)
    assert w.poll().need_identity == [w.queue()]
    w.accumulator.give_identity(w.queue(), FRESH)
    [batch] = w.sends(after_ms=500)
    assert (batch.identity, batch.sequence, values([batch])) == (FRESH, 0, [b"a"])


def test_fenced_producer_gets_that_error() -> None:
    w = World()
    w.add_batches(b"a", b"b")
    [batch] = w.sends()
    fenced = SmqError(ErrorCode.PRODUCER_FENCED, "taken over")
    assert w.refuse(batch, fenced) is Verdict.FENCED
    w.accumulator.fail_all(fenced)
    assert [e.code for _, e in w.poll().failed] == [ErrorCode.PRODUCER_FENCED] * 2
    assert w.accumulator.is_empty


def test_late_answers_change_nothing() -> None:
    w = World()
    w.add_batches(b"a")
    [batch] = w.sends()
    w.accumulator.fail_all(SmqError(ErrorCode.UNKNOWN_TOPIC, "deleted"))
    [(_, error)] = w.poll().failed
    assert error.code is ErrorCode.TIMED_OUT, "it was in flight: the outcome is unknown"
    assert not w.accumulator.acked(batch)
    assert w.refuse(batch, BROKEN) is None


def test_without_idempotence_one_batch_is_in_flight_and_carries_no_identity() -> None:
    w = World(is_idempotent=False, in_flight_max=1)
    w.add_batches(b"a", b"b")
    [batch] = w.sends()
    assert parse_header(batch.data).producer_id == -1
    w.refuse(batch, OVERLOADED)
    [again] = w.sends(after_ms=500)
    assert again is batch
    w.accumulator.acked(batch)
    assert values(w.sends()) == [b"b"]


def test_full_buffer_refuses_until_an_acknowledgement_frees_space() -> None:
    w = World(buffer_bytes_max=200)
    w.add(b"x" * 250)
    with pytest.raises(SmqError) as caught:
        w.add(b"y")
    assert caught.value.code is ErrorCode.OVERLOADED
    [batch] = w.sends(after_ms=5)
    w.accumulator.acked(batch)
    w.add(b"y")


def test_keys_are_partitioned_as_by_kafka() -> None:
    w = World(partitions=6)
    for i in range(50):
        key = b"key-%d" % i
        w.add(b"v", partition=None, key=key)
        assert w.topic.for_key(key).partition == key_partition(key, 6)
        assert w.topic.for_key(bytearray(key)) is w.topic.for_key(memoryview(key)) is w.topic.for_key(key)


def test_keyless_records_stick_until_the_batch_is_gone_and_spread_over_time() -> None:
    w = World(partitions=4)
    touched = set()
    for _ in range(200):
        w.add(b"x" * 50, partition=None)
        touched |= {q.partition for q in w.topic.queues if not q.is_empty}
        open_batches = [q for q in w.topic.queues if q.open is not None]
        assert len(open_batches) == 1
    assert touched == {0, 1, 2, 3}


@pytest.mark.parametrize("partition", [-1, 1, 99])
def test_partition_out_of_range_is_refused_with_the_range(partition: int) -> None:
    w = World()
    with pytest.raises(SmqError, match="partitions 0 to 0") as caught:
        w.add(b"a", partition=partition)
    assert caught.value.code is ErrorCode.UNKNOWN_PARTITION
    assert w.accumulator.buffered_bytes == 0


@pytest.mark.parametrize(
    ("key", "value", "headers", "timestamp"),
    [
        (b"k", "text", (), 1),
        (b"k", 5, (), 1),
        (b"k", b"v", [(b"bytes", b"v")], 1),
        (b"k", b"v", [("h", "text")], 1),
        (b"k", b"v", [("h",)], 1),
        (b"k", b"v", (), "now"),
        (b"k", b"v", (), 2**70),
        ("text", b"v", (), 1),
    ],
)
def test_record_that_cannot_be_encoded_is_refused_without_harm_to_others(
    key: object, value: object, headers: object, timestamp: object
) -> None:
    w = World()
    for before in (b"", b"before"):
        if before:
            w.add(before)
        with pytest.raises(SmqError) as caught:
            w.accumulator.add(w.topic, key, value, headers, None, timestamp, None, 0.0)  # type: ignore[arg-type]  # on purpose
        assert caught.value.code is ErrorCode.INVALID_REQUEST
    w.add(b"after")
    assert values(w.sends(after_ms=5)) == [b"before", b"after"]


def test_headers_nulls_and_times_survive() -> None:
    w = World()
    w.accumulator.add(w.topic, b"", None, (("h", b"v"), ("n", None)), 0, 1234, None, 0.0)
    [batch] = w.sends(after_ms=5)
    [record] = decode_batch(batch.data)
    assert (record.key, record.value, record.timestamp_ms) == (b"", None, 1234)
    assert list(record.headers) == [("h", b"v"), ("n", None)]


def test_records_wait_for_the_partition_count_and_are_then_assigned() -> None:
    w = World(partitions=0)
    w.add(b"a", b"b", partition=None)
    w.add(b"c", partition=5)
    assert w.poll().unrouted == {T}
    w.accumulator.set_partition_count(T, 2)
    polled = w.poll(after_ms=5)
    assert [(token, e.code) for token, e in polled.failed_waiting] == [(b"c", ErrorCode.UNKNOWN_PARTITION)]
    assert values([b for _, b in polled.sends]) == [b"a", b"b"]


def test_records_of_an_unknown_topic_expire() -> None:
    w = World(partitions=0)
    w.add(b"a", partition=None)
    assert w.accumulator.next_wakeup_ms(0.0) == 1_000.0
    [(token, error)] = w.poll(after_ms=1_000).failed_waiting
    assert (token, error.code) == (b"a", ErrorCode.NODE_NOT_READY)
    assert w.accumulator.is_empty
    assert w.accumulator.buffered_bytes == 0


def test_a_flush_follows_waiting_records_into_their_batches_or_to_their_failure() -> None:
    w = World(partitions=0)
    w.add(b"a", b"b", b"lost", partition=5)
    w.add(b"c")
    for record in w.accumulator.waiting():
        record.marks += (f"mark of {record.token!r}",)
    w.accumulator.fail_all(BROKEN, "another topic")
    assert not w.poll().ended_marks
    w.accumulator.set_partition_count(T, 1)
    polled = w.poll()
    assert [token for token, _ in polled.failed_waiting] == [b"a", b"b", b"lost"]
    assert polled.ended_marks == ["mark of b'a'", "mark of b'b'", "mark of b'lost'"]
    assert not w.poll().ended_marks
    [(_, batch)] = polled.sends
    assert batch.tokens == [(0, 1, b"c"), (0, 0, "mark of b'c'")]
    assert batch.is_due


def test_added_partitions_are_used() -> None:
    w = World()
    w.add(b"a", key=b"key-1", partition=None)
    w.accumulator.set_partition_count(T, 6)
    w.add(b"b", key=b"key-1", partition=None)
    assert w.topic.for_key(b"key-1").partition == key_partition(b"key-1", 6)


def test_run_fills_a_batch_and_stops_at_its_end() -> None:
    w = World()
    many = [b"%04d" % i for i in range(100)]
    taken = 0
    tokens = []
    while taken < len(many):
        got = w.accumulator.add_run(w.queue(), None, many, 1, taken, 50, "bulk", 0.0)
        taken += got
    assert sum(b.count for b in w.queue().batches()) == 100
    tokens = [t for b in w.queue().batches() for t in b.tokens]
    assert sum(count for _, count, _ in tokens) == 100
    sent: list[bytes | None] = []
    for _ in range(100):
        flying = w.sends(after_ms=5)
        sent += values(flying)
        for batch in flying:
            w.accumulator.acked(batch)
    assert sent == many
    assert w.accumulator.buffered_bytes == 0


def test_run_stops_when_the_buffer_is_full() -> None:
    w = World(buffer_bytes_max=100, batch_bytes=10_000)
    taken = w.accumulator.add_run(w.queue(), None, [b"x" * 20] * 50, 1, 0, 50, "bulk", 0.0)
    assert 0 < taken < 50
    assert w.accumulator.is_full


def test_run_with_a_bad_record_keeps_the_records_before_it() -> None:
    w = World()
    with pytest.raises(SmqError, match="record 2"):
        w.accumulator.add_run(w.queue(), None, [b"a", b"b", "c"], 1, 0, 9, "bulk", 0.0)  # type: ignore[list-item]  # on purpose
    assert values(w.sends(after_ms=5)) == [b"a", b"b"]


def test_no_wakeup_is_scheduled_while_only_an_answer_can_help() -> None:
    w = World()
    w.add_batches(b"a", b"b")
    w.sends()
    assert w.accumulator.next_wakeup_ms(w.now) is None
    assert not w.accumulator.is_empty


def test_open_batch_after_one_in_flight_wakes_at_its_linger() -> None:
    w = World()
    w.prime()
    w.add_batches(b"a")
    w.sends()
    w.now = 100.0
    w.add(b"b")
    assert w.accumulator.next_wakeup_ms(w.now) == 105.0
