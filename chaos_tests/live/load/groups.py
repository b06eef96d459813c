"""A consumer group of librdkafka in a chaos run: members come and go, read, commit, and are rebalanced by the faults.

Owns the members and their history: each assignment is a consumer of its own (`c`), within which records follow without
a gap. Each commit names its generation and carries a tag of its own, for the checkers of group offsets. By the end the
group must have read up to `ends` of `drain`.
"""

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from chaos_tests.live.load.grpc import Client, GroupMember, World, join
from chaos_tests.live.load.kafka import reach
from smq.coordinator.kafka.cluster_view import PREFIX

MEMBERS: Final = 3
SESSION_MS: Final = 6_000  # the shortest that Kafka's brokers allow by default
POLLS_MAX: Final = 50
POLL_S: Final = 0.1
COMMIT_PROBABILITY: Final = 0.5
COMMIT_ON_REVOKE_PROBABILITY: Final = 0.5
LEAVE_PROBABILITY: Final = 0.01
_GENERATION_MARK: Final = b"CGMDv2:"  # before it, in librdkafka's metadata of a group
_NO_GENERATION: Final = -1
_C_END: Final = "\0"  # confluent-kafka sends it as a part of the metadata


def group_of(topic: str) -> str:
    """The group's name on the Kafka port; on every other interface PREFIX comes before it."""
    return f"{topic}-team"


