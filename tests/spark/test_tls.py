"""Batches, streams and metadata from a cluster with TLS that requires a client certificate."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from smq.clients import SyncAdmin, SyncProducer
from smq.clients.tls import Tls
from smq.coordinator.tls.certificate_files import client_identity
from smq.testing.cluster import Cluster
from smq.testing.node_process import run_cli
from tests.spark.file_job import Job
from tests.spark.support import span

pytestmark = [pytest.mark.spark, pytest.mark.cluster]

TOPIC = "secret"
VALUES = [b"v%d" % i for i in range(100)]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The code of a job that reads TOPIC, which holds VALUES."""
    made = Cluster(tmp_path_factory.mktemp("spark-tls"), 1)
    try:
        made.start("--tls")
        operator = client_identity(made.root / "data" / "tls")
        tls = Tls(ca=operator.ca, certificate=operator.certificate, key=operator.key)
        servers = made.nodes[1].grpc
        with SyncAdmin(servers, tls=tls) as admin:
            admin.create_topic(TOPIC, 1)
        with SyncProducer(servers, tls=tls) as producer:
            producer.send_many(TOPIC, VALUES, partition=0)
        files = {"tls.ca": operator.ca, "tls.certificate": operator.certificate, "tls.key": operator.key}
        yield {"servers": servers, "subscribe": TOPIC, **{name: str(path) for name, path in files.items()}}
    finally:
        made.stop()


def test_batch_is_read_over_tls(spark: SparkSession, options: dict[str, str]) -> None:
    rows = spark.read.format("smq").options(**options).load().collect()
    assert sorted((row["offset"], bytes(row["value"])) for row in rows) == list(enumerate(VALUES))
    facts = spark.read.format("smq").options(**options, metadata="partitions").load().collect()
    assert [(row["topic"], row["hwm"]) for row in facts] == [(TOPIC, len(VALUES))]


def test_stream_is_read_over_tls(spark: SparkSession, options: dict[str, str], tmp_path: Path) -> None:
    job = Job(spark, tmp_path, **options, startingOffsets="earliest")
    assert sum(job.run()) == len(VALUES)
    assert job.rows() == span(0, 0, len(VALUES))


def test_another_authority_is_refused_with_the_reason(
    spark: SparkSession, options: dict[str, str], tmp_path: Path
) -> None:
    assert run_cli("cert", "init", str(tmp_path)).returncode == 0
    other = {**options, "tls.ca": str(tmp_path / "ca" / "ca.crt"), "retryTimeoutMs": "3000"}
    with pytest.raises(PySparkException, match=r"within 3 s .*its certificate is not signed by this client's CA"):
        spark.read.format("smq").options(**other).load().collect()
