"""Kafka clients of a chaos run: librdkafka's producers and its consumer, on the same topics as the rest.

Owns the translation of their callbacks into operations of the history. A consumer's records are checked by `kpoll`
operations: value and offset of each, in the order in which the client received them.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from chaos_tests.keyed import record_of
from chaos_tests.live.load.grpc import SEND_S, Ack, Client, Partition, World

DELIVERY_MS: Final = int(SEND_S * 1000)
BURST_MAX: Final = 20
POLL_S: Final = 0.2


class KafkaProducer(Client):
    """acks=all with idempotence: each record is a send of its own, with a burst of them in flight."""

    think_s = 0.15
    acks = -1
    idempotent = True

    def __init__(self, world: World, name: str, partitions: Sequence[Partition] = ()) -> None:
        super().__init__(world, name, partitions)
        self._producer: Any = None
        self._free: list[int] = []  # process ids without an open operation
        self._open = 0

    def step(self) -> None:
        if self._producer is None:
            self._producer = self._make()
        for _ in range(self.rng.randint(1, BURST_MAX)):
            self._send()
        deadline = time.monotonic() + SEND_S + 5
        while self._open and time.monotonic() < deadline:
            self._producer.poll(0.05)

    def close(self) -> None:
        if self._producer is not None:
            self._producer.flush(SEND_S + 5)

    def _send(self) -> None:
        partition = self.any_partition()
        (value,) = self.world.values(1)
        process = self._free.pop() if self._free else self.world.recorder.new_process()
        requested = {"k": partition.key, "v": [value], "acks": self.acks, "idem": self.idempotent}
        self.world.recorder.invoke(process, "send", **requested, via="kafka")

        def delivered(error: Any, message: Any) -> None:
            self._open -= 1
            if error is not None:
                # librdkafka does not report whether an attempt may have been stored: the outcome is unknown.
                self.world.recorder.info(process, "send", err=str(error)[:200])
                if self._producer is not None and error.fatal():
                    self._producer = None  # a new one, with a new producer id
                return
            self.world.recorder.ok(process, "send", o=message.offset(), ts=0, dup=False)
            if self.acks == -1:
                self.world.acks.append(Ack(time.monotonic_ns(), partition.key, 0))
            self._free.append(process)

        from confluent_kafka import KafkaException

        self._open += 1
        record = record_of(value, partition.keys, 0)
        try:
            self._producer.produce(
                partition.topic,
                record.value,
                record.key,
                partition=partition.index,
                headers=list(record.headers),
                on_delivery=delivered,
            )
        except KafkaException as e:  # it does not know the partition: the record was never sent
            self._open -= 1
            self.world.recorder.fail(process, "send", err=str(e)[:200])
            self._free.append(process)

    def _make(self) -> Any:
        from confluent_kafka import Producer as LibrdkafkaProducer

        settings = {
            **reach(self.world),
            "enable.idempotence": self.idempotent,
            "acks": self.acks,
            "linger.ms": 2,
            "delivery.timeout.ms": DELIVERY_MS,
            "socket.timeout.ms": 3000,
            # Without idempotence a second attempt may store a second copy, which would not be a bug.
            **({} if self.idempotent else {"retries": 0}),
        }
        return LibrdkafkaProducer(settings)


class PlainKafkaProducer(KafkaProducer):
    """acks=all, and each record is sent once."""

    think_s = 0.4
    idempotent = False


class LeaderKafkaProducer(PlainKafkaProducer):
    """acks=1: may lose records, but must not disturb the producers with acks=all."""

    acks = 1


class KafkaConsumer(Client):
    """Reads every partition from its start by assignment; its records must follow without a gap."""

    think_s = 0.2

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._consumer: Any = None

    def step(self) -> None:
        if self._consumer is None:
            self._consumer = make_consumer(self.world)
            self._consumer.assign(places([(p, 0) for p in self.world.partitions]))
        self.world.recorder.invoke(self.process, "kpoll", c=self.name)
        messages = self._consumer.consume(100, POLL_S)
        read = [[f"{m.topic()}/{m.partition()}", m.offset(), int(m.value())] for m in messages if m.error() is None]
        self.world.recorder.ok(self.process, "kpoll", r=read)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()


def reach(world: World) -> dict[str, Any]:
    """librdkafka's settings to connect to the cluster."""
    found: dict[str, Any] = {"bootstrap.servers": world.kafka, "reconnect.backoff.max.ms": 500, "log_level": 0}
    if world.tls is not None:
        found |= {"security.protocol": "SSL", "ssl.ca.location": str(world.tls.ca)}
        if world.tls.certificate is not None:
            found |= {"ssl.certificate.location": str(world.tls.certificate), "ssl.key.location": str(world.tls.key)}
    return found


def kafka_clients(world: World) -> list[Client]:
    return [
        KafkaProducer(world, "kafka-producer"),
        PlainKafkaProducer(world, "kafka-plain"),
        LeaderKafkaProducer(world, "kafka-leader"),
        KafkaConsumer(world, "kafka-consumer"),
    ]


def make_consumer(world: World, **settings: Any) -> Any:
    """One that is in no group, and reads what it is assigned."""
    from confluent_kafka import Consumer

    return Consumer(
        {
            **reach(world),
            "group.id": f"{world.partitions[0].topic}-reader",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",  # a reset would hide a wrong out-of-range
            **settings,
        }
    )


def places(found: Iterable[tuple[Partition, int]]) -> list[Any]:
    """In the form that `assign` takes: each partition from its offset on."""
    from confluent_kafka import TopicPartition

    return [TopicPartition(partition.topic, partition.index, offset) for partition, offset in found]
