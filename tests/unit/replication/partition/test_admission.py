"""What a leader makes of producers' batches: it judges, converts and orders them, and counts what becomes of them."""

import struct
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state.config_keys import INT64_MAX
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset, PartitionId
from smq.raft_state.topic_config import BatchRules, batch_rules
from smq.records import (
    CODECS,
    CRC_START,
    HEADER_BYTES,
    INT32_MAX,
    LENGTH_OVERHEAD,
    BatchError,
    BatchHeader,
    NewRecord,
    check_crc,
    decode_batch,
    encode_batch,
    parse_header,
    validate_produced,
    with_append_time,
    with_body,
)
from smq.replication.api import Acks, Produced, TimeKind, TimeOffset
from smq.replication.log import decoding
from smq.replication.log.decoding import DECODED_BATCH_BYTES_MAX
from smq.replication.log.producers import ProducerTable
from smq.replication.partition import admission
from smq.replication.partition import producing as producing_module
from smq.replication.partition.admission import AWAITED_NS_MAX, PreparedBatch, SendOrder, validated, with_bad_records
from smq.replication.partition.intake import Intake
from smq.replication.partition.log_search import _first_record
from smq.replication.partition.producing import BATCHES_MAX, RUNNING_MAX, Preparation, prepared
from smq.testing.virtual.clock import Scheduler
from tests.unit.replication.log.support import fold
from tests.unit.replication.partition.test_reads import Reader
from tests.unit.replication.support import ME, PEER_A, PEER_B, Answer, Host, batch, process_clock

# ----------------------------------------------------------------------------------------------------------- admission
# What a topic's settings make of a batch when its leader appends it: times that are refused, or replaced.
APPENDED = batch_rules({"message.timestamp.type": "LogAppendTime", "message.timestamp.before.max.ms": "0"})
AN_HOUR = 3_600_000
LIMITED = BatchRules(before_ms=AN_HOUR, after_ms=AN_HOUR)


@pytest.fixture
def alone() -> Host:
    """It leads an empty partition of one replica."""
    made = Host()
    made.create_partition(replication=1)
    return made


def produce(alone: Host, data: bytes, rules: BatchRules) -> Produced:
    answer = Answer()
    alone.give(prepared(PreparedBatch(data, rules)), Acks.LEADER, answer)
    alone.commit()
    alone.settle()
    assert isinstance(answer.result, Produced), answer.result
    return answer.result


def refusal(alone: Host, data: bytes, rules: BatchRules) -> SmqError:
    before = alone.live.log.appended_end
    with pytest.raises(SmqError) as e:
        alone.give(prepared(PreparedBatch(data, rules)), Acks.LEADER, Answer())
    assert alone.live.log.appended_end == before
    return e.value


def now_ms(alone: Host) -> int:
    return alone.clock.wall_ns() // 1_000_000


def stamped(*times_ms: int, sequence: int = 0) -> bytes:
    records = [NewRecord(None, b"v", ms) for ms in times_ms]
    return encode_batch(records, producer_id=5, producer_epoch=0, base_sequence=sequence)


def test_records_get_the_leaders_time(alone: Host) -> None:
    answer = produce(alone, stamped(17, 99), APPENDED)
    assert answer.is_append_time
    (stored,) = alone.live.log.read(Offset(0), Offset(2), 1 << 20)
    appended_ms = stored.ts_ns // 1_000_000
    assert appended_ms == answer.ts_ns // 1_000_000 > 99
    assert [record.timestamp_ms for record in decode_batch(bytes(stored.batch))] == [appended_ms] * 2
    assert alone.offset_at(TimeKind.TIMESTAMP_MS, appended_ms) == 0
    assert alone.offset_at(TimeKind.TIMESTAMP_MS, appended_ms + 1) == 2


def test_without_the_setting_the_producers_times_stay(alone: Host) -> None:
    assert not produce(alone, stamped(17, 99), BatchRules()).is_append_time
    (stored,) = alone.live.log.read(Offset(0), Offset(2), 1 << 20)
    assert [record.timestamp_ms for record in decode_batch(bytes(stored.batch))] == [17, 99]


