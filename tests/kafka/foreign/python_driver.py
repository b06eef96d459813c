"""The Python clients behind the drivers' protocol: `python_driver.py CLIENT SERVERS`. See driver.py for the operations.

Writing and reading is that of client_adapters.py, which `make test` holds all of them to; transactions are those of
python_transactions.py.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

import aiokafka
import confluent_kafka
import kafka
import kafka.admin
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewTopic as AioNewTopic
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from smq.records import CODECS
from tests.kafka import client_adapters as faces
from tests.kafka.client_adapters import READ_S, Item
from tests.kafka.foreign.driver import packed, serve, unpacked
from tests.kafka.foreign.python_transactions import COMMITTED, TRANSACT, confluent_copy

NAME, SERVERS = sys.argv[1:]
Request = dict[str, Any]
GROUP_S = 2 * READ_S
_NOTHING = Item(None, None, 0)  # of group and time only the offsets count


def _found(offsets: list[int]) -> Request:
    return {"records": [packed(_NOTHING, offset) for offset in offsets]}


def _checked(offsets: list[int], count: int) -> list[int]:
    if len(offsets) < count:
        raise RuntimeError(f"{len(offsets)} of {count} records came")
    return offsets


# ------------------------------------------------------------------------------------------- confluent-kafka
def _confluent_create(request: Request) -> Request:
    admin = AdminClient({"bootstrap.servers": SERVERS})
    for future in admin.create_topics([NewTopic(request["topic"], request["partitions"])]).values():
        future.result(READ_S)
    return {}


def _confluent_group(request: Request) -> Request:
    settings = {"group.id": request["group"], "auto.offset.reset": "earliest", "enable.auto.commit": False}
    consumer = confluent_kafka.Consumer({"bootstrap.servers": SERVERS, **settings})
    consumer.subscribe([request["topic"]])
    offsets: list[int] = []
    deadline = time.monotonic() + GROUP_S
    while len(offsets) < request["count"] and time.monotonic() < deadline:
        for message in consumer.consume(request["count"] - len(offsets), 0.5):
            if error := message.error():
                raise RuntimeError(error.str())
            offsets.append(message.offset() or 0)
    next_ = confluent_kafka.TopicPartition(request["topic"], 0, _checked(offsets, request["count"])[-1] + 1)
    consumer.commit(offsets=[next_], asynchronous=False)
    consumer.close()
    return _found(offsets)


def _confluent_time(request: Request) -> Request:
    consumer = confluent_kafka.Consumer({"bootstrap.servers": SERVERS, "group.id": "time"})
    requested = confluent_kafka.TopicPartition(request["topic"], 0, request["timestamp"])
    consumer.assign(consumer.offsets_for_times([requested], READ_S))
    (message,) = consumer.consume(1, READ_S)
    consumer.close()
    return _found([message.offset() or 0])


# ---------------------------------------------------------------------------------------------- kafka-python
def _python_create(request: Request) -> Request:
    admin = kafka.admin.KafkaAdminClient(bootstrap_servers=SERVERS)
    admin.create_topics([kafka.admin.NewTopic(request["topic"], request["partitions"], -1)])
    admin.close()
    return {}


def _python_take(consumer: Any, count: int) -> list[int]:
    offsets: list[int] = []
    deadline = time.monotonic() + GROUP_S
    while len(offsets) < count and time.monotonic() < deadline:
        for records in consumer.poll(500, max_records=count - len(offsets)).values():
            offsets += [record.offset for record in records]
    return _checked(offsets, count)


def _python_group(request: Request) -> Request:
    consumer = kafka.KafkaConsumer(
        request["topic"],
        bootstrap_servers=SERVERS,
        group_id=request["group"],
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    offsets = _python_take(consumer, request["count"])
    place = kafka.TopicPartition(request["topic"], 0)
    consumer.commit({place: kafka.OffsetAndMetadata(offsets[-1] + 1, "", -1)})
    consumer.close()
    return _found(offsets)


def _python_time(request: Request) -> Request:
    consumer = kafka.KafkaConsumer(bootstrap_servers=SERVERS, enable_auto_commit=False)
    place = kafka.TopicPartition(request["topic"], 0)
    consumer.assign([place])
    consumer.seek(place, consumer.offsets_for_times({place: request["timestamp"]})[place].offset)
    offsets = _python_take(consumer, 1)
    consumer.close()
    return _found(offsets)


# -------------------------------------------------------------------------------------------------- aiokafka
async def _aiokafka_create(request: Request) -> Request:
    admin = AIOKafkaAdminClient(bootstrap_servers=SERVERS)
    await admin.start()
    await admin.create_topics([AioNewTopic(request["topic"], request["partitions"], 3)])
    await admin.close()
    return {}


async def _aiokafka_take(consumer: Any, count: int) -> list[int]:
    async with asyncio.timeout(GROUP_S):
        return [(await consumer.getone()).offset for _ in range(count)]


async def _aiokafka_group(request: Request) -> Request:
    consumer = aiokafka.AIOKafkaConsumer(
        request["topic"],
        bootstrap_servers=SERVERS,
        group_id=request["group"],
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    await consumer.start()
    try:
        offsets = await _aiokafka_take(consumer, request["count"])
        await consumer.commit({aiokafka.TopicPartition(request["topic"], 0): offsets[-1] + 1})
    finally:
        await consumer.stop()
    return _found(offsets)


async def _aiokafka_time(request: Request) -> Request:
    consumer = aiokafka.AIOKafkaConsumer(bootstrap_servers=SERVERS)
    await consumer.start()
    try:
        place = aiokafka.TopicPartition(request["topic"], 0)
        consumer.assign([place])
        found = await consumer.offsets_for_times({place: request["timestamp"]})
        consumer.seek(place, found[place].offset)
        return _found(await _aiokafka_take(consumer, 1))
    finally:
        await consumer.stop()


def _running(coroutine: Callable[[Request], Any]) -> Callable[[Request], Request]:
    return lambda request: asyncio.run(coroutine(request))


# version, write, read, create, group, time
CLIENTS: dict[str, tuple[str, Any, Any, Any, Any, Any]] = {
    "confluent-kafka": (
        str(confluent_kafka.__version__),
        faces.confluent_write,
        faces.confluent_read,
        _confluent_create,
        _confluent_group,
        _confluent_time,
    ),
    "kafka-python": (
        kafka.__version__,
        faces.python_write,
        faces.python_read,
        _python_create,
        _python_group,
        _python_time,
    ),
    "aiokafka": (
        aiokafka.__version__,
        faces.aiokafka_write,
        faces.aiokafka_read,
        _running(_aiokafka_create),
        _running(_aiokafka_group),
        _running(_aiokafka_time),
    ),
}


def main() -> None:
    version, write, read, create, group, at_time = CLIENTS[NAME]

    def produce(request: Request) -> Request:
        write(SERVERS, request["topic"], [unpacked(record) for record in request["records"]], request["codec"])
        return {}

    def read_all(request: Request) -> Request:
        found = read(SERVERS, request["topic"], range(request["count"]))
        return {"records": [packed(item, offset) for offset, item in enumerate(found)]}

    def committed(request: Request) -> Request:
        values = COMMITTED[NAME](SERVERS, request["topic"], request["count"])
        return {"records": [packed(Item(None, value, 0)) for value in values]}

    copy = {"copy": lambda request: confluent_copy(SERVERS, request)} if NAME == "confluent-kafka" else {}
    serve(
        copy
        | {
            "transact": lambda request: {"failure": TRANSACT[NAME](SERVERS, request["topic"])},
            "committed": committed,
            "hello": lambda _: {"version": version, "codecs": list(CODECS)},
            "create": create,
            "produce": produce,
            "read": read_all,
            "group": group,
            "time": at_time,
        }
    )


if __name__ == "__main__":
    main()
