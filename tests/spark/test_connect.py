"""format("smq") through Spark Connect: a client without Java, a server beside it, a batch and a stream."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.spark.support import SLOW_START, numbered

pytestmark = [pytest.mark.full, pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(600)]

SERVER = """
import sys
from smq.spark_connector import session
conf = {
    "spark.log.level": "ERROR",
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
}
spark = session("connect", master="local[2]", conf=conf)
service = getattr(getattr(spark._jvm, "org.apache.spark.sql.connect.service.SparkConnectService$"), "MODULE$")
print(service.localPort(), flush=True)
sys.stdin.read()
spark.stop()
"""
CLIENT = """
import json, sys
from pyspark.sql import SparkSession
remote, servers, topic, root, slow_start = sys.argv[1:]
spark = SparkSession.builder.remote(remote).getOrCreate()
batch = spark.read.format("smq").options(servers=servers, subscribe=topic).load()
stream = spark.readStream.format("smq").options(servers=servers, subscribe=topic, startingOffsets="earliest").load()
writer = stream.select("partition", "offset").writeStream.format("parquet").option("path", root + "/out")
writer = writer.option("checkpointLocation", root + "/checkpoint").trigger(availableNow=True)
for attempt in range(5):
    try:
        assert writer.start().awaitTermination(120)
        break
    except Exception as e:
        if slow_start not in str(e) or attempt == 4:
            raise
try:
    spark.read.format("smq").options(servers=servers, subscribe=topic, startingOffset="x").load().count()
    refusal = ""
except Exception as e:
    refusal = str(e)
print(json.dumps({
    "client": type(spark).__module__,
    "rows": sorted((r.partition, r.offset, r.value.decode()) for r in batch.collect()),
    "streamed": sorted((r.partition, r.offset) for r in spark.read.parquet(root + "/out").collect()),
    "refusal": refusal,
}))
"""


@pytest.fixture
def remote() -> Iterator[str]:
    """The address of a Spark Connect server that lives as long as the test."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        assert port.isdigit(), port
        yield f"sc://127.0.0.1:{port}"
    finally:
        process.stdin.close()
        process.wait(60)


def test_batch_and_stream_over_spark_connect(
    remote: str, servers: str, new_topic: Callable[[int], str], publish: Callable[..., None], tmp_path: Path
) -> None:
    topic = new_topic(2)
    for partition in range(2):
        publish(topic, partition, numbered(100))
    command = [sys.executable, "-c", CLIENT, remote, servers, topic, str(tmp_path), SLOW_START]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["client"].startswith("pyspark.sql.connect")
    assert result["rows"] == [[p, i, f"v{i}"] for p in range(2) for i in range(100)]
    assert result["streamed"] == [[p, i] for p in range(2) for i in range(100)]
    assert "did you mean 'startingOffsets'" in result["refusal"]