def test_a_producer_does_not_claim_the_leaders_time(alone: Host) -> None:
    sent = stamped(now_ms(alone))
    claimed, _ = with_append_time(sent, parse_header(sent), now_ms(alone))
    assert refusal(alone, claimed, BatchRules()).code is ErrorCode.INVALID_TIMESTAMP
    produce(alone, claimed, APPENDED)


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ((-AN_HOUR - 1_000,), "behind the leader's clock: message.timestamp.before.max.ms=3600000"),
        ((0, -AN_HOUR - 1_000, 5), "behind the leader's clock"),
        ((AN_HOUR + 60_000,), "ahead of the leader's clock: message.timestamp.after.max.ms=3600000"),
        ((0, AN_HOUR + 60_000, 5), "ahead of the leader's clock"),
    ],
)
def test_a_time_beyond_the_limits_refuses_the_batch(alone: Host, times: tuple[int, ...], words: str) -> None:
    now = now_ms(alone)
    error = refusal(alone, stamped(*(now + ms for ms in times)), LIMITED)
    assert error.code is ErrorCode.INVALID_TIMESTAMP
    assert words in error.message
    produce(alone, stamped(*(now + ms for ms in times)), BatchRules(after_ms=INT64_MAX))


def test_by_default_a_batch_is_refused_that_is_dated_more_than_an_hour_ahead_without_being_opened(alone: Host) -> None:
    late = stamped(now_ms(alone), now_ms(alone) + AN_HOUR + 60_000)
    default = batch_rules({})
    assert prepared(PreparedBatch(late, default)).times is None
    assert refusal(alone, late, default).code is ErrorCode.INVALID_TIMESTAMP
    produce(alone, stamped(now_ms(alone) + AN_HOUR - 60_000), default)


