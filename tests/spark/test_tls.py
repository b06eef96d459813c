"""Batches, streams, metadata and writes with a cluster that asks for a client's certificate, or for a user."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from smq.clients import SyncAdmin, SyncProducer
from smq.clients.tls import Tls
from smq.clients.types import Acl
from smq.coordinator.cli.cluster_dir import reach_of
from smq.coordinator.tls.certificate_files import client_identity
from smq.testing.cluster import Cluster
from smq.testing.node_process import run_cli
from tests.spark.file_job import Job
from tests.spark.support import span

pytestmark = [pytest.mark.spark, pytest.mark.cluster]

TOPIC = "secret"
VALUES = [b"v%d" % i for i in range(100)]


USER = {
    "kafka.security.protocol": "SASL_SSL",
    "kafka.sasl.mechanism": "SCRAM-SHA-512",
    "kafka.sasl.jaas.config": 'x.ScramLoginModule required username="alice" password="pencil";',
}


@pytest.fixture(scope="module", params=["certificate", "user"])
def options(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of a job that reads TOPIC, which holds VALUES, by the operator's certificate or by a user's password."""
    made, is_user = Cluster(tmp_path_factory.mktemp("spark-tls"), 1), request.param == "user"
    try:
        made.start("--auth" if is_user else "--tls")
        operator, servers = client_identity(made.directory / "tls"), reach_of(made.directory).bootstrap
        tls = Tls(ca=operator.ca, certificate=operator.certificate, key=operator.key)
        with SyncAdmin(servers, tls=tls) as admin:
            admin.create_topic(TOPIC, 1)
        with SyncProducer(servers, tls=tls) as producer:
            producer.send_many(TOPIC, VALUES, partition=0)
        if is_user:
            with SyncAdmin(servers, tls=tls) as admin:
                admin.create_user("alice", "pencil")
                for resource, name in (("topic", TOPIC), ("transactional_id", "*")):
                    rule = Acl(user="alice", operation="all", resource=resource, name=name)
                    admin.alter_acls(add=[rule])
            yield {"servers": made.nodes[1].grpc, "tls.ca": str(operator.ca), "subscribe": TOPIC, **USER}
            return
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


def test_rows_are_written_over_tls(spark: SparkSession, options: dict[str, str]) -> None:
    reach = {name: value for name, value in options.items() if name != "subscribe"}
    rows = spark.createDataFrame([(b"w",)], "value binary")
    rows.write.format("smq").options(**reach, topic=TOPIC).mode("append").save()
    read = spark.read.format("smq").options(**options).load().collect()
    assert bytes(max(read, key=lambda row: int(row["offset"]))["value"]) == b"w"
    if "kafka.security.protocol" in options:
        with pytest.raises(PySparkException, match="NOT_AUTHORIZED"):
            rows.write.format("smq").options(**reach, topic="other").mode("append").save()


def test_another_authority_is_refused_with_the_reason(
    spark: SparkSession, options: dict[str, str], tmp_path: Path
) -> None:
    assert run_cli("cert", "init", str(tmp_path)).returncode == 0
    other = {**options, "tls.ca": str(tmp_path / "ca" / "ca.crt"), "retryTimeoutMs": "3000"}
    with pytest.raises(PySparkException, match=r"within 3 s .*its certificate is not signed by this client's CA"):
        spark.read.format("smq").options(**other).load().collect()
