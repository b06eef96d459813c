"""The record batch: golden bytes, every reason for a refusal, and that nothing else ever comes out of bad bytes."""

import gzip
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from aiokafka.record import default_records
from aiokafka.record.control_record import ABORT_MARKER, COMMIT_MARKER, ControlRecord
from aiokafka.record.default_records import DefaultRecordBatch
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from smq.records import (
    CODECS,
    CRC_START,
    HEADER_BYTES,
    INT32_MAX,
    PREFIX_BYTES,
    BatchCorrupt,
    BatchError,
    BatchHeader,
    NewRecord,
    Record,
    build_batch,
    check_crc,
    decode_batch,
    encode_batch,
    from_offset,
    is_commit_marker,
    keyed_records,
    marker_batch,
    parse_header,
    patched_prefix,
    validate_mirrored,
    validate_produced,
)

RECORDS = [
    NewRecord(b"key-1", b"value-1", 1_700_000_000_000, [("h", b"x"), ("none", None)]),
    NewRecord(None, b"", 1_700_000_000_005),
    NewRecord(b"", None, 1_699_999_999_999),
]

# One record: key b"k", value b"v", timestamp 1700000000000, producer 42, epoch 1, sequence 7.
GOLDEN = bytes.fromhex(
    "0000000000000000"  # base offset
    "0000003a"  # length: what follows
    "ffffffff"  # leader epoch: none yet
    "02"  # magic
    "b369fdd9"  # CRC-32C of what follows
    "0000"  # attributes
    "00000000"  # last offset delta
    "0000018bcfe56800"  # base timestamp
    "0000018bcfe56800"  # max timestamp
    "000000000000002a"  # producer id
    "0001"  # producer epoch
    "00000007"  # base sequence
    "00000001"  # records
    "10000000026b027600"  # the record: length 8, attributes, deltas, key, value, no headers
)


def batch(**fields: int) -> bytes:
    """A batch of one (unreadable) record with the given header fields, its CRC and length right."""
    f = {
        "attributes": 0,
        "last_offset_delta": 0,
        "base_timestamp": 0,
        "max_timestamp": 0,
        "producer_id": -1,
        "producer_epoch": -1,
        "base_sequence": -1,
        "count": 1,
        "magic": 2,
    } | fields
    rest = struct.pack(
        ">hiqqqhii",
        f["attributes"],
        f["last_offset_delta"],
        f["base_timestamp"],
        f["max_timestamp"],
        f["producer_id"],
        f["producer_epoch"],
        f["base_sequence"],
        f["count"],
    )
    return struct.pack(">qiibI", 0, len(rest) + 9, -1, f["magic"], crc32c(rest)) + rest


# ------------------------------------------------------------------------------------------------ golden
def test_the_golden_header_is_read_field_by_field() -> None:
    assert parse_header(GOLDEN) == BatchHeader(
        base_offset=0,
        length=58,
        epoch=-1,
        magic=2,
        crc=0xB369FDD9,
        attributes=0,
        last_offset_delta=0,
        base_timestamp=1_700_000_000_000,
        max_timestamp=1_700_000_000_000,
        producer_id=42,
        producer_epoch=1,
        base_sequence=7,
        count=1,
    )
    assert validate_produced(GOLDEN).size == len(GOLDEN) == 70
    assert list(decode_batch(GOLDEN)) == [Record(0, 1_700_000_000_000, b"k", b"v", [])]


def test_encoding_gives_the_golden_bytes() -> None:
    record = NewRecord(b"k", b"v", 1_700_000_000_000)
    assert encode_batch([record], producer_id=42, producer_epoch=1, base_sequence=7).hex() == GOLDEN.hex()


def test_ends_and_sequences_follow_from_the_header() -> None:
    header = parse_header(batch(last_offset_delta=4, count=5, base_sequence=INT32_MAX - 1))
    assert (header.last_offset, header.end, header.last_sequence) == (4, 5, 2)


@pytest.mark.parametrize(
    ("attributes", "control", "transactional"), [(0, False, False), (0x20, True, False), (0x10, False, True)]
)
def test_attributes_are_read(attributes: int, control: bool, transactional: bool) -> None:
    header = parse_header(batch(attributes=attributes | 3))
    assert (header.is_control, header.is_transactional, header.codec) == (control, transactional, 3)


