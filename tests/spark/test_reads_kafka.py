"""Spark reads records of Kafka clients: keys, tombstones, nulls, timestamps and headers, in every codec."""

from collections.abc import Callable, Sequence

import pytest
from pyspark.sql import DataFrame, Row

from smq.records import CODECS
from smq.testing.cluster import Cluster
from tests.kafka.client_adapters import FACES, Item
from tests.kafka.test_clients import ITEMS

pytestmark = [pytest.mark.spark, pytest.mark.cluster]


def as_item(row: Row) -> Item:
    return Item(
        key=None if row.key is None else bytes(row.key),
        value=None if row.value is None else bytes(row.value),
        timestamp_ms=round(row.timestamp.timestamp() * 1000),
        headers=tuple((header.key, bytes(header.value)) for header in row.headers or ()),
    )


def read_items(frame: DataFrame) -> Sequence[Item]:
    return [as_item(row) for row in frame.orderBy("offset").collect()]


def test_what_every_kafka_client_writes_in_every_codec_spark_reads(
    cluster: Cluster, new_topic: Callable[[int], str], read: Callable[..., DataFrame]
) -> None:
    writers = [face for face in FACES if face.name != "grpc"]
    assert len(writers) == 3
    topic = new_topic(1)
    for writer in writers:
        for codec in CODECS:
            writer.write(cluster, topic, ITEMS, codec)
    assert read_items(read(topic, includeHeaders="true")) == ITEMS * len(writers) * len(CODECS)
