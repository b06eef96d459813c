"""Raw batches into Arrow: every column, every codec, exact edges, exactly the schema that Spark checks against."""

import struct
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

from smq.records import (
    CODECS,
    CONTROL_MASK,
    BatchCorrupt,
    NewRecord,
    decode_batch,
    encode_batch,
    parse_header,
    patched_prefix,
)
from smq.spark_connector import decode, record_columns
from smq.spark_connector.decode import Decoder, RawBatch
from smq.spark_connector.errors import OptionError
from smq.spark_connector.fixed_width import RECORDS_MIN, stretches
from smq.spark_connector.record_columns import RecordReader
from smq.spark_connector.schema import ALL_COLUMNS, arrow_schema, check_projection, default_schema

FULL = default_schema(include_headers=True, include_index=True)
EVERYTHING = 2**63 - 1


def raw(records: list[NewRecord], base: int = 0, *, codec: str = "none", ts_ns: int = 7, epoch: int = 3) -> RawBatch:
    data = encode_batch(records, codec=codec)
    data = patched_prefix(base, parse_header(data), epoch) + data[16:]
    return RawBatch(header=parse_header(data), data=data, ts_ns=ts_ns)


def patched(batch: RawBatch, fmt: str, at: int, value: int) -> RawBatch:
    data = bytearray(batch.data)
    struct.pack_into(fmt, data, at, value)
    struct.pack_into(">I", data, 17, crc32c(bytes(data[21:])))
    return RawBatch(header=parse_header(data), data=bytes(data), ts_ns=batch.ts_ns)


def decoded(batches: list[RawBatch], schema: StructType = FULL, lo: int = 0, hi: int = EVERYTHING) -> pa.Table:
    decoder = Decoder("t", 4, check_projection(schema), arrow_schema(schema))
    found = [out for batch in batches for out in decoder.add(batch, lo, hi)]
    found += list(decoder.flush())
    assert all(out.schema.equals(arrow_schema(schema)) for out in found)
    return pa.Table.from_batches(found, arrow_schema(schema))


def record(i: int, **more: Any) -> NewRecord:
    return NewRecord(**{"key": b"k%d" % i, "value": b"v%d" % i, "timestamp_ms": 1000 + i, **more})


def test_all_columns_of_a_record() -> None:
    table = decoded([raw([record(0, headers=[("h", b"1"), ("h", None)])], base=41)])
    (row,) = table.to_pylist()
    timestamp = row.pop("timestamp")
    assert timestamp.timestamp() == 1.0
    assert row == {
        "key": b"k0",
        "value": b"v0",
        "topic": "t",
        "partition": 4,
        "offset": 41,
        "timestampType": 0,
        "headers": [{"key": "h", "value": b"1"}, {"key": "h", "value": None}],
        "_index": 41,
        "ts_ns": 7,
        "epoch": 3,
    }


def test_null_and_empty_stay_distinct() -> None:
    table = decoded([raw([record(0, key=None, value=b""), record(1, key=b"", value=None), record(2)])])
    assert table["key"].to_pylist() == [None, b"", b"k2"]
    assert table["value"].to_pylist() == [b"", None, b"v2"]
    assert table["headers"].to_pylist() == [None, None, None]


@pytest.mark.parametrize("codec", list(CODECS))
def test_every_codec(codec: str) -> None:
    table = decoded([raw([record(i) for i in range(1000)], codec=codec)])
    assert table["value"].to_pylist() == [b"v%d" % i for i in range(1000)]
    assert table["offset"].to_pylist() == list(range(1000))


def test_range_cuts_first_and_last_batch() -> None:
    batches = [raw([record(i) for i in range(base, base + 10)], base=base) for base in (0, 10, 20)]
    table = decoded(batches, lo=7, hi=22)
    assert table["offset"].to_pylist() == list(range(7, 22))
    assert table["value"].to_pylist() == [b"v%d" % i for i in range(7, 22)]


