"""Clients of all services but records: partition ranges, look-ups by time, group offsets, deletion, topics, offsets
without records.

Owns one small client class for each; all of them use any node.
"""

from collections.abc import Callable
from typing import Any

from chaos_tests.sim.clients.base import (
    Known,
    LoopingClient,
    PartitionClient,
    World,
    is_unknown,
    may_retry,
    proposal,
    range_of,
)
from chaos_tests.sim.rpc import Call, Lost, Script, Sleep
from smq.coordinator.groups.coordinator import NO_MEMBER
from smq.raft_state.commands import NO_GENERATION, AdvanceLogStart, CreateTopic, DeleteTopic, OffsetCommit
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset, PartitionIndex, TopicId, partition_id
from smq.raft_state.replies import OffsetsAssigned
from smq.raft_state.topic_config import EXTERNAL, STORAGE
from smq.replication.api import NodeApi, PartitionRange, TimeKind, TimeOffset
from smq.testing.virtual.clock import WALL_EPOCH_NS

ATTEMPT_MS = 900
ASSIGN_MS = 300  # short: attempts are often repeated while the first is still on its way
COUNT_MAX = 5  # offsets
DEADLINE_MS = 3000.0
CHANGE_MS = 6_000.0  # that a node is given for a change of a group
DELETED = "gone"  # a group that is deleted now and then
LOOK_BACK_NS = 5_000_000_000


def is_not_available(result: object) -> bool:
    """The leader could not say where the partition ends: as client libraries, ask again."""
    return isinstance(result, SmqError) and result.code is ErrorCode.OFFSET_NOT_AVAILABLE


class RangeReader(PartitionClient):
    """Requests the linearizable range of a partition, and the first record after a time."""

    def use(self, partition: Known) -> Script:
        yield from (self.range(partition) if self.rng.random() < 0.7 else self.time(partition))

    def range(self, partition: Known) -> Script:
        request, node = range_of(partition, ATTEMPT_MS), self.any_node()
        self.world.recorder.invoke(self.process, "hwm", k=partition.key, n=node)
        result, until = None, self.world.now_ms() + DEADLINE_MS
        while result is None or (is_not_available(result) and self.world.now_ms() < until):
            result = yield Call(node, request, ATTEMPT_MS * 1.5, ATTEMPT_MS)
        if isinstance(result, PartitionRange):
            answer = {"lo": result.log_start, "hwm": result.hwm, "next": result.next_offset, "epoch": result.epoch}
            self.ok("hwm", **answer)
            partition.hwm = max(partition.hwm, result.hwm)
            partition.lo = max(partition.lo, result.log_start)
        else:
            self.conclude("hwm", result, unknown=is_unknown(result))

    def time(self, partition: Known) -> Script:
        about = WALL_EPOCH_NS + self.world.scheduler.now_ns
        ts_ns = about - int(self.rng.random() * LOOK_BACK_NS)

        def request(api: NodeApi, done: Callable[[Any], None]) -> None:
            api.offset_for_time(partition.topic, partition.index, TimeKind.TS_NS, ts_ns, ATTEMPT_MS, done)

        replicas = [node for node in partition.replicas if node in self.world.nodes]  # except those lost for good
        node = self.rng.choice(replicas) if replicas else self.any_node()
        self.world.recorder.invoke(self.process, "time", k=partition.key, ts=ts_ns, n=node)
        result = yield Call(node, request, ATTEMPT_MS * 1.5, ATTEMPT_MS)
        if isinstance(result, TimeOffset):
            self.ok("time", o=result.offset, ts_found=result.ts_ns)
        else:
            self.conclude("time", result, unknown=is_unknown(result))


