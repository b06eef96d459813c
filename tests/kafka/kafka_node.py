"""One node of Apache Kafka, by Maven, as the other cluster of a mirror."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.programs import kafka_jars
from smq.coordinator.cli.cluster_dir import free_ports
from smq.testing.node_process import wait_for

START_S = 120.0


@contextmanager
def kafka_node(directory: Path) -> Iterator[str]:
    """Its address. Segments roll and are compacted within a second, where a topic asks for it."""
    jars = kafka_jars()
    client, controller = free_ports(2)
    config = directory / "server.properties"
    config.write_text(
        "process.roles=broker,controller\nnode.id=1\n"
        f"controller.quorum.voters=1@127.0.0.1:{controller}\n"
        f"listeners=PLAINTEXT://127.0.0.1:{client},CONTROLLER://127.0.0.1:{controller}\n"
        f"advertised.listeners=PLAINTEXT://127.0.0.1:{client}\ncontroller.listener.names=CONTROLLER\n"
        "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT\n"
        f"log.dirs={directory / 'log'}\n"
        "offsets.topic.replication.factor=1\noffsets.topic.num.partitions=1\n"
        "transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n"
        "group.initial.rebalance.delay.ms=0\nlog.cleaner.backoff.ms=200\n"
    )
    storage = ("format", "--cluster-id", "c21xLWJlbmNobWFya3MtMQ", "--config", str(config))
    subprocess.run(jars.command("kafka.tools.StorageTool", *storage, heap="256m"), check=True, capture_output=True)
    with (directory / "kafka.log").open("wb") as log:
        process = subprocess.Popen(jars.command("kafka.Kafka", str(config), heap="512m"), stdout=log, stderr=log)
    try:
        wait_for("Kafka listens", lambda: _listens(client), START_S)
        yield f"127.0.0.1:{client}"
    finally:
        process.terminate()
        process.wait(60)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
