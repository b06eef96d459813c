"""docs/spark.md: its blocks as they are, one after the other, in one session."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.streaming.query import StreamingQueryManager

from smq.clients import SyncAdmin, SyncConsumer, SyncProducer
from smq.testing.cluster import Cluster
from tests.pages import claimed


@pytest.fixture
def _no_listener_stays(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other tests' queries run in the same session."""
    added: list[StreamingQueryListener] = []
    add = StreamingQueryManager.addListener

    def note(manager: StreamingQueryManager, listener: StreamingQueryListener) -> None:
        added.append(listener)
        add(manager, listener)

    monkeypatch.setattr(StreamingQueryManager, "addListener", note)
    yield
    for listener in added:
        spark.streams.removeListener(listener)


@pytest.mark.full
@pytest.mark.usefixtures("_no_listener_stays")
@pytest.mark.spark
@pytest.mark.cluster
@pytest.mark.timeout(280)
def test_every_block_of_the_page_runs(spark: SparkSession, cluster: Cluster, tmp_path: Path) -> None:
    servers = cluster.servers
    reads, position, listens, writes, repeats = claimed("docs/spark.md", __file__)
    assert set(json.loads(position)) == {"from", "ids", "o", "v"}
    with SyncAdmin(servers) as admin, SyncProducer(servers) as producer:
        for topic in ("flights", "arrivals"):
            admin.create_topic(topic, 1)
        producer.send("flights", b"first", partition=0).result()
        producer.send("arrivals", b"landed", partition=0).result()
    names: dict[str, Any] = {}

    def run(block: str) -> None:
        block = block.replace("127.0.0.1:7401", servers).replace("/data/checkpoints", str(tmp_path))
        exec(compile(block, "docs/spark.md", "exec"), names)

    run(reads)
    assert [bytes(row.value) for row in names["batch"].collect()] == [b"first"]
    assert names["stream"].isStreaming
    run(listens)
    arrivals = spark.readStream.format("smq").options(servers=servers, subscribe="arrivals", startingOffsets="earliest")
    names |= {
        "servers": servers,
        "frame": spark.createDataFrame([("second",)], "value string"),
        "stream": arrivals.load().select("key", "value"),
        "checkpoint": str(tmp_path / "repeated"),
    }
    for block in (writes, repeats):
        run(block)
        for query in spark.streams.active:
            query.processAllAvailable()
            query.stop()
    with SyncConsumer(servers) as consumer:
        consumer.assign("flights", "earliest", end_offset="latest")
        assert [record.value for record in consumer] == [b"first", b"second", b"landed", b"landed"]
