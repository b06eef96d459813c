"""Fixtures of the Spark tests: one session, one cluster of real processes, and a way to fill a topic."""

from collections.abc import Callable, Iterator

import pytest
from pyspark.sql import DataFrame, SparkSession

from smq.spark_connector import session
from smq.spark_connector.local_session import SHORT_LIVED
from smq.testing.cluster import Cluster
from tests.live import cluster, new_topic
from tests.spark.support import publisher


@pytest.fixture(scope="package")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Two cores, and three attempts per task, so that a task is retried as in production."""
    warehouse = str(tmp_path_factory.mktemp("warehouse"))
    conf = {"spark.log.level": "ERROR", "spark.sql.warehouse.dir": warehouse, **SHORT_LIVED}
    made = session("smq tests", master="local[2,3]", conf=conf)
    yield made
    made.stop()


@pytest.fixture
def servers(cluster: Cluster) -> str:
    return cluster.servers


@pytest.fixture
def publish(cluster: Cluster) -> Callable[..., None]:
    """Appends records to a partition, acks=all, in batches of `batch_records`."""
    return publisher(cluster)


@pytest.fixture
def read(spark: SparkSession, servers: str) -> Callable[..., DataFrame]:
    """`read(topic, option=value, ...)`; without registering a data source."""

    def load(topic: str, schema: str | None = None, **options: str) -> DataFrame:
        reader = spark.read.format("smq").option("servers", servers).option("subscribe", topic).options(**options)
        return (reader.schema(schema) if schema else reader).load()

    return load