def test_patching_moves_offset_and_epoch_and_leaves_the_crc_right() -> None:
    header = validate_produced(GOLDEN)
    patched = patched_prefix(1 << 41, header, 9) + GOLDEN[PREFIX_BYTES:]
    after = validate_produced(patched)
    assert (after.base_offset, after.epoch, after.end) == (1 << 41, 9, (1 << 41) + 1)
    assert [r.offset for r in decode_batch(patched)] == [1 << 41]


# ------------------------------------------------------------------------------------------- round trips
@pytest.mark.parametrize("codec", CODECS)
def test_records_survive_every_codec(codec: str) -> None:
    data = encode_batch(RECORDS, codec=codec)
    header = validate_produced(data)
    assert (header.count, header.codec) == (3, CODECS[codec])
    assert header.max_timestamp == 1_700_000_000_005
    decoded = list(decode_batch(data))
    assert [(r.offset, r.timestamp_ms, r.key, r.value) for r in decoded] == [
        (i, r.timestamp_ms, r.key, r.value) for i, r in enumerate(RECORDS)
    ]
    assert [list(r.headers) for r in decoded] == [[("h", b"x"), ("none", None)], [], []]


def test_batches_of_memoryviews_and_bytearrays_are_as_good_as_bytes() -> None:
    for data in (bytearray(GOLDEN), memoryview(GOLDEN)):
        assert validate_produced(data) == validate_produced(GOLDEN)
        assert list(decode_batch(data)) == list(decode_batch(GOLDEN))


def test_nothing_and_unknown_codecs_are_not_encoded() -> None:
    with pytest.raises(ValueError, match="at least one record"):
        encode_batch([])
    with pytest.raises(ValueError, match="unknown codec 'brotli'"):
        encode_batch(RECORDS, codec="brotli")


