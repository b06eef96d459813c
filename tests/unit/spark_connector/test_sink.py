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
from smq.spark_connector.sink.columns import check_columns, rows_of
from smq.spark_connector.sink.options import APP_BYTES_MAX, SinkOptions, sink_options
from smq.spark_connector.source import SmqDataSource

VALUE = StructType().add("value", "binary")
HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))


def parsed(given: dict[str, str] | None = None, *, is_stream: bool = False, overwrite: bool = False) -> SinkOptions:
    options = CaseInsensitiveDict({"servers": "h:1", "topic": "t"} | (given or {}))
    return sink_options(options, overwrite=overwrite, is_stream=is_stream)


def test_defaults() -> None:
    found = parsed()
    assert (found.topic, found.app, found.version, found.codec) == ("t", None, None, "none")
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
    found = list(rows_of(batch, check_columns(schema, has_topic=True)))
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
        list(rows_of(batch, check_columns(schema, has_topic=True)))


def _schema(text: str) -> StructType:
    """`name type, ...`, where the type `headers` is that of the column."""
    schema = StructType()
    for column in text.split(", "):
        name, kind = column.split()
        schema.add(name, HEADERS if kind == "headers" else kind)
    return schema
