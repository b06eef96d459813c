"""Options and columns of a write: what is refused on the driver, in which words, and how Arrow becomes rows."""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import ArrayType, BinaryType, StringType, StructField, StructType

from smq.raft_state.limits import TRANSACTIONAL_ID_BYTES_MAX
from smq.spark_connector.errors import OptionError, SinkError
from smq.spark_connector.sink.columns import check_columns, values_of
from smq.spark_connector.sink.write_options import APP_BYTES_MAX, SinkOptions, sink_options
from smq.spark_connector.source import SmqDataSource

VALUE = StructType().add("value", "binary")
HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))


def parsed(given: dict[str, str] | None = None, *, is_stream: bool = False, overwrite: bool = False) -> SinkOptions:
    options = CaseInsensitiveDict({"servers": "h:1", "topic": "t"} | (given or {}))
    return sink_options(options, overwrite=overwrite, is_stream=is_stream)


def test_defaults() -> None:
    found = parsed()
    assert (found.topic, found.app, found.version, found.codec) == ("t", None, None, "none")
    assert found.fail_on_data_loss
    assert (found.transaction_timeout_ms, found.retry_timeout_ms) == (900_000, 60_000)


def test_options_are_those_of_sparks_other_sinks() -> None:
    found = parsed({"txnAppId": "job", "txnVersion": "0", "kafka.compression.type": "LZ4", "transactionTimeoutMs": "5"})
    assert (found.app, found.version, found.codec, found.transaction_timeout_ms) == ("job", 0, "lz4", 5)
    stream = parsed({"checkpointLocation": "/tmp/c", "kafka.acks": "all"}, is_stream=True)
    assert stream.topic == "t"


@pytest.mark.parametrize("value", ["true", "false"])
def test_headers_may_be_included_as_in_kafkas_sink(value: str) -> None:
    assert parsed({"includeHeaders": value}) == parsed()


@pytest.mark.parametrize(
    ("key", "why"),
    [("kafka.acks", "majority"), ("kafka.linger.ms", "large batches"), ("kafka.retries", "has no Kafka client")],
)
def test_what_a_kafka_producer_is_told_has_no_effect_and_says_why(
    key: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        parsed({key: "1"})
    (record,) = caplog.records
    assert f"option {key!r} has no effect" in record.getMessage()
    assert why in record.getMessage()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"subscribe": "t"}, "'subscribe' is only for reads"),
        ({"startingOffsets": "earliest"}, "'startingOffsets' is only for reads"),
        ({"includeIndex": "true"}, "'includeIndex' is only for reads"),
        ({"includeHeaders": "perhaps"}, "'includeHeaders'"),
        ({"topic": "a,b"}, "names one topic"),
        ({"txnAppId": "job"}, "'txnAppId' and 'txnVersion' together"),
        ({"txnVersion": "1"}, "'txnAppId' and 'txnVersion' together"),
        ({"txnAppId": "job", "txnVersion": "-1"}, "'txnVersion' must be a whole number of at least 0"),
        ({"txnAppId": "", "txnVersion": "1"}, "'txnAppId' must have 1 to"),
        ({"txnAppId": "x" * (APP_BYTES_MAX + 1), "txnVersion": "1"}, "'txnAppId' must have 1 to"),
        ({"kafka.compression.type": "brotli"}, "must be one of none, gzip, snappy, lz4, zstd"),
        ({"transactionTimeoutMs": "0"}, "at least 1"),
        ({"topicc": "t"}, "has no option 'topicc'"),
    ],
)
def test_an_impossible_option_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parsed(given)


def test_what_a_stream_or_an_append_cannot_be_is_refused() -> None:
    with pytest.raises(OptionError, match=r"a stream's name and the numbers .* are in its checkpoint"):
        parsed({"txnAppId": "job", "txnVersion": "1"}, is_stream=True)
    with pytest.raises(OptionError, match=r"write \.mode\('append'\)"):
        parsed(overwrite=True)


def test_the_longest_name_leaves_room_for_the_ids_of_its_tasks() -> None:
    assert len(f"spark/{'x' * APP_BYTES_MAX}/{2**31}/{2**31}") <= TRANSACTIONAL_ID_BYTES_MAX


CALLS: list[Callable[[SmqDataSource, StructType], object]] = [
    lambda source, schema: source.writer(schema, False),
    lambda source, schema: source.streamWriter(schema=schema, overwrite=False),
]


