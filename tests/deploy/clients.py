"""What runs on the machine of the clients: python -m tests.deploy.clients COMMAND ... prints one JSON line.

Owns a Kafka producer, a Kafka consumer's view of the cluster, smq's own producer, and a Spark job. All of them get only
addresses of the outside; TLS files come from the variables of `smq` as a client. The test of the namespaces starts it.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

TOPIC = "flights"


def kafka_settings(servers: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": servers,
        "security.protocol": "SSL",
        "ssl.ca.location": os.environ["SMQ_TLS_CA"],
        "ssl.certificate.location": os.environ["SMQ_TLS_CERTIFICATE"],
        "ssl.key.location": os.environ["SMQ_TLS_KEY"],
    }


def brokers(servers: str) -> dict[str, Any]:
    """The addresses that the Kafka protocol gives this client, by node."""
    from confluent_kafka.admin import AdminClient

    found = AdminClient(kafka_settings(servers)).list_topics(timeout=30)
    return {str(broker.id): f"{broker.host}:{broker.port}" for broker in found.brokers.values()}


def nodes(servers: str) -> dict[str, Any]:
    """The addresses that gRPC gives this client, by node."""
    from smq.clients import SyncAdmin

    with SyncAdmin(servers) as admin:
        return {str(node.node): node.grpc_address for node in admin.describe_cluster().nodes}


def create(servers: str, partitions: str) -> dict[str, Any]:
    from smq.clients import SyncAdmin

    with SyncAdmin(servers) as admin:
        admin.create_topic(TOPIC, int(partitions), replication_factor=3)
    return {}


def produce(servers: str, first: str, count: str) -> dict[str, Any]:
    """Over Kafka: records FIRST to FIRST + COUNT - 1, acks=all. Reports which were acknowledged."""
    from confluent_kafka import Producer

    acked: list[int] = []
    failed: list[str] = []
    producer = Producer(kafka_settings(servers) | {"enable.idempotence": True, "linger.ms": 5})
    for number in range(int(first), int(first) + int(count)):

        def on_done(error: Any, _message: Any, number: int = number) -> None:
            failed.append(str(error)) if error is not None else acked.append(number)

        producer.produce(TOPIC, value=b"%d" % number, partition=number % 3, on_delivery=on_done)
    producer.flush(120)
    return {"acked": len(acked), "failed": failed[:3]}


def produce_until(servers: str, stop_file: str) -> dict[str, Any]:
    """Over gRPC, until the file exists, a few at a time."""
    from smq.clients import SyncProducer

    sent = 0
    with SyncProducer(servers) as producer:
        while not Path(stop_file).exists():
            producer.send_many(TOPIC, [b"g%d" % n for n in range(sent, sent + 10)])
            sent += 10
            time.sleep(0.02)
    return {"acked": sent}


def spark(servers: str) -> dict[str, Any]:
    """A Spark job reads everything."""
    from smq.spark_connector import session

    made = session("outside", master="local[2]", conf={"spark.log.level": "ERROR"})
    files = {f"tls.{name}": os.environ[f"SMQ_TLS_{name.upper()}"] for name in ("ca", "certificate", "key")}
    frame = made.read.format("smq").options(servers=servers, subscribe=TOPIC, **files).load()
    rows = [(row["partition"], row["offset"], bytes(row["value"]).decode()) for row in frame.collect()]
    made.stop()
    offsets = sorted((partition, offset) for partition, offset, _ in rows)
    ends = {p: sum(1 for partition, _ in offsets if partition == p) for p in {p for p, _ in offsets}}
    return {
        "rows": len(rows),
        "values": len({value for *_, value in rows}),
        "gapless": offsets == [(p, o) for p in sorted(ends) for o in range(ends[p])],
    }


COMMANDS = {made.__name__: made for made in (brokers, nodes, create, produce, produce_until, spark)}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    sys.stdout.write(json.dumps(COMMANDS[name](*arguments)) + "\n")