# --------------------------------------------------------------------------------------------- refusals
REFUSED: dict[str, tuple[bytes, type[BatchError], str]] = {
    "nothing": (b"", BatchCorrupt, "at least 61 bytes"),
    "a cut header": (GOLDEN[: HEADER_BYTES - 1], BatchCorrupt, "at least 61 bytes, this has 60"),
    "a cut batch": (GOLDEN[:-1], BatchCorrupt, "the header says 70 bytes, there are 69"),
    "bytes after it": (GOLDEN + b"\0", BatchCorrupt, "the header says 70 bytes, there are 71"),
    "format v1": (batch(magic=1), BatchError, "magic 1 is not supported"),
    "format v0": (batch(magic=0), BatchError, "magic 0 is not supported"),
    "a damaged record": (GOLDEN[:-3] + b"x" + GOLDEN[-2:], BatchCorrupt, "CRC-32C"),
    "a damaged CRC": (GOLDEN[:17] + b"x" + GOLDEN[18:], BatchCorrupt, "CRC-32C"),
    "no records": (batch(count=0, last_offset_delta=-1), BatchError, "at least one record"),
    "a negative count": (batch(count=-1, last_offset_delta=-2), BatchError, "at least one record"),
    "too large a delta": (batch(count=1, last_offset_delta=1), BatchError, "does not fit 1 records"),
    "too small a delta": (batch(count=3, last_offset_delta=1), BatchError, "does not fit 3 records"),
    "more records than bytes": (batch(count=3, last_offset_delta=2), BatchError, "3 records cannot lie"),
    "more records than gzip could hide": (batch(attributes=1, count=2000, last_offset_delta=1999), BatchError, "2000"),
    "more records than lz4 could hide": (
        batch(attributes=3, count=2**20, last_offset_delta=2**20 - 1),
        BatchError,
        "1048",
    ),
    "more records than any": (
        batch(attributes=4, count=2**31 - 1, last_offset_delta=2**31 - 2),
        BatchError,
        "cannot lie",
    ),
    "an unknown codec": (batch(attributes=5), BatchError, "codec 5 is unknown"),
    "a control batch": (batch(attributes=0x20), BatchError, "control batches"),
    "a transaction of no producer": (batch(attributes=0x10), BatchError, "needs a producer id"),
    "a producer without epoch": (batch(producer_id=1, base_sequence=0), BatchError, "needs a producer epoch"),
    "a producer without sequence": (batch(producer_id=1, producer_epoch=0), BatchError, "needs a producer epoch"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_a_batch_that_may_not_be_stored_is_refused_with_the_reason(case: tuple[bytes, type[BatchError], str]) -> None:
    data, error, message = case
    with pytest.raises(BatchError, match=message) as caught:
        validate_produced(data)
    assert type(caught.value) is error


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_marker_is_what_a_kafka_client_takes_for_one(is_commit: bool) -> None:
    data = marker_batch(producer_id=2**40, producer_epoch=7, is_commit=is_commit, timestamp_ms=1_700_000_000_000)
    header = parse_header(data)
    check_crc(data, header)
    assert (header.is_control, header.is_transactional, header.count, header.base_sequence) == (True, True, 1, -1)
    assert is_commit_marker(data) is is_commit
    found = DefaultRecordBatch(data)
    assert (found.is_control_batch, found.producer_id, found.producer_epoch) == (True, 2**40, 7)
    (record,) = found
    assert ControlRecord.parse(record.key) == (COMMIT_MARKER if is_commit else ABORT_MARKER)
    assert (record.value, record.timestamp) == (bytes(6), 1_700_000_000_000)
    with pytest.raises(BatchError, match="written by the log itself"):
        validate_produced(data)


def test_a_control_batch_of_another_kind_is_refused() -> None:
    data = marker_batch(producer_id=1, producer_epoch=0, is_commit=True, timestamp_ms=1)
    with pytest.raises(BatchError, match="of 79 bytes"):
        is_commit_marker(data + b"x")
    with pytest.raises(BatchError, match="type 5"):
        is_commit_marker(data[:69] + b"\x05" + data[70:])


def test_any_flipped_bit_under_the_crc_is_corrupt() -> None:
    for bit in range(CRC_START * 8, len(GOLDEN) * 8):
        damaged = bytearray(GOLDEN)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(BatchCorrupt):
            check_crc(damaged, parse_header(damaged))


def test_records_that_do_not_decode_are_corrupt() -> None:
    for damaged in (batch(count=5, last_offset_delta=4), batch(attributes=1), GOLDEN[:-4]):
        with pytest.raises(BatchCorrupt):
            list(decode_batch(damaged))


# ------------------------------------------------------------------------------------------------- fuzz
MUTATED = st.tuples(st.just(GOLDEN), st.lists(st.tuples(st.integers(0, len(GOLDEN) - 1), st.integers(0, 255))))
HEADERS = st.builds(
    batch,
    attributes=st.integers(-(1 << 15), (1 << 15) - 1),
    last_offset_delta=st.integers(-(1 << 31), INT32_MAX),
    count=st.integers(-(1 << 31), INT32_MAX),
    max_timestamp=st.integers(-(1 << 63), (1 << 63) - 1),
    producer_id=st.integers(-(1 << 63), (1 << 63) - 1),
    producer_epoch=st.integers(-(1 << 15), (1 << 15) - 1),
    base_sequence=st.integers(-(1 << 31), INT32_MAX),
    magic=st.integers(-128, 127),
)


def mutated(pair: tuple[bytes, list[tuple[int, int]]]) -> bytes:
    data = bytearray(pair[0])
    for at, byte in pair[1]:
        data[at] = byte
    return bytes(data)


BYTES = st.one_of(st.binary(max_size=200), MUTATED.map(mutated), HEADERS)


@given(BYTES, st.sampled_from([parse_header, validate_produced]))
def test_bad_bytes_raise_batch_errors_and_nothing_else(data: bytes, parse: Callable[[bytes], object]) -> None:
    try:
        parse(data)
    except BatchError:
        pass


@given(HEADERS)
def test_what_is_accepted_may_be_stored(data: bytes) -> None:
    try:
        header = validate_produced(data)
    except BatchError:
        return
    assert header.count >= 1
    assert header.end - header.base_offset == header.count
    assert not header.is_control
    assert header.producer_id < 0 or (header.producer_epoch >= 0 and 0 <= header.base_sequence <= INT32_MAX)


def with_records(head: bytes, records: bytes) -> bytes:
    """A batch with another body, its length and CRC right."""
    rest = head[CRC_START:HEADER_BYTES] + records
    return head[:8] + struct.pack(">iibI", len(rest) + 9, -1, 2, crc32c(rest)) + rest


@given(st.integers(0, 4), st.integers(1, 50), st.binary(max_size=120))
def test_records_of_random_bytes_decode_or_are_corrupt(codec: int, count: int, payload: bytes) -> None:
    head = batch(attributes=codec, count=count, last_offset_delta=count - 1)
    data = with_records(head, gzip.compress(payload) if codec == 1 else payload)
    try:
        assert len(list(decode_batch(data))) == count
    except BatchCorrupt:
        pass


@given(
    st.sampled_from(list(CODECS)), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255))), st.integers(0, 200)
)
def test_damaged_compressed_records_decode_or_are_corrupt(codec: str, damage: list[tuple[int, int]], cut: int) -> None:
    data = encode_batch(RECORDS, codec=codec)
    records = bytearray(data[HEADER_BYTES:])
    for at, byte in damage:
        records[at % len(records)] = byte
    try:
        list(decode_batch(with_records(data, bytes(records[: max(0, len(records) - cut)]))))
    except BatchCorrupt:
        pass