class GroupMember(PartitionClient):
    """Commits, fetches and deletes the offsets of groups that it shares with others, and that have no members. After an
    unknown outcome it goes on with the same groups."""

    def __init__(self, world: World, name: str, group: str, *, think_ms: float) -> None:
        super().__init__(world, name, think_ms=think_ms)
        self.group = group
        self._count = 0

    def use(self, partition: Known) -> Script:
        group = DELETED if self.rng.random() < 0.3 else self.group
        if group == DELETED and self.rng.random() < 0.25:
            yield from self.delete(partition, group)
        elif self.rng.random() < 0.4:
            yield from self.commit(partition, group)
        else:
            yield from self.fetch(partition, group)

    def commit(self, partition: Known, group: str | None = None) -> Script:
        group = group or self.group
        self._count += 1
        tag, offset = f"{self.name}-{self._count}", self.next_offset(partition)
        items = (OffsetCommit(partition=partition.pid, offset=Offset(offset), metadata=tag),)
        request_id = self.new_id()

        def request(api: Any, done: Callable[[Any], None]) -> None:
            api.groups.commit(group, NO_MEMBER, NO_GENERATION, items, request_id, int(CHANGE_MS), done)

        self.world.recorder.invoke(self.process, "commit", g=group, k=partition.key, o=offset, tag=tag)
        is_known = yield from self._change("commit", request)
        if not is_known and not self.world.stopped and self.rng.random() < 0.7:
            yield from self.commit(partition, group)  # what it commits next must count
            yield from self.fetch(partition, group)

    def next_offset(self, partition: Known) -> int:
        return self.rng.randint(0, partition.hwm)

    def delete(self, partition: Known, group: str) -> Script:
        request_id = self.new_id()

        def request(api: Any, done: Callable[[Any], None]) -> None:
            api.groups.delete_group(group, request_id, int(CHANGE_MS), done)

        self.world.recorder.invoke(self.process, "gdelete", g=group)
        is_known = yield from self._change("gdelete", request)
        if not is_known and not self.world.stopped:
            yield from self.commit(partition, group)
            yield from self.fetch(partition, group)

    def _change(self, function: str, request: Callable[[Any, Callable[[Any], None]], None]) -> Any:
        """A Script that returns whether the outcome is known. As client libraries do it: any node names the
        coordinator, and an attempt without an answer is repeated under the same request id. A node tries for longer
        than a client waits, as it does for Kafka clients. Some clients wait for less than an election."""
        until, unknown, coordinator = self.world.now_ms() + DEADLINE_MS, False, None
        is_patient = self.world.stopped  # and its last operation must succeed
        is_hasty = not is_patient and self.rng.random() < 0.3
        while True:
            node = coordinator if coordinator is not None else self.any_node()
            patience_ms = self.rng.uniform(5, 60) if is_hasty else ATTEMPT_MS * 1.5
            result = yield Call(node, request, patience_ms, CHANGE_MS, is_tied=True)
            if not isinstance(result, SmqError | Lost):
                self.ok(function)
                return True
            unknown = unknown or is_unknown(result)
            coordinator = result.details.leader if isinstance(result, SmqError) else None
            gives_up = result is Lost.TIMED_OUT and not is_patient and (is_hasty or self.rng.random() < 0.5)
            if self.world.now_ms() > until or not may_retry(result) or gives_up:
                break
            yield Sleep(self.rng.uniform(1, 10) if coordinator is not None else self.rng.uniform(10, 120))
        if unknown:
            self.conclude_unknown(function)
        else:
            self.fail(function, result)
        return not unknown

    def fetch(self, partition: Known, group: str | None = None) -> Script:
        group = group or self.group

        def request(api: NodeApi, done: Callable[[Any], None]) -> None:
            api.fetch_offsets(group, [partition.pid], ATTEMPT_MS, done)

        node = self.any_node()
        self.world.recorder.invoke(self.process, "fetch", g=group, k=partition.key, n=node)
        result = yield Call(node, request, ATTEMPT_MS * 1.5, ATTEMPT_MS)
        if isinstance(result, dict):
            found = result.get(partition.pid)
            offset, tag = (found.offset, found.metadata) if found is not None else (-1, "")
            self.ok("fetch", o=offset, tag=tag)
        elif isinstance(result, SmqError) and result.code is ErrorCode.UNKNOWN_GROUP:
            self.ok("fetch", o=-1, tag="")
        else:
            self.conclude("fetch", result, unknown=is_unknown(result))


class GroupWatcher(GroupMember):
    """Fetches the committed offsets of a group from any node; commits nothing."""

    def use(self, partition: Known) -> Script:
        yield from self.fetch(partition)


class Trimmer(PartitionClient):
    """Deletes records, with probability `to_hwm` up to the HWM itself (rule 14)."""

    def __init__(self, world: World, name: str, *, think_ms: float, to_hwm: float) -> None:
        super().__init__(world, name, think_ms=think_ms)
        self.to_hwm = to_hwm

    def use(self, partition: Known) -> Script:
        lo, hwm = partition.lo, max(partition.hwm, partition.lo)
        offset = hwm if self.rng.random() < self.to_hwm else self.rng.randint(lo, hwm)
        command = AdvanceLogStart(request_id=self.new_id(), partition=partition.pid, offset=Offset(offset))
        request = proposal(command, ATTEMPT_MS)
        self.world.recorder.invoke(self.process, "trim", k=partition.key, o=offset)
        result, unknown = yield from self.request(request, deadline_ms=DEADLINE_MS, attempt_ms=ATTEMPT_MS)
        if self.conclude("trim", result, unknown=unknown):
            partition.lo = max(partition.lo, offset)