class TeamMember(Client):
    """Subscribes, reads, commits the records read; leaves now and then, and after a commit of unknown outcome: then its
    generation is over, and the coordinator must no longer accept that commit."""

    think_s = 0.1

    def __init__(self, world: World, name: str, stopping: threading.Event) -> None:
        super().__init__(world, name)
        self.stopping = stopping
        self._topic = world.partitions[0].topic
        self._group = PREFIX + group_of(self._topic)
        self._consumer: Any = None
        self._consumers = 0
        self._reads = ""  # the assignment at hand, by a name of its own
        self._assignments = 0
        self._next: dict[str, int] = {}  # of the assignment at hand: what would be read next
        self._committed: dict[str, int] = {}
        self._commits = 0
        self._committer = world.recorder.new_process()
        self._must_leave = False

    def step(self) -> None:
        if self._consumer is None:
            self._consumer = self._join()
        self._read()
        if self._next and self.rng.random() < COMMIT_PROBABILITY:
            self._commit(self.rng.choice(sorted(self._next)))
        if self._must_leave or self.rng.random() < LEAVE_PROBABILITY:
            self._leave()

    def close(self) -> None:
        if self._consumer is not None:
            for key in sorted(self._next):
                self._commit(key)
            self._leave()

    # --------------------------------------------------------------------------------------------- membership
    def _join(self) -> Any:
        from confluent_kafka import Consumer

        settings = {
            **reach(self.world),
            "group.id": group_of(self._topic),
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "session.timeout.ms": SESSION_MS,
            "heartbeat.interval.ms": 500,
            "socket.timeout.ms": 3000,
        }
        consumer = Consumer(settings)
        consumer.subscribe([self._topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
        self._must_leave = False
        self._consumers += 1
        return consumer

    def _leave(self) -> None:
        self._next = {}
        consumer, self._consumer = self._consumer, None
        consumer.close()

    def _assigned(self, consumer: Any, parts: list[Any]) -> None:
        self._assignments += 1
        self._reads = f"{self.name}/{self._assignments}"
        self._next, self._committed = {}, {}
        generation = generation_of(consumer)
        if generation == _NO_GENERATION:
            return  # lost again in the meantime
        names = [f"{part.topic}/{part.partition}" for part in parts]
        # Not by assignment: an unchanged follower that rejoins gets its generation's assignment once more.
        who = f"{self.name}#{self._consumers}"
        for function, requested, answer in (
            ("gjoin", {}, {"gen": generation, "leader": None, "members": []}),  # librdkafka does not report the leader
            ("gsync", {"gen": generation}, {"parts": names, "who": who}),
        ):
            self.world.recorder.invoke(self._committer, function, g=self._group, **requested)
            self.world.recorder.ok(self._committer, function, **answer)

    def _revoked(self, consumer: Any, _: list[Any]) -> None:
        if self._consumer is not None and self.rng.random() < COMMIT_ON_REVOKE_PROBABILITY:
            for key in sorted(self._next):
                self._commit(key)
        self._next = {}

    def _lost(self, consumer: Any, _: list[Any]) -> None:
        self._next = {}

    # -------------------------------------------------------------------------------------- reading, committing
    def _read(self) -> None:
        """One `kpoll`: all available messages of one assignment."""
        self.world.recorder.invoke(self.process, "kpoll", c=self.name, g=self._group)
        read: list[list[Any]] = []
        by = self._reads
        message = self._consumer.poll(POLL_S)
        while message is not None:
            if self._reads != by:
                self._record(by, read)
                read, by = [], self._reads
                self.world.recorder.invoke(self.process, "kpoll", c=self.name, g=self._group)
            if message.error() is None:
                key, offset = f"{message.topic()}/{message.partition()}", message.offset()
                read.append([key, offset, int(message.value())])
                self._next[key] = offset + 1
            message = self._consumer.poll(0) if len(read) < POLLS_MAX else None
        self._record(by, read)

    def _record(self, by: str, read: list[list[Any]]) -> None:
        self.world.recorder.ok(self.process, "kpoll", r=read, by=by)

    def _commit(self, key: str) -> None:
        from confluent_kafka import KafkaException, TopicPartition

        offset, generation = self._next[key], generation_of(self._consumer)
        if generation == _NO_GENERATION or offset == self._committed.get(key):
            return
        self._commits += 1
        tag = f"{self.name}-{self._commits}"
        topic, _, index = key.rpartition("/")
        requested = {"g": self._group, "k": key, "o": offset, "tag": tag + _C_END, "gen": generation}
        self.world.recorder.invoke(self._committer, "commit", **requested)
        try:
            (answer,) = self._consumer.commit(
                offsets=[TopicPartition(topic, int(index), offset, metadata=tag)], asynchronous=False
            )
            error = answer.error
        except KafkaException as e:
            error = e.args[0]
        if error is None:
            self.world.recorder.ok(self._committer, "commit")
            self._committed[key] = offset
            return
        # librdkafka retries by itself and reports only the last attempt: an earlier one may have been accepted.
        self.world.recorder.info(self._committer, "commit", err=str(error)[:200])
        self._committer = self.world.recorder.new_process()
        self._must_leave = True


class TeamWatcher(GroupMember):
    """Fetches the Kafka group's committed offsets from any node over gRPC; commits nothing."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.group = PREFIX + group_of(world.partitions[0].topic)

    def step(self) -> None:
        self.fetch(self.any_partition())


class Team:
    """The members; they continue after all other clients have stopped. Implements history_run.LateReader."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stopping = threading.Event()
        self._watcher = TeamWatcher(world, "team-drain")
        self._members: list[Client] = [TeamMember(world, f"team-{i}", self._stopping) for i in range(MEMBERS)]
        self.group = self._watcher.group

    def start(self) -> str | None:
        for member in self._members:
            member.thread.start()
        return None

    def drain(self, ends: Mapping[str, int], timeout_s: float) -> str | None:
        give_up = time.monotonic() + timeout_s
        missing = dict(ends)
        while missing:
            for partition in self._world.partitions:
                if partition.key in missing:
                    found = self._watcher.fetch(partition)
                    if found is not None and found >= missing[partition.key]:
                        del missing[partition.key]
            if time.monotonic() > give_up:
                left = ", ".join(f"{key} to {end}" for key, end in sorted(missing.items()))
                return f"within {timeout_s:g} s the group has not read and committed {left}"
            time.sleep(POLL_S)
        return None

    def stop(self) -> None:
        if not self._stopping.is_set():
            self._stopping.set()
            join(self._world, [member for member in self._members if member.thread.ident is not None])


def generation_of(consumer: Any) -> int:
    """-1 if it has none. librdkafka exposes it only in the metadata for transactions."""
    metadata: bytes = consumer.consumer_group_metadata()
    if not metadata.startswith(_GENERATION_MARK):
        raise ValueError(f"librdkafka's group metadata has an unknown form: {metadata[:16]!r}")
    at = len(_GENERATION_MARK)
    return int.from_bytes(metadata[at : at + 4], sys.byteorder, signed=True)