@pytest.mark.parametrize("call", CALLS, ids=["writer", "streamWriter"])
def test_the_source_checks_columns_before_a_task_runs(call: Callable[[SmqDataSource, StructType], object]) -> None:
    source = SmqDataSource(CaseInsensitiveDict({"servers": "h:1", "topic": "t"}))
    assert call(source, VALUE) is not None
    with pytest.raises(OptionError, match="needs a column 'value'"):
        call(source, StructType().add("val", "binary"))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("key binary", "needs a column 'value' of string or binary, and there are only key"),
        ("value integer", "'value' must be binary or string, not int"),
        ("value binary, VALUE string", "two columns 'value'"),
        ("value binary, key long", "'key' must be binary or string, not bigint"),
        ("value binary, partition long", "'partition' must be int, not bigint"),
        ("value binary, topic binary", "'topic' must be string, not binary"),
        ("value binary, headers string", "'headers' must be array"),
        ("value binary, timestamp long", "'timestamp' must be timestamp, not bigint"),
    ],
)
def test_a_wrong_column_is_refused_with_what_to_write(columns: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_columns(_schema(columns), has_topic=True)


def test_rows_need_a_topic_and_the_option_takes_precedence() -> None:
    with pytest.raises(OptionError, match="needs option 'topic', or a column 'topic'"):
        check_columns(VALUE, has_topic=False)
    schema = _schema("value binary, topic string")
    assert check_columns(schema, has_topic=False).topic == 1
    assert check_columns(schema, has_topic=True).topic is None


def test_rows_come_out_of_arrow_in_any_order_of_columns() -> None:
    schema = _schema("extra long, Timestamp timestamp, value string, headers headers")
    batch = pa.record_batch(
        [
            pa.array([1, 2, 3]),
            pa.array([datetime(1970, 1, 1, 0, 0, 1, 999, tzinfo=UTC), None, None], pa.timestamp("us", "UTC")),
            pa.array(["ä", None, ""]),
            pa.array([[{"key": "h", "value": None}], None, []]),
        ],
        names=["extra", "Timestamp", "value", "headers"],
    )
    found = list(values_of(batch, check_columns(schema, has_topic=True)).rows())
    assert found == [
        (None, None, None, "ä".encode(), [("h", None)], 1000),
        (None, None, None, None, None, None),
        (None, None, None, b"", [], None),
    ]


@pytest.mark.parametrize("header", [None, {"key": None, "value": b"x"}])
def test_a_header_without_a_key_is_refused(header: Any) -> None:
    schema = _schema("value binary, headers headers")
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    batch = pa.record_batch([pa.array([b"v"]), pa.array([[header]], kind)], names=["value", "headers"])
    with pytest.raises(SinkError, match="header without a key"):
        values_of(batch, check_columns(schema, has_topic=True))


# ------------------------------------------------------------------------------------------- the digest of rows
ROWS: list[dict[str, Any]] = [
    {"topic": "t", "partition": None, "key": b"k", "value": b"v", "headers": None, "timestamp": None},
    {"topic": "u", "partition": 1, "key": None, "value": b"", "headers": [("h", b"x")], "timestamp": 1_999},
    {"topic": "t", "partition": 0, "key": b"", "value": None, "headers": [], "timestamp": -1},
    {"topic": "t", "partition": None, "key": b"vk", "value": b"v", "headers": [("h", None)], "timestamp": 0},
]
SINK = "topic string, partition integer, key binary, value binary, headers headers, timestamp timestamp"
ARROW = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("timestamp", pa.timestamp("us", "UTC")),
    ]
)


def digest(rows: list[dict[str, Any]], without: str = "", topic: str | None = None) -> int:
    """Of one task that writes these rows, without a column."""
    named = [
        row | {"headers": row["headers"] and [{"key": key, "value": value} for key, value in row["headers"]]}
        for row in rows
    ]
    batch = pa.RecordBatch.from_pylist(named, pa.schema([field for field in ARROW if field.name != without]))
    schema = _schema(", ".join(column for column in SINK.split(", ") if column.split()[0] != without))
    return values_of(batch, check_columns(schema, has_topic=topic is not None)).digest(topic)


def test_the_digest_of_a_batch_is_that_of_its_rows_in_any_order_and_from_any_tasks() -> None:
    """Spark may divide a replay among its tasks in another way. The number is kept in the cluster, so it is one for all
    versions of Python and numpy."""
    whole = digest(ROWS)
    assert whole == digest(ROWS[::-1])
    assert whole == sum(digest(ROWS[n::3]) for n in range(3)) % 2**64
    assert whole == 1723044750071143409
    assert digest([]) == 0
    assert digest(ROWS, topic="t") == digest([row | {"topic": "t"} for row in ROWS])
    for column in ("partition", "key", "headers", "timestamp"):
        assert digest(ROWS, column) == digest([row | {column: None} for row in ROWS]), "absent, or null in each row"


def test_rows_that_differ_anywhere_have_another_digest() -> None:
    changes: list[dict[str, Any]] = [
        {"topic": "v"},
        {"partition": 7},
        {"key": b"other"},
        {"value": b"other"},
        {"value": None},
        {"headers": [("h", b"y")]},
        {"timestamp": 5_000},
    ]
    found = [
        digest([row | change if row is changed else row for row in ROWS]) for changed in ROWS for change in changes
    ]
    found += [digest(ROWS), digest(ROWS[1:]), digest([*ROWS, ROWS[0]])]
    keys = [row["key"] for row in ROWS]
    for place in range(1, len(ROWS)):  # the same keys and the same values, in other pairs
        moved = [row | {"key": key} for row, key in zip(ROWS, keys[place:] + keys[:place], strict=True)]
        found.append(digest(moved))
    assert len(set(found)) == len(found) - found.count(digest(ROWS)) + 1
    assert found.count(digest(ROWS)) == 2, "ROWS itself, and the row whose value was null before"


def _schema(text: str) -> StructType:
    """`name type, ...`, where the type `headers` is that of the column."""
    schema = StructType()
    for column in text.split(", "):
        name, kind = column.split()
        schema.add(name, HEADERS if kind == "headers" else kind)
    return schema
