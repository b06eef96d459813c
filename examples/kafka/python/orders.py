"""Writes ten orders and reads ten, from its group's commit on: `python -m examples.kafka.python.orders SERVERS TOPIC`.

Needs confluent-kafka.
"""

import sys

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer

COUNT = 10
CUSTOMERS = ("ada", "ben", "cleo")
IDLE_S = 30.0


def write(servers: str, topic: str) -> None:
    def delivered(error: KafkaError | None, _order: Message) -> None:
        if error is not None:
            raise KafkaException(error)

    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True})
    for number in range(COUNT):
        producer.produce(topic, f"order {number}", CUSTOMERS[number % len(CUSTOMERS)], on_delivery=delivered)
    producer.flush()


def read(servers: str, topic: str) -> None:
    group = {"group.id": f"{topic}-python", "auto.offset.reset": "earliest", "enable.auto.commit": False}
    consumer = Consumer({"bootstrap.servers": servers, **group})
    consumer.subscribe([topic])
    try:
        for _ in range(COUNT):
            order = consumer.poll(IDLE_S)
            if order is None:
                sys.exit(f"no order has come for {IDLE_S:.0f} s")
            if order.error() is not None:
                raise KafkaException(order.error())
            print(f"{order.partition()}/{order.offset()} {text(order.key())}: {text(order.value())}")
        consumer.commit(asynchronous=False)
    finally:
        consumer.close()


def text(data: bytes | None) -> str:
    return "" if data is None else data.decode()


if __name__ == "__main__":
    write(*sys.argv[1:3])
    read(*sys.argv[1:3])
