"""Members of a group by each client library, all driven the same way: poll, see what is assigned, commit, close."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import cache
from typing import Any, Final, Protocol, TypeVar

import aiokafka
import confluent_kafka
import kafka

from smq.clients import SyncConsumer

WAIT_S = 90.0  # a group of mixed members needs several rounds on a busy machine
T = TypeVar("T")
Place = tuple[str, int]


Read = tuple[str, int, int]  # topic, partition, offset


class Member(Protocol):
    """`poll` adds new records to `seen`, and gives the library time to work."""

    seen: list[Read]

    def poll(self) -> None: ...

    def assigned(self) -> set[Place]: ...

    def commit(self) -> None: ...

    def close(self) -> None: ...


_CLASSIC: Final = {"heartbeat.interval.ms": 300, "session.timeout.ms": 6_000}  # the coordinator has the others'


class ConfluentMember:
    def __init__(self, bootstrap: str, group: str, topics: list[str], **settings: Any) -> None:
        self.seen: list[Read] = []
        self.committed: dict[Place, int] = {}  # as far as callbacks reported it
        self._consumer = confluent_kafka.Consumer(
            {
                "log_level": 0,  # nodes that die by the dozen are no news here
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                **({} if "group.protocol" in settings else _CLASSIC),
                **settings,
            }
        )
        self._consumer.subscribe(topics)

    def poll(self) -> None:
        for message in self._consumer.consume(500, 0.1):
            error = message.error()
            assert error is None or error.retriable(), error
            if error is None:
                self.seen.append((str(message.topic()), message.partition() or 0, message.offset() or 0))

    def assigned(self) -> set[Place]:
        return {(p.topic, p.partition) for p in self._consumer.assignment()}

    def commit(self) -> None:
        for p in self._consumer.commit(asynchronous=False) or ():
            assert p.error is None, p.error
            if p.offset >= 0:  # of the others nothing was new
                self.committed[p.topic, p.partition] = p.offset

    def close(self) -> None:
        self._consumer.close()


class PythonMember:
    def __init__(self, bootstrap: str, group: str, topics: list[str], **settings: Any) -> None:
        self.seen: list[Read] = []
        self._consumer = kafka.KafkaConsumer(
            *topics,
            bootstrap_servers=bootstrap,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            heartbeat_interval_ms=300,
            session_timeout_ms=6_000,
            **settings,
        )

    def poll(self) -> None:
        polled = self._consumer.poll(500)  # it gives a round up that is not over when it returns
        self.seen += [(tp.topic, tp.partition, r.offset) for tp, records in polled.items() for r in records]

    def assigned(self) -> set[Place]:
        return {(tp.topic, tp.partition) for tp in self._consumer.assignment()}

    def commit(self) -> None:
        self._consumer.commit()

    def close(self) -> None:
        self._consumer.close()


class _Loop:
    """One for all members of aiokafka, since they send their heartbeats by it whether they are polled or not."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)


@cache
def _aio() -> _Loop:
    return _Loop()


class AioMember:
    def __init__(self, bootstrap: str, group: str, topics: list[str], **settings: Any) -> None:
        self.seen: list[Read] = []

        async def make() -> aiokafka.AIOKafkaConsumer:
            return aiokafka.AIOKafkaConsumer(
                *topics,
                bootstrap_servers=bootstrap,
                group_id=group,
                auto_offset_reset="earliest",
                enable_auto_commit=False,
                heartbeat_interval_ms=300,
                session_timeout_ms=6_000,
                **settings,
            )

        self._consumer = _aio().run(make())
        self._starting = asyncio.run_coroutine_threadsafe(self._consumer.start(), _aio().loop)

    def poll(self) -> None:
        if not self._starting.done():
            time.sleep(0.05)  # it joins its group, which takes the others
            return
        self._starting.result()
        polled = _aio().run(self._consumer.getmany(timeout_ms=100))
        self.seen += [(tp.topic, tp.partition, r.offset) for tp, records in polled.items() for r in records]

    def assigned(self) -> set[Place]:
        return {(tp.topic, tp.partition) for tp in self._consumer.assignment()}

    def commit(self) -> None:
        _aio().run(self._consumer.commit())

    def close(self) -> None:
        _aio().run(self._consumer.stop())


class SmqMember:
    """smq's own client, over gRPC. Kafka's group g is its group kafka-cg-g."""

    def __init__(self, servers: str, group: str, topics: list[str], **options: Any) -> None:
        self.seen: list[Read] = []
        self.told: list[tuple[str, set[Place]]] = []
        settings = {"heartbeat_interval_ms": 300, "session_timeout_ms": 6_000, "request_timeout_ms": 10_000}
        self.consumer = SyncConsumer(servers, group=f"kafka-cg-{group}", **{**settings, **options})

        def note(what: str) -> Callable[[list[Place]], None]:
            return lambda partitions: self.told.append((what, set(partitions)))

        self.consumer.subscribe(topics, on_assigned=note("assigned"), on_revoked=note("revoked"), on_lost=note("lost"))

    def poll(self) -> None:
        for records in self.consumer.getmany(500, 100).values():
            self.seen += [(r.topic, r.partition, r.offset) for r in records]

    def assigned(self) -> set[Place]:
        return set(self.consumer.assignment())

    def commit(self) -> None:
        self.consumer.commit()

    def close(self) -> None:
        self.consumer.close()


LIBRARIES: dict[str, Callable[..., Member]] = {
    "confluent": ConfluentMember,
    "kafka-python": PythonMember,
    "aiokafka": AioMember,
}


def drive(what: str, members: Iterable[Member], until: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Polls all of them in turn until a condition holds."""
    members = list(members)
    deadline = time.monotonic() + timeout_s
    while not until():
        state = [(m.assigned(), len(m.seen)) for m in members]
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}; {state}"
        for member in members:
            member.poll()


def share(members: list[Member], places: set[Place]) -> bool:
    """Whether each place is one member's, and each member has its share: one more than another at most."""
    held = [m.assigned() for m in members]
    sizes = [len(h) for h in held]
    return sum(sizes) == len(places) and set().union(*held) == places and max(sizes) - min(sizes) <= 1