@pytest.mark.parametrize("codec", CODECS)
def test_the_best_that_a_codec_can_do_is_believed(codec: str) -> None:
    same = [NewRecord(key=None, value=b"", timestamp_ms=0)] * 200_000
    assert validate_produced(encode_batch(same, codec=codec)).count == len(same)


_THREADS = """
import sys, threading
sys.setswitchinterval(1e-6)
from smq.records import decode_batch, encode_batch, NewRecord
data = bytes.fromhex(sys.argv[1])
begin, failures = threading.Barrier(8), []

def work(number):
    begin.wait()
    try:
        list(decode_batch(data)) if number % 2 else encode_batch([NewRecord(b"k", b"v", 1)])
    except Exception as e:
        failures.append(repr(e))

threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
for t in threads: t.start()
for t in threads: t.join()
sys.exit(", ".join(failures) or 0)
"""


def test_threads_that_use_the_codec_first_at_the_same_time_all_get_it() -> None:
    """A fresh node that looked up times in several partitions answered INTERNAL: a module was only half imported."""
    data = encode_batch([NewRecord(b"k", b"v", 1)]).hex()
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", _THREADS, data], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@given(records=st.lists(st.tuples(st.none() | st.binary(max_size=3), st.none() | st.binary(max_size=3)), min_size=1))
def test_keyed_records_are_those_that_decode_batch_finds(records: list[tuple[bytes | None, bytes | None]]) -> None:
    batch = encode_batch([NewRecord(key, value, 5) for key, value in records])
    assert keyed_records(batch) == [(r.offset, r.key, r.value is None) for r in decode_batch(batch)]
    with pytest.raises(BatchCorrupt):
        keyed_records(batch[:-1])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("offset", "left"), [(100, [100, 101, 104]), (102, [104]), (105, [])])
def test_the_part_of_a_batch_from_an_offset_on_keeps_offsets_and_content(
    codec: str, offset: int, left: list[int]
) -> None:
    new = [NewRecord(b"k%d" % i, b"v%d" % i, 1_000 + i, [("h", None)]) for i in range(3)]
    batch = encode_batch(new, codec=codec, producer_id=7, producer_epoch=1, base_sequence=40)
    whole = _with_hole(batch, codec)
    header = parse_header(whole)
    part = from_offset(whole, header, offset)
    made = validate_mirrored(part)
    assert (made.base_offset, made.end, made.count) == (offset, header.end, len(left))
    assert made.base_sequence == 40 + offset - 100
    assert list(decode_batch(part)) == [r for r in decode_batch(whole) if r.offset in left]


def _with_hole(batch: bytes, codec: str) -> bytes:
    """At 100, 101 and 104 of the offsets 100 to 106."""
    builder = default_records.DefaultRecordBatchBuilder(2, CODECS[codec], 0, 7, 1, 40, 1 << 20)
    for place, record in zip((0, 1, 4), decode_batch(batch), strict=True):
        builder.append(place, record.timestamp_ms, record.key, record.value, list(record.headers))
    built = bytes(builder.build())
    return build_batch(replace(parse_header(built), base_offset=100, last_offset_delta=6), built[HEADER_BYTES:])