def test_batches_outside_the_range_give_nothing() -> None:
    batches = [raw([record(0)], base=base) for base in (4, 5, 6)]
    assert decoded(batches, lo=5, hi=6)["offset"].to_pylist() == [5]


def test_shared_columns_follow_their_batch() -> None:
    table = decoded([raw([record(0), record(1)], ts_ns=7, epoch=1), raw([record(2)], base=2, ts_ns=9, epoch=2)])
    assert table["ts_ns"].to_pylist() == [7, 8, 9]
    assert table["epoch"].to_pylist() == [1, 1, 2]


def test_batch_with_missing_offsets_keeps_its_own() -> None:
    batch = patched(raw([record(0), record(1), record(2)], base=10), ">i", 23, 9)  # last offset delta 9
    assert decoded([batch])["offset"].to_pylist() == [10, 11, 12]
    assert decoded([batch], lo=11, hi=12)["value"].to_pylist() == [b"v1"]


def test_control_batch_has_no_rows() -> None:
    batch = patched(raw([record(0)]), ">h", 21, CONTROL_MASK)
    assert decoded([batch]).num_rows == 0


def test_log_append_time_is_marked() -> None:
    batch = patched(raw([record(0)]), ">h", 21, 0x08)
    assert decoded([batch])["timestampType"].to_pylist() == [1]


def test_create_time_beyond_microseconds_is_clamped() -> None:
    table = decoded([raw([record(0, timestamp_ms=2**62)])])
    assert table["timestamp"].cast(pa.int64()).to_pylist() == [(2**63 - 1) // 1000 * 1000]


def test_records_that_contradict_the_header_are_corrupt() -> None:
    with pytest.raises(BatchCorrupt, match="offset 0 does not decode"):
        decoded([patched(patched(raw([record(0), record(1)]), ">i", 57, 1), ">i", 23, 0)])


@pytest.mark.parametrize("codec", list(CODECS))
def test_garbage_under_a_correct_checksum_is_corrupt(codec: str) -> None:
    batch = raw([record(0)], codec=codec)
    data = bytearray(batch.data[:61] + b"\x01" * 20)
    struct.pack_into(">i", data, 8, len(data) - 12)
    struct.pack_into(">I", data, 17, crc32c(bytes(data[21:])))
    with pytest.raises(BatchCorrupt):
        decoded([RawBatch(header=parse_header(data), data=bytes(data), ts_ns=1)])


def test_rows_are_sent_in_bounded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "ROWS_PER_BATCH", 100)
    decoder = Decoder("t", 0, check_projection(FULL), arrow_schema(FULL))
    batches = [raw([record(i) for i in range(30)], base=base) for base in range(0, 300, 30)]
    batches.append(raw([record(i) for i in range(250)], base=300))
    sizes = [out.num_rows for batch in batches for out in decoder.add(batch, 0, EVERYTHING)]
    sizes += [out.num_rows for out in decoder.flush()]
    assert sum(sizes) == 550
    assert sizes == [120, 120, 155, 155]


def test_large_values_are_sent_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "BYTES_PER_BATCH", 1000)
    decoder = Decoder("t", 0, check_projection(FULL), arrow_schema(FULL))
    batch = raw([record(0, value=b"x" * 600)])
    assert list(decoder.add(batch, 0, EVERYTHING)) == []
    assert [out.num_rows for out in decoder.add(raw([record(0, value=b"x" * 600)], base=1), 0, EVERYTHING)] == [2]


# ------------------------------------------------------------------------------------------------ projections
def test_projection_keeps_order_names_and_repeats_nothing() -> None:
    schema = StructType([StructField("VALUE", BinaryType()), StructField("_index", LongType())])
    table = decoded([raw([record(0), record(1)])], schema)
    assert table.column_names == ["VALUE", "_index"]
    assert table["VALUE"].to_pylist() == [b"v0", b"v1"]