class TopicOwner(LoopingClient):
    """Creates topics and drops them; the first ones, made by `create`, stay for the whole run."""

    def __init__(self, world: World, name: str, *, think_ms: float) -> None:
        super().__init__(world, name, think_ms=think_ms)
        self._count = 0

    def act(self) -> Script:
        self._count += 1
        topic = f"{self.name}-{self._count}"
        if (yield from self.create(topic, partitions=self.rng.randint(1, 2), replication=3)):
            yield self.think()
            yield from self.drop(topic)

    def create(
        self,
        topic: str,
        *,
        partitions: int,
        replication: int,
        start: int = 0,
        deadline_ms: float = DEADLINE_MS,
        is_external: bool = False,
    ) -> Any:
        """A Script that returns whether the topic is known to exist. Only assigners use topics of external storage."""
        topic_id = TopicId(self.rng.randbytes(16))
        command = CreateTopic(
            request_id=self.new_id(),
            name=topic,
            topic_id=topic_id,
            partition_count=partitions,
            replication_factor=0 if is_external else min(replication, len(self.world.nodes)),
            config=((STORAGE, EXTERNAL),) if is_external else self.world.topic_config,
            start_offset=Offset(start),
            created_ms=int(self.world.now_ms()),
        )

        request = proposal(command, ATTEMPT_MS)
        self.world.recorder.invoke(self.process, "create", name=topic)
        result, unknown = yield from self.request(request, deadline_ms=deadline_ms, attempt_ms=ATTEMPT_MS)
        if not self.conclude("create", result, unknown=unknown):
            return False
        for index in range(partitions):
            pid = partition_id(topic_id, PartitionIndex(index))
            known = self.world.externals if is_external else self.world.partitions
            known.append(Known(topic, index, pid, self.world.nodes[:0], None, start, start))
        return True

    def drop(self, topic: str) -> Script:
        request = proposal(DeleteTopic(request_id=self.new_id(), name=topic), ATTEMPT_MS)
        self.world.recorder.invoke(self.process, "drop", name=topic)
        for known in self.world.partitions:
            known.dropped = known.dropped or known.topic == topic
        result, unknown = yield from self.request(request, deadline_ms=DEADLINE_MS, attempt_ms=ATTEMPT_MS)
        self.conclude("drop", result, unknown=unknown)


class Assigner(LoopingClient):
    """Requests offsets without records, moves the mark, and reads it back. As an honest caller it has one request id
    per call, and a bound from before its first attempt. `partition` belongs to a topic of external storage."""

    def __init__(self, world: World, name: str, partition: Known, *, think_ms: float) -> None:
        super().__init__(world, name, think_ms=think_ms)
        self.partition = partition
        self._bound = 0  # a next offset of the past
        self._mark = 0  # the highest that this client has learned

    def act(self) -> Script:
        chance = self.rng.random()
        yield from (self.assign() if chance < 0.7 else self.advance() if chance < 0.85 else self.read())

    def assign(self) -> Script:
        count, request_id, bound = self.rng.randint(1, COUNT_MAX), self.rng.randbytes(16), self._bound
        topic, index = self.partition.topic, self.partition.index

        def request(api: NodeApi, done: Callable[[Any], None]) -> None:
            if self.rng.random() < 0.3:
                self._ask_for_none(api)
            api.assign_offsets(
                topic, index, count, request_id=request_id, not_before=bound, timeout_ms=ASSIGN_MS, done=done
            )

        self.world.recorder.invoke(self.process, "assign", k=self.partition.key, c=count)
        result, unknown = yield from self.request(request, deadline_ms=DEADLINE_MS, attempt_ms=ASSIGN_MS)
        is_assigned = isinstance(result, OffsetsAssigned)
        self.conclude("assign", result, unknown=unknown, **({"o": result.base} if is_assigned else {}))
        if is_assigned:
            self._bound = result.last + 1
        if isinstance(result, SmqError) and result.code is ErrorCode.INVALID_REQUEST:
            self.world.report_violation(self.any_node(), f"a valid request for offsets was refused: {result}")

    def _ask_for_none(self, api: NodeApi) -> None:
        """A neighbour that no node may serve, and that must cost nothing to others."""
        node, request_id = self.any_node(), self.rng.randbytes(16)

        def judge(result: OffsetsAssigned | SmqError) -> None:
            if not isinstance(result, SmqError):
                self.world.report_violation(node, f"a request for 0 offsets got {result}")

        topic, index = self.partition.topic, self.partition.index
        api.assign_offsets(
            topic, index, 0, request_id=request_id, not_before=self._bound, timeout_ms=ASSIGN_MS, done=judge
        )

    def advance(self) -> Script:
        """Not an operation of the history: the answer is a lower bound for the next read of this client."""
        topic, index, offset = self.partition.topic, self.partition.index, self._bound

        def request(api: NodeApi, done: Callable[[Any], None]) -> None:
            api.advance_external_hwm(topic, index, offset, ASSIGN_MS, done)

        result, _ = yield from self.request(request, deadline_ms=DEADLINE_MS, attempt_ms=ASSIGN_MS)
        if not isinstance(result, SmqError | Lost):
            self._mark = max(self._mark, result)

    def read(self) -> Script:
        node, key = self.any_node(), self.partition.key
        self.world.recorder.invoke(self.process, "hwm", k=key, n=node)
        result = yield Call(node, range_of(self.partition, ASSIGN_MS), ASSIGN_MS * 1.5, ASSIGN_MS)
        if isinstance(result, PartitionRange):
            answer = {"lo": result.log_start, "hwm": result.hwm, "next": result.next_offset, "epoch": result.epoch}
            self.world.recorder.ok(self.process, "hwm", **answer)
            if result.hwm < self._mark or result.next_offset < self._bound:
                what = f"{key}: mark {result.hwm} and next {result.next_offset} after {self._mark} and {self._bound}"
                self.world.report_violation(node, what)
        else:
            self.conclude("hwm", result, unknown=is_unknown(result))