def test_times_within_the_limits_and_records_without_a_time_are_taken(alone: Host) -> None:
    now = now_ms(alone)
    produce(alone, stamped(now - AN_HOUR // 2, now + AN_HOUR // 2, now), LIMITED)
    produce(alone, stamped(-1, -1, sequence=3), LIMITED)


def test_a_repeated_batch_is_not_judged_again(alone: Host) -> None:
    sent = stamped(now_ms(alone))
    first = produce(alone, sent, LIMITED)
    alone.scheduler.run_for_ms(2 * AN_HOUR)
    again = produce(alone, sent, LIMITED)
    assert (again.base_offset, again.duplicate) == (first.base_offset, True)
    assert refusal(alone, stamped(now_ms(alone) - 2 * AN_HOUR, sequence=1), LIMITED).code is ErrorCode.INVALID_TIMESTAMP


def test_a_repeated_batch_that_no_longer_decodes_is_not_judged_again(alone: Host) -> None:
    """The setting was switched on after its first attempt."""
    sent = encode_batch([NewRecord(None, b"v", 0)], producer_id=5, producer_epoch=0, base_sequence=0)
    broken = SmqError(ErrorCode.INVALID_BATCH, "it does not decode")
    first = produce(alone, sent, BatchRules())
    answer = Answer()
    alone.give(PreparedBatch(sent, BatchRules(codec=1), refusal=broken), Acks.LEADER, answer)
    alone.settle()
    assert answer.offsets == (first.base_offset, first.last_offset)
    assert answer.is_duplicate


DATED = BatchRules(before_ms=1_000, after_ms=1_000)
KEYED = BatchRules(needs_keys=True)
BOTH = BatchRules(before_ms=1_000, after_ms=1_000, needs_keys=True)
NO_KEY, OLD, NEW = "has no key", "ms behind the leader's clock", "ms ahead of the leader's clock"


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(
    ("rules", "records", "code", "bad"),
    [
        (KEYED, "..n.n", ErrorCode.INVALID_BATCH, {2: NO_KEY, 4: NO_KEY}),
        (DATED, "o.a.n", ErrorCode.INVALID_TIMESTAMP, {0: OLD, 2: NEW}),
        (BOTH, "n.oNa", ErrorCode.INVALID_TIMESTAMP, {0: NO_KEY, 2: OLD, 3: NO_KEY, 4: NEW}),
        (BatchRules(), "no.", ErrorCode.INVALID_BATCH, {}),
        (batch_rules({"message.timestamp.type": "LogAppendTime"}), "oa", ErrorCode.INVALID_BATCH, {}),
    ],
    ids=["keys", "times", "both", "no rule", "append time"],
)
def test_a_refusal_names_the_records_that_are_to_blame(
    rules: BatchRules, records: str, code: ErrorCode, bad: dict[int, str], codec: str
) -> None:
    """n: without a key, N: and with a bad time; o: too old; a: ahead. As Kafka's LogValidator answers: a missing
    key comes first, and a bad time of any record decides the code."""
    shift = {"o": -2_000, "a": 2_000, "N": -2_000}
    made = [NewRecord(None if c in "nN" else b"k", b"v", 50_000 + shift.get(c, 0)) for c in records]
    before = SmqError(ErrorCode.INVALID_BATCH, "why")
    found = with_bad_records(before, encode_batch(made, codec=codec), rules, 50_000)
    assert found.code is code
    assert {r.place: r.message for r in found.details.records}.keys() == bad.keys()
    assert all(bad[r.place] in r.message for r in found.details.records)
    assert (found is before) == (not bad)


def test_what_does_not_decode_or_has_too_many_bad_records_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    error = SmqError(ErrorCode.INVALID_BATCH, "why")
    sent = encode_batch([NewRecord(None, b"v" * 99, 0)] * 5, codec="gzip")
    for broken in (sent[:-9], b"", sent[:30]):
        assert with_bad_records(error, broken, KEYED, 0) is error
    monkeypatch.setattr(admission, "RECORD_ERRORS_MAX", 3)
    assert len(with_bad_records(error, sent, KEYED, 0).details.records) == 3
    assert "and 2 more of its 5 records are bad" in with_bad_records(error, sent, KEYED, 0).message


# --------------------------------------------------------------------------------------------------------- preparation
# Batches that are converted, or judged by their times, before they are appended: their bytes and their order.
A, B = PartitionId(b"a" * 20), PartitionId(b"b" * 20)
ZSTD = BatchRules(codec=CODECS["zstd"])
RECORDS = [NewRecord(b"k%d" % i, b"value " * 20, 1_000 + i, [("h", b"x")]) for i in range(50)]


def rules(**config: str) -> BatchRules:
    return batch_rules({key.replace("_", "."): value for key, value in config.items()})


class LateCompute:
    """Ends its jobs when, and in the order, that a test asks for."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def run(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.jobs.append(lambda: done(job()))

    def end(self, number: int) -> None:
        self.jobs.pop(number)()


@pytest.fixture
def compute() -> LateCompute:
    return LateCompute()


@pytest.mark.parametrize("target", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("source", CODECS)
def test_a_batch_is_stored_in_the_codec_of_its_topic(source: str, target: str) -> None:
    sent = encode_batch(RECORDS, codec=source, producer_id=7, producer_epoch=1, base_sequence=3)
    taken = prepared(PreparedBatch(sent, rules(compression_type=target)))
    assert taken.refusal is None
    header = validated(taken)
    assert header.codec == CODECS["none" if target == "uncompressed" else target]
    assert (header.producer_id, header.base_sequence, header.count) == (7, 3, 50)
    assert list(decode_batch(taken.data)) == list(decode_batch(sent))
    if parse_header(sent).codec == header.codec:
        assert taken.data is sent, "bytes that are right already are not touched"


@pytest.mark.parametrize(("codec", "levels"), [("gzip", ("1", "9")), ("lz4", ("1", "17")), ("zstd", ("-50", "19"))])
def test_the_level_of_a_codec_matters(codec: str, levels: tuple[str, str]) -> None:
    records = [NewRecord(None, b"%d some words that repeat %d" % (i * 7919 % 1009, i % 13), 0) for i in range(20_000)]
    sizes = []
    for level in levels:
        config = {"compression.type": codec, f"compression.{codec}.level": level}
        taken = prepared(PreparedBatch(encode_batch(records), batch_rules(config)))
        assert list(decode_batch(taken.data)) == list(decode_batch(encode_batch(records)))
        sizes.append(len(taken.data))
    assert sizes[1] < sizes[0]


def test_a_batch_that_does_not_decompress_is_refused() -> None:
    sent = encode_batch(RECORDS, codec="gzip")
    broken = with_body(parse_header(sent), sent, CODECS["gzip"], b"\x1f\x8bnot gzip" + bytes(200))
    taken = prepared(PreparedBatch(broken, ZSTD))
    assert taken.refusal is not None
    assert taken.refusal.code is ErrorCode.INVALID_BATCH
    assert taken.data is broken, "its sequence is judged first: it may be a repetition"


def test_a_batch_that_is_not_right_in_itself_is_left_to_the_usual_checks() -> None:
    for bad in (b"", b"x" * 30, encode_batch(RECORDS)[:-1], bytes(HEADER_BYTES)):
        taken = prepared(PreparedBatch(bad, ZSTD))
        assert (taken.data, taken.refusal) == (bad, None)
        with pytest.raises(SmqError):
            validated(taken)


def test_a_batch_that_is_too_large_in_the_codec_of_its_topic_is_refused() -> None:
    sent = encode_batch([NewRecord(None, bytes(10_000), 0)], codec="gzip")
    limit = len(sent) + 100
    taken = prepared(PreparedBatch(sent, BatchRules(codec=CODECS["none"], bytes_max=limit)))
    assert taken.refusal is not None
    assert taken.refusal.code is ErrorCode.BATCH_TOO_LARGE
    assert str(limit) in taken.refusal.message


def test_a_bomb_is_refused_before_it_fills_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "DECODED_BATCH_BYTES_MAX", 50_000)
    refusal = prepared(PreparedBatch(encode_batch([NewRecord(None, bytes(100_000), 0)], codec="lz4"), ZSTD)).refusal
    assert refusal is not None
    assert refusal.code is ErrorCode.BATCH_TOO_LARGE
    assert "uncompressed" in refusal.message


def test_the_times_of_a_batch_are_those_of_its_records_and_of_its_header() -> None:
    limited = BatchRules(before_ms=5)
    mixed = [NewRecord(None, b"v", ms) for ms in (500, 100, 900)]
    assert prepared(PreparedBatch(encode_batch(mixed, codec="lz4"), limited)).times == (100, 900)
    assert prepared(PreparedBatch(encode_batch([NewRecord(None, b"v", -1)]), limited)).times is None
    assert prepared(PreparedBatch(encode_batch(mixed), ZSTD)).times is None, "without limits, they are not read"


def test_a_batch_that_claims_more_records_than_it_holds_has_no_times() -> None:
    sent = encode_batch(RECORDS)
    lying = with_body(parse_header(sent), sent, CODECS["none"], encode_batch(RECORDS[:49])[HEADER_BYTES:] + bytes(400))
    refusal = prepared(PreparedBatch(lying, BatchRules(after_ms=1))).refusal
    assert refusal is not None
    assert refusal.code is ErrorCode.INVALID_BATCH


def test_batches_of_a_partition_keep_their_order_and_other_partitions_do_not_wait(compute: LateCompute) -> None:
    preparation = Preparation(compute)
    seen: list[str] = []

    def start(pid: PartitionId, name: str, rules: BatchRules) -> None:
        assert preparation.concerns(pid, rules)
        preparation.start(pid, PreparedBatch(encode_batch(RECORDS), rules), lambda _batch: seen.append(name))

    assert not preparation.concerns(A, BatchRules())
    start(A, "first", ZSTD)
    start(A, "second", ZSTD)
    start(A, "plain", BatchRules())  # the setting has changed meanwhile
    start(B, "elsewhere", ZSTD)
    compute.end(1)
    assert seen == []
    compute.end(1)
    assert seen == ["elsewhere"]
    compute.end(0)
    assert seen == ["elsewhere", "first", "second", "plain"]
    assert not preparation.concerns(A, BatchRules()), "nothing waits any more"


def test_too_many_batches_are_refused_until_some_have_ended(compute: LateCompute) -> None:
    preparation = Preparation(compute)
    ended: list[PreparedBatch | SmqError] = []
    for _ in range(BATCHES_MAX):
        preparation.start(A, PreparedBatch(b"", ZSTD), ended.append)
    with pytest.raises(SmqError) as refused:
        preparation.start(B, PreparedBatch(b"", ZSTD), ended.append)
    assert (refused.value.code, refused.value.details.retry_after_ms) == (ErrorCode.OVERLOADED, 50)
    compute.end(0)
    preparation.start(B, PreparedBatch(b"", ZSTD), ended.append)
    assert len(ended) == 1


def test_few_jobs_run_together_and_every_one_runs(compute: LateCompute) -> None:
    preparation = Preparation(compute)
    ended: list[PreparedBatch | SmqError] = []
    for number in range(20):
        preparation.start((A, B)[number % 2], PreparedBatch(encode_batch(RECORDS), ZSTD), ended.append)
        assert len(compute.jobs) == min(number + 1, RUNNING_MAX)
    while compute.jobs:
        compute.end(len(compute.jobs) - 1)
    assert len(ended) == 20


def test_results_that_wait_for_their_turn_hold_back_further_jobs(
    compute: LateCompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = encode_batch([NewRecord(None, bytes(50_000), 0)], codec="gzip")
    uncompressed = BatchRules(codec=CODECS["none"])
    monkeypatch.setattr(producing_module, "BYTES_MAX", 100_000)
    preparation = Preparation(compute)
    ended: list[PreparedBatch | SmqError] = []
    for _ in range(12):
        preparation.start(A, PreparedBatch(plain, uncompressed), ended.append)
    for _ in range(2):
        compute.end(1)
    assert (len(compute.jobs), len(ended)) == (2 + 1, 0), "one result was below the bound, the second one was not"
    compute.end(0)
    assert len(ended) == 3
    while compute.jobs:
        compute.end(0)
    assert len(ended) == 12


def test_a_stopping_node_answers_every_batch_once(compute: LateCompute) -> None:
    preparation = Preparation(compute)
    ended: list[PreparedBatch | SmqError] = []
    stopping = SmqError(ErrorCode.SHUTTING_DOWN, "bye")
    preparation.start(A, PreparedBatch(encode_batch(RECORDS), ZSTD), ended.append)
    preparation.close(stopping)
    compute.end(0)
    assert ended == [stopping]
    with pytest.raises(SmqError):
        preparation.start(A, PreparedBatch(encode_batch(RECORDS), ZSTD), ended.append)


def test_a_converted_batch_has_a_right_checksum() -> None:
    taken = prepared(PreparedBatch(encode_batch(RECORDS), ZSTD))
    check_crc(taken.data, parse_header(taken.data))


@given(
    source=st.sampled_from(list(CODECS)),
    target=st.sampled_from(list(CODECS)),
    cut=st.integers(0, 2_000),
    noise=st.binary(max_size=40),
    is_limited=st.booleans(),
)
def test_whatever_a_producer_sends_is_converted_or_refused(
    source: str, target: str, cut: int, noise: bytes, is_limited: bool
) -> None:
    """Its checksum is right, and its records are not. Nothing may end the node."""
    sent = encode_batch(RECORDS, codec=source)
    body = sent[HEADER_BYTES:]
    at = cut % len(body)
    hostile = with_body(parse_header(sent), sent, CODECS[source], body[:at] + noise + body[at + len(noise) :])
    wanted = BatchRules(codec=CODECS[target], before_ms=1 if is_limited else BatchRules().before_ms)
    taken = prepared(PreparedBatch(hostile, wanted))
    if taken.refusal is None and taken.data is not hostile:
        header = validated(taken)
        assert (header.codec, header.count) == (CODECS[target], len(RECORDS))
    elif taken.refusal is not None:
        assert taken.refusal.code in (ErrorCode.INVALID_BATCH, ErrorCode.BATCH_TOO_LARGE)


# --------------------------------------------------------------------------------------------- malformed records
# With a valid checksum they harm only their own readers.
def with_records(body: bytes, codec: int) -> bytes:
    """A batch of one record, created at 1,000 ms, whose records are `body`."""
    data = bytearray(batch()[:HEADER_BYTES] + body)
    struct.pack_into(">i", data, 8, len(data) - LENGTH_OVERHEAD)
    struct.pack_into(">h", data, CRC_START, codec)
    struct.pack_into(">I", data, 17, crc32c(memoryview(data)[CRC_START:]))
    return bytes(data)


def bomb() -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    mib = b"\0" * (1 << 20)
    parts = [packer.compress(mib) for _ in range(1 + (DECODED_BATCH_BYTES_MAX >> 20))]
    return b"".join([*parts, packer.flush()])


@pytest.mark.parametrize("codec", range(5))
def test_a_look_up_by_create_time_points_at_a_batch_that_does_not_decode(codec: int) -> None:
    reader = Reader()
    reader.commit(batch(count=2), with_records(b"\x07nonsense", codec))
    assert reader.host.offset_at(TimeKind.TIMESTAMP_MS, 1_000) == 0
    reader = Reader()
    reader.commit(with_records(b"\x07nonsense", codec))
    assert reader.host.offset_at(TimeKind.TIMESTAMP_MS, 1_000) == 0


def test_a_look_up_by_create_time_does_not_unpack_a_bomb() -> None:
    reader = Reader()
    reader.commit(with_records(bomb(), 1))
    found = reader.host.find_time(TimeKind.TIMESTAMP_MS, 1_000)
    assert isinstance(found, TimeOffset)
    assert (found.offset, found.timestamp_ms) == (0, 1_000)


def test_a_look_up_does_not_keep_the_records_of_a_batch() -> None:
    """Records that hold nothing take 7 bytes in the batch, and some 200 in memory."""
    reader = Reader()
    records = [NewRecord(None, None, 1_000), *[NewRecord(None, None, 900)] * 99_999]
    reader.commit(encode_batch(records, codec="zstd"))
    reader.host.move_log_start(1)
    reader.host.offset_at(TimeKind.MAX_TIMESTAMP, 0)  # what the first one imports is not of the batch
    tracemalloc.start()
    try:
        assert reader.host.offset_at(TimeKind.MAX_TIMESTAMP, 0) == 1
        assert tracemalloc.get_traced_memory()[1] < 20 * len(records)
    finally:
        tracemalloc.stop()


def claiming(data: bytes, count: int) -> bytes:
    """The same batch with another number of records in its header."""
    changed = bytearray(data)
    struct.pack_into(">i", changed, 23, count - 1)
    struct.pack_into(">i", changed, 57, count)
    struct.pack_into(">I", changed, 17, crc32c(memoryview(changed)[CRC_START:]))
    return bytes(changed)


def test_a_backlog_counts_from_a_batch_with_gaps_that_does_not_decode() -> None:
    data = memoryview(with_records(b"\x07nonsense", 1))
    header = replace(parse_header(data), last_offset_delta=2)
    assert _first_record(data, header, Offset(1)) == 1


def test_a_batch_that_claims_more_records_than_fit_takes_no_offsets() -> None:
    with pytest.raises(BatchError, match="2000000000 records cannot lie in"):
        validate_produced(claiming(batch(count=3), 2_000_000_000))
    assert validate_produced(claiming(batch(count=3), 3)).count == 3
    smallest = encode_batch([NewRecord(None, None, 0)] * 10)
    assert validate_produced(smallest).count == 10
    with pytest.raises(BatchError):
        validate_produced(claiming(smallest, 11))


# ---------------------------------------------------------------------------------------------------------- send order
# Refused batches of idempotent producers: those that were sent after them wait until they have come again.
PID, OTHER = PartitionId(b"p" * 20), PartitionId(b"q" * 20)


def sent(sequence: int, *, producer: int = 7, epoch: int = 0) -> bytes:
    return batch(producer_id=producer, producer_epoch=epoch, base_sequence=sequence)


def header(sequence: int, *, producer: int = 7, epoch: int = 0) -> BatchHeader:
    return parse_header(sent(sequence, producer=producer, epoch=epoch))


class World:
    """A memory of refused batches, and the table of a log that knows no producer yet."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.order = SendOrder(process_clock(self.scheduler))
        self.table = ProducerTable()

    def is_refused(self, sequence: int, pid: PartitionId = PID, *, producer: int = 7, epoch: int = 0) -> bool:
        try:
            self.order.check(pid, header(sequence, producer=producer, epoch=epoch), self.table, Offset(0))
        except SmqError as e:
            if e.code is not ErrorCode.OVERLOADED:
                raise
            return True
        return False

    def append(self, sequence: int) -> None:
        """In the log of PID."""
        assert not self.is_refused(sequence)
        fold(self.table, header(sequence), ts_ns=1)  # type: ignore[arg-type]  # any time
        self.order.came(PID, header(sequence))


@pytest.fixture
def world() -> World:
    return World()


def test_later_batches_wait_until_the_refused_one_is_in_the_log(world: World) -> None:
    world.order.expect(PID, sent(0))
    assert [world.is_refused(n) for n in (1, 2, 1)] == [True] * 3
    world.append(0)
    world.append(1)
    assert world.order._awaited == {}


def test_the_first_of_several_refused_batches_is_remembered(world: World) -> None:
    for sequence in (3, 2, 4):
        world.order.expect(PID, sent(sequence))
    assert [world.is_refused(n) for n in (1, 2, 3)] == [False, False, True]


def test_others_are_not_concerned(world: World) -> None:
    world.order.expect(PID, sent(0))
    assert not world.is_refused(1, OTHER)
    assert not world.is_refused(1, producer=8)
    assert not world.is_refused(0, epoch=1)
    assert not world.is_refused(1), "under its new epoch the producer has begun again"


def test_batches_without_a_producer_and_bytes_that_are_none_are_not_remembered(world: World) -> None:
    for data in (batch(), b"", b"short", b"\0" * 61):
        world.order.expect(PID, data)
    assert world.order._awaited == {}


def test_a_batch_that_another_leader_took_is_no_longer_awaited(world: World) -> None:
    world.order.expect(PID, sent(0))
    for sequence in (0, 1, 2):
        fold(world.table, header(sequence), ts_ns=1)  # type: ignore[arg-type]  # any time
    assert not world.is_refused(3)


def test_a_known_producers_gap_is_retriable_while_the_missing_batch_is_awaited(world: World) -> None:
    world.append(0)
    world.order.expect(PID, sent(1))
    assert world.is_refused(2)
    world.append(1)
    with pytest.raises(SmqError, match="OUT_OF_ORDER_SEQUENCE"):
        world.is_refused(3)


def test_sequences_wrap(world: World) -> None:
    world.order.expect(PID, sent(INT32_MAX))
    assert world.is_refused(0)
    assert not world.is_refused(INT32_MAX - 1)


def test_a_producer_that_never_comes_again_is_forgotten(world: World) -> None:
    world.order.expect(PID, sent(0))
    world.scheduler.run_for_ms(AWAITED_NS_MAX / 2e6)
    assert world.is_refused(1), "a later batch does not make it wait longer"
    world.order.expect(PID, sent(1))
    world.scheduler.run_for_ms(AWAITED_NS_MAX / 2e6)
    assert not world.is_refused(1)


def test_when_too_many_are_refused_unknown_producers_begin_at_0(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "AWAITED_MAX", 2)
    for producer in (1, 2, 3):
        world.order.expect(PID, sent(0, producer=producer))
    assert len(world.order._awaited) == 2
    assert [world.is_refused(n, producer=3) for n in (1, 0)] == [True, False]
    assert world.is_refused(5, producer=99)
    world.scheduler.run_for_ms(AWAITED_NS_MAX / 1e6)
    assert not world.is_refused(5, producer=99)


def test_batches_for_a_name_that_is_unknown_yet_are_awaited_under_its_id(world: World) -> None:
    world.order.expect_by_name("t", 0, sent(0))
    world.order.place("t", 1, OTHER)
    assert not world.is_refused(1, OTHER)
    world.order.place("t", 0, PID)
    assert world.is_refused(1)
    assert world.order._unplaced == {}


def test_names_that_never_come_into_being_are_not_collected(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "AWAITED_MAX", 2)
    for i in range(3):
        world.order.expect_by_name(f"t{i}", 0, sent(0))
    assert sum(map(len, world.order._unplaced.values())) == 1
    assert world.is_refused(1)


# ---------------------------------------------------------------------------------------------- one replica
def test_a_lost_append_is_awaited(host: Host) -> None:
    lost = host.produce(sent(0))
    host.settle()
    host.elect(PEER_A)
    host.elect(1, end=0)  # type: ignore[arg-type]  # this node
    host.settle(0)
    assert lost.error == "APPEND_LOST"
    with pytest.raises(SmqError, match="OVERLOADED"):
        host.produce(sent(1))
    again, after = host.produce(sent(0)), host.produce(sent(1))
    host.settle()
    host.ack(PEER_A, 2)
    host.advance(2)
    host.settle(0)
    assert (again.offsets, after.offsets) == ((0, 0), (1, 1))


def test_a_timed_out_append_that_is_there_delays_no_other(host: Host) -> None:
    first = host.produce(sent(0), timeout_ms=10)
    host.settle()
    assert first.error == "TIMED_OUT"
    assert host.produce(sent(1)).result is None


def test_a_batch_parked_by_a_hand_over_that_is_refused_in_the_end_is_awaited(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_B, 0)
    assert host.live.transfer(PEER_B)
    parked = host.produce(sent(0))
    full, host.intake = host.intake, Intake(host.disk, 0)
    host.settle(2_000)
    assert parked.error == "OVERLOADED"
    host.intake = full
    with pytest.raises(SmqError, match="has to come first"):
        host.produce(sent(1))
    host.produce(sent(0))
    assert host.produce(sent(1)).result is None


def test_without_acknowledgements_nothing_is_awaited(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_B, 0)
    assert host.live.transfer(PEER_B)
    host.produce(sent(0), acks=Acks.NONE)
    full, host.intake = host.intake, Intake(host.disk, 0)
    host.settle(2_000)
    host.intake = full
    answer = host.produce(sent(1), acks=Acks.NONE)
    host.settle(0)
    assert isinstance(answer.result, Produced)


# ------------------------------------------------------------------------------------------------------------- results
# What became of producers' batches is counted, each once, wherever its answer comes from.
SEQUENCED = encode_batch([NewRecord(b"k", b"v", 1)], producer_id=7, producer_epoch=0, base_sequence=0)


def results(host: Host) -> dict[str, int]:
    """Those that occurred."""
    return {result: count for (result,), count in host.measures.produced.values.items() if count}


def commit(host: Host, end: int) -> None:
    host.settle()
    host.ack(PEER_A, end)
    host.advance(end)
    host.settle()


def test_a_batch_is_counted_when_it_is_answered(host: Host) -> None:
    answer = host.produce()
    assert (answer.result, results(host)) == (None, {})
    commit(host, 1)
    assert answer.offsets == (0, 0)
    assert results(host) == {"stored": 1}


def test_a_repeated_batch_is_a_duplicate_whether_it_waits_or_not(host: Host) -> None:
    host.produce(SEQUENCED)
    host.produce(SEQUENCED)
    commit(host, 1)
    assert results(host) == {"stored": 1, "duplicate": 1}
    host.produce(SEQUENCED)
    assert results(host) == {"stored": 1, "duplicate": 2}


def test_batches_whose_producers_want_no_answer_are_counted_too(host: Host) -> None:
    for _ in range(2):
        host.produce(SEQUENCED, Acks.NONE)
    assert results(host) == {"stored": 1, "duplicate": 1}


def test_a_lost_batch_is_counted_by_its_error_and_not_as_stored(host: Host) -> None:
    host.produce()
    host.elect(PEER_A)
    host.elect(ME)
    host.settle()
    assert results(host) == {"APPEND_LOST": 1}


def test_a_batch_that_no_majority_stores_in_time_is_counted_once(host: Host) -> None:
    host.produce(timeout_ms=100)
    host.settle()
    commit(host, 1)
    assert results(host) == {"TIMED_OUT": 1}


def test_parked_batches_are_counted_when_they_are_refused(host: Host) -> None:
    host.produce()
    commit(host, 1)
    assert host.live.transfer(PEER_A)
    host.produce()
    host.live.close(SmqError(ErrorCode.LEADER_UNAVAILABLE, "the node stops"))
    assert results(host) == {"stored": 1, "LEADER_UNAVAILABLE": 1}