def test_projection_without_record_columns_decodes_no_record() -> None:
    schema = StructType([StructField("offset", LongType()), StructField("ts_ns", LongType())])
    batch = raw([record(0), record(1)])
    undecodable = RawBatch(header=batch.header, data=batch.data[:61], ts_ns=9)
    assert decoded([undecodable], schema, lo=1)["offset"].to_pylist() == [1]


@pytest.mark.parametrize("name", list(ALL_COLUMNS))
def test_each_column_alone(name: str) -> None:
    table = decoded([raw([record(0), record(1)])], StructType([StructField(name, ALL_COLUMNS[name])]))
    assert (table.num_rows, table.column_names) == (2, [name])


def test_default_schema_is_that_of_the_kafka_connector() -> None:
    names = default_schema(include_headers=False, include_index=False).simpleString()
    assert names == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,timestampType:int>"
    )
    with_headers = default_schema(include_headers=True, include_index=False)
    assert with_headers["headers"].dataType.simpleString() == "array<struct<key:string,value:binary>>"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (StructField("carrier", StringType()), "no column 'carrier'"),
        (StructField("offset", IntegerType()), "is bigint, not int"),
        (StructField("value", StringType()), "cast in a select"),
        (StructField("timestamp", TimestampType(), nullable=False), "leave NOT NULL out"),
    ],
)
def test_projection_of_an_unknown_column_names_the_known_ones(field: StructField, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_projection(StructType([field]))


def test_projection_of_nothing_is_refused() -> None:
    with pytest.raises(OptionError, match="at least one"):
        check_projection(StructType([]))


NULLABLE = st.none() | st.binary(max_size=20)
RECORDS = st.lists(
    st.builds(
        NewRecord,
        key=NULLABLE,
        value=NULLABLE,
        timestamp_ms=st.integers(0, 2**41),
        headers=st.lists(st.tuples(st.text(max_size=5), NULLABLE), max_size=3),
    ),
    min_size=1,
    max_size=20,
)


@given(records=RECORDS, codec=st.sampled_from(list(CODECS)), lo=st.integers(0, 25), hi=st.integers(0, 25))
def test_decoded_records_equal_the_encoded_ones(records: list[NewRecord], codec: str, lo: int, hi: int) -> None:
    table = decoded([raw(records, base=2, codec=codec)], lo=lo, hi=hi)
    expected = [(i + 2, r) for i, r in enumerate(records) if lo <= i + 2 < hi]
    assert table["offset"].to_pylist() == [offset for offset, _ in expected]
    assert table["key"].to_pylist() == [r.key for _, r in expected]
    assert table["value"].to_pylist() == [r.value for _, r in expected]
    assert table["timestamp"].cast(pa.int64()).to_pylist() == [r.timestamp_ms * 1000 for _, r in expected]
    headers = [[(h["key"], h["value"]) for h in row] if row else [] for row in table["headers"].to_pylist()]
    assert headers == [list(r.headers) for _, r in expected]


# ------------------------------------------------------------------------------------------------ records of one shape
BODY = 61  # where the records of a batch that is not compressed begin
FIELDS = st.tuples(st.none() | st.integers(0, 200), st.none() | st.integers(0, 200), st.integers(0, 3))
RUNS = st.lists(st.tuples(st.integers(1, 700), FIELDS), min_size=1, max_size=4)


def run_of(runs: list[tuple[int, tuple[int | None, int | None, int]]], step_ms: int) -> list[NewRecord]:
    """Runs of records with keys and values of these lengths, and this many headers."""
    records: list[NewRecord] = []
    for count, (key, value, headers) in runs:
        for _ in range(count):
            i = len(records)
            fill = b"%08d" % i * 25
            records.append(
                NewRecord(
                    key=None if key is None else fill[:key],
                    value=None if value is None else fill[:value],
                    timestamp_ms=1_700_000_000_000 + i * step_ms,
                    headers=[("h", fill[:3])] * headers,
                )
            )
    return records


@given(
    runs=RUNS,
    step_ms=st.sampled_from([0, 1, -1, 70, 2**33]),
    codec=st.sampled_from(["none", "lz4"]),
    attributes=st.sampled_from([0, 0x08]),
)
@example(runs=[(2000, (None, 100, 0))], step_ms=1, codec="none", attributes=0)
@example(runs=[(2000, (8, 0, 0))], step_ms=0, codec="zstd", attributes=0x08)
@example(
    runs=[(600, (0, None, 0)), (600, (None, None, 0)), (1, (None, 100, 0))], step_ms=-1, codec="gzip", attributes=0
)
@example(
    runs=[(900, (None, 100, 0)), (1, (None, 100, 1)), (600, (None, 100, 0))], step_ms=0, codec="snappy", attributes=0
)
def test_both_ways_to_read_equal_the_plain_decoder(
    runs: list[tuple[int, tuple[int | None, int | None, int]]], step_ms: int, codec: str, attributes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_columns, "RECORDS_MIN", 1)
        batch = raw(run_of(runs, step_ms), base=5, codec=codec)
        batch = patched(batch, ">h", 21, batch.header.attributes | attributes)
        columns = RecordReader(["key", "value", "timestamp"]).read(batch.data, batch.header)
    plain = list(decode_batch(batch.data))
    assert columns.rows == len(plain)
    assert [v for piece in columns.key for v in piece.to_pylist()] == [r.key for r in plain]
    assert [v for piece in columns.value for v in piece.to_pylist()] == [r.value for r in plain]
    assert [v for piece in columns.timestamp for v in piece.tolist()] == [r.timestamp_ms for r in plain]


def body(records: list[NewRecord]) -> bytes:
    return encode_batch(records)[BODY:]


def test_records_of_one_size_are_read_by_field_whatever_their_number() -> None:
    for count in (1, 63, 64, 65, 1000, 9000):
        found = stretches(body(run_of([(count, (None, 100, 0))], 1)), count)
        assert found is not None
        assert sum(len(stretch.rows) for stretch in found) == count
        assert len(found) <= 6


def test_records_of_many_sizes_are_left_to_the_compiled_reader() -> None:
    records = [record(i, value=b"v" * (i * 7 % 100)) for i in range(1000)]
    assert stretches(body(records), len(records)) is None
    assert stretches(body([record(i, headers=[("h", b"")]) for i in range(1000)]), 1000) is None


@given(at=st.integers(0, 2**16), byte=st.integers(0, 255), cut=st.integers(0, 3), count=st.integers(1, 900))
def test_damaged_records_give_the_same_by_field_as_with_the_compiled_reader(
    at: int, byte: int, cut: int, count: int
) -> None:
    """The checksum is correct, so a producer wrote it this way: whatever the compiled reader refuses is refused."""
    data = bytearray(encode_batch(run_of([(900, (4, 20, 0))], 1)))
    data[BODY + at % (len(data) - BODY)] = byte
    del data[len(data) - cut :]
    header = parse_header(data)
    try:
        plain = [(r.key, r.value, r.offset) for r in decode_batch(bytes(data))]
    except BatchCorrupt:
        plain = None
    found = stretches(bytes(data[BODY:]), header.count)
    if found is not None:
        fields = [
            list(zip(s.binary(s.shape.key).to_pylist(), s.binary(s.shape.value).to_pylist(), strict=True))
            for s in found
        ]
        assert plain is not None
        assert [row for rows in fields for row in rows] == [(key, value) for key, value, _ in plain]
    assert stretches(bytes(data[BODY:]), count) is None or count == header.count


def test_partition_of_many_shapes_is_retried_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []
    monkeypatch.setattr(record_columns, "stretches", lambda body, count: requested.append(count))
    reader = RecordReader(["value"])
    batch = raw([record(i) for i in range(RECORDS_MIN)])
    for _ in range(33):
        assert reader.read(batch.data, batch.header).rows == RECORDS_MIN
    assert len(requested) == 3
    small = raw([record(0)])
    reader.read(small.data, small.header)
    assert len(requested) == 3
