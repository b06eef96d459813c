"""Random commands to the state machine and to a model of plain dicts, with every property that must always hold."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from smq.raft_state.commands import (
    AddPartitions,
    AdvanceLogStart,
    AllocateProducerId,
    AlterTopicConfig,
    Command,
    CreateTopic,
    DeleteTopic,
    FenceNode,
    UnfenceNode,
)
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import Epoch, Incarnation, NodeId, Offset, PartitionId, PartitionIndex, TopicId, partition_id
from smq.raft_state.limits import default_init
from smq.raft_state.machine import Machine
from smq.raft_state.replies import Applied, HwmsAdvanced, LeaderElected, Rejected, TopicCreated
from smq.raft_state.state import PartitionState
from tests.examples import examples
from tests.unit.raft_state.group_model import GroupRules
from tests.unit.raft_state.support import (
    Driver,
    advance,
    advances,
    completed,
    elect,
    marked,
    register,
    retained,
    retention,
    rid,
    seal,
    tid,
)

NAMES = ["a", "b", "c"]
NODES = [1, 2, 3]
# Mostly what exists and is current, so that a life goes somewhere; now and then what is not.
names = st.sampled_from(["a"] * 5 + ["b"] * 2 + ["c"])
nodes = st.sampled_from(NODES)
indexes = st.sampled_from([0] * 5 + [1, 2])
offsets = st.integers(-1, 12)
staleness = st.sampled_from([0] * 6 + [1, 2])


class ClusterLife(GroupRules):
    """`model[name]` is a dict with the topic's id and one dict per partition; for the groups, see GroupRules."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.model: dict[str, dict[str, Any]] = {}
        self.nodes: dict[int, dict[str, Any]] = {}
        self.hwm_peaks: dict[bytes, int] = {}
        self.last_topic = 0
        self.last_request = 0

    # -------------------------------------------------------------------------------------------- helpers
    def apply(self, command: Command) -> Applied:
        return self.driver.apply(command)

    def expect(self, command: Command, code: ErrorCode | None) -> Applied:
        """Applies, and expects exactly this rejection, or none."""
        applied = self.apply(command)
        got = applied.reply.code if isinstance(applied.reply, Rejected) else None
        assert got is code, (applied.reply, code)
        return applied

    def topic_id(self, name: str) -> TopicId:
        return self.model[name]["id"] if name in self.model else tid(999)

    def pid_of(self, name: str, index: int) -> tuple[PartitionId, bool]:
        pid = partition_id(self.topic_id(name), PartitionIndex(index))
        return pid, self.model_partition(name, index) is not None

    def model_partition(self, name: str, index: int) -> dict[str, Any] | None:
        partitions = self.model[name]["partitions"] if name in self.model else []
        return partitions[index] if index < len(partitions) else None

    def new_partition(self, name: str, index: int, start: int) -> dict[str, Any]:
        """The machine chooses the placement, so it is read from there and checked by the invariants."""
        p = self.driver.machine.state.topics[name].partitions[index]
        return {
            "replicas": p.replicas,
            "leader": p.leader,
            "hwm": start,
            "next": start,
            "lo": start,
            "ts": 0,
            "epoch": 0,
            "incomplete": set(),
        }

    # -------------------------------------------------------------------------------------------- rules
    @initialize()
    def start(self) -> None:
        self.driver.ok(default_init("model"))
        for node in NODES:
            self.driver.ok(register(node, kafka="host:9"))
            self.nodes[node] = {"incarnation": 1, "fenced": False, "disk": node}
        self.create("a", 1, 3, 0)

    @rule(node=nodes, step=st.integers(-1, 2), other_disk=st.sampled_from([False, False, True]))
    def register(self, node: int, step: int, other_disk: bool) -> None:
        entry = self.nodes[node]
        incarnation = entry["incarnation"] + step
        disk = entry["disk"] + 10 if other_disk else entry["disk"]
        code = ErrorCode.STALE_INCARNATION if step < 0 or (step == 0 and other_disk) else None
        self.expect(register(node, incarnation, disk=disk, kafka="host:9"), code)
        if code is None:
            entry.update(incarnation=incarnation, fenced=False, disk=disk)
            if other_disk:
                self.mark(node, [p for topic in self.model.values() for p in topic["partitions"]])

    def mark(self, node: int, partitions: list[dict[str, Any]]) -> None:
        for p in partitions:
            if node in p["replicas"]:
                p["incomplete"].add(node)

    @rule(node=nodes, step=st.sampled_from([0, 0, 0, 1, -1]), fenced=st.sampled_from([True, False, False]))
    def fence(self, node: int, step: int, fenced: bool) -> None:
        entry = self.nodes[node]
        incarnation = Incarnation(entry["incarnation"] + step)
        cls = FenceNode if fenced else UnfenceNode
        self.expect(cls(node=NodeId(node), incarnation=incarnation), ErrorCode.STALE_INCARNATION if step else None)
        if not step:
            entry["fenced"] = fenced

    @rule(name=names, count=st.integers(0, 3), replicas=st.integers(1, 4), start=st.sampled_from([0, 5, -1]))
    def create(self, name: str, count: int, replicas: int, start: int) -> None:
        code = (
            ErrorCode.TOPIC_EXISTS
            if name in self.model
            else ErrorCode.INVALID_PARTITION_COUNT
            if count < 1
            else ErrorCode.INVALID_REPLICATION_FACTOR
            if replicas > len(NODES)
            else ErrorCode.INVALID_OFFSET
            if start < 0
            else None
        )
        self.last_topic += 1
        command = CreateTopic(
            name=name,
            topic_id=tid(self.last_topic),
            partition_count=count,
            replication_factor=replicas,
            start_offset=Offset(start),
            created_ms=1,
        )
        applied = self.expect(command, code)
        if code is None:
            assert applied.reply == TopicCreated(topic_id=tid(self.last_topic))
            self.model[name] = {"id": tid(self.last_topic), "partitions": []}
            self.model[name]["partitions"] = [self.new_partition(name, i, start) for i in range(count)]

    @rule(name=names)
    def delete(self, name: str) -> None:
        self.expect(DeleteTopic(name=name), None if name in self.model else ErrorCode.UNKNOWN_TOPIC)
        gone = self.model.pop(name, None)
        if gone:
            self.forget_topic(gone["id"])

    @rule(name=names, count=st.integers(1, 3))
    def grow(self, name: str, count: int) -> None:
        before = len(self.model[name]["partitions"]) if name in self.model else 0
        fewer = ErrorCode.INVALID_PARTITION_COUNT if count < before else None
        code = fewer if name in self.model else ErrorCode.UNKNOWN_TOPIC
        self.expect(AddPartitions(name=name, partition_count=count), code)
        if code is None:
            self.model[name]["partitions"] += [self.new_partition(name, i, 0) for i in range(before, count)]

    @rule(
        name=names,
        index=indexes,
        stale=staleness,
        step=st.integers(-3, 5),
        more=st.integers(0, 3),
        ts_ns=st.integers(0, 9),
    )
    def advance(self, name: str, index: int, stale: int, step: int, more: int, ts_ns: int) -> None:
        p = self.model_partition(name, index)
        hwm = max((p["hwm"] if p else 0) + step, 0)
        epoch = (p["epoch"] if p else 0) - stale
        pid = partition_id(self.topic_id(name), PartitionIndex(index))
        applied = self.apply(advances(advance(pid, epoch, hwm, hwm + more, ts_ns)))
        is_current = p is not None and stale == 0
        assert applied.reply == HwmsAdvanced(accepted=(is_current,))
        if p is not None and is_current:
            p["hwm"] = max(p["hwm"], hwm)
            p["next"] = max(p["next"], hwm + more, p["hwm"])
            p["ts"] = max(p["ts"], ts_ns)

    @rule(
        name=names,
        index=indexes,
        node=nodes,
        stale=staleness,
        older=staleness,
        beyond=st.sampled_from([-1, 0, 0, 1, 5]),
        seals=st.lists(st.tuples(nodes, st.integers(-2, 6), staleness), max_size=4),
        by_leader=st.sampled_from([False, False, False, True]),
    )
    def elect(
        self,
        name: str,
        index: int,
        node: int,
        stale: int,
        older: int,
        beyond: int,
        seals: list[tuple[int, int, int]],
        by_leader: bool,
    ) -> None:
        """Each seal is (node, its end beyond the hwm, how much older its process is than the registered one)."""
        p = self.model_partition(name, index)
        hwm = p["hwm"] if p else 0
        end = max(hwm + beyond, 0)
        epoch = max((p["epoch"] if p else 0) - stale, 0)
        incarnation = self.nodes[node]["incarnation"] - older
        code = self._election_code(p, epoch, node, older, end)
        is_proven = p is None or by_leader or self._is_proven(p, end, seals)
        pid = partition_id(self.topic_id(name), PartitionIndex(index))
        said = tuple(seal(n, hwm + more, self.nodes[n]["incarnation"] - old) for n, more, old in seals)
        command = elect(pid, epoch, node, end, incarnation, seals=said, by_leader=by_leader)
        applied = self.expect(command, code or (None if is_proven else ErrorCode.ELECTION_REJECTED))
        if p is not None and code is None and is_proven:
            p.update(epoch=epoch + 1, leader=node, next=end)
            p["incomplete"].discard(node)
            assert applied.reply == LeaderElected(epoch=Epoch(epoch + 1), start=Offset(end))

    @staticmethod
    def _is_proven(p: dict[str, Any], end: int, seals: list[tuple[int, int, int]]) -> bool:
        """No majority of the replicas can have a log beyond `end` that they acknowledged, whatever the others have."""
        ends: dict[int, int] = {}
        for node, more, old in seals:
            if node in p["replicas"] and node not in p["incomplete"] and not old:
                ends[node] = max(p["hwm"] + more, ends.get(node, -99))
        majority = len(p["replicas"]) // 2 + 1
        beyond = sum(ends.get(node, 99) > end for node in p["replicas"])
        return beyond < majority and len(p["replicas"]) - len(ends) < majority

    def _election_code(self, p: dict[str, Any] | None, epoch: int, node: int, older: int, end: int) -> ErrorCode | None:
        if p is None:
            return ErrorCode.UNKNOWN_PARTITION
        if epoch != p["epoch"]:
            return ErrorCode.STALE_EPOCH
        if node not in p["replicas"]:
            return ErrorCode.ELECTION_REJECTED
        if older:
            return ErrorCode.STALE_INCARNATION
        return ErrorCode.ELECTION_REJECTED if self.nodes[node]["fenced"] or end < p["hwm"] else None

    @rule(name=names, index=indexes, node=nodes, older=staleness)
    def mark_incomplete(self, name: str, index: int, node: int, older: int) -> None:
        p = self.model_partition(name, index)
        pid = partition_id(self.topic_id(name), PartitionIndex(index))
        command = marked(node, pid, incarnation=self.nodes[node]["incarnation"] - older)
        self.expect(command, ErrorCode.STALE_INCARNATION if older else None)
        if p is not None and not older:
            self.mark(node, [p])

    @rule(name=names, index=indexes, node=nodes, stale=staleness, older=staleness)
    def complete(self, name: str, index: int, node: int, stale: int, older: int) -> None:
        p = self.model_partition(name, index)
        pid = partition_id(self.topic_id(name), PartitionIndex(index))
        epoch = (p["epoch"] if p else 0) - stale
        incarnation = self.nodes[node]["incarnation"] - older
        self.expect(completed((pid, epoch, node), incarnation=incarnation), None)
        if p is not None and not stale and not older:
            p["incomplete"].discard(node)

    @rule(name=names, index=indexes, offset=offsets)
    def move_log_start(self, name: str, index: int, offset: int) -> None:
        p = self.model_partition(name, index)
        if p is None:
            code: ErrorCode | None = ErrorCode.UNKNOWN_PARTITION
        elif offset < 0:
            code = ErrorCode.INVALID_OFFSET
        else:
            code = ErrorCode.OFFSET_OUT_OF_RANGE if offset > p["hwm"] else None
        pid = partition_id(self.topic_id(name), PartitionIndex(index))
        self.expect(AdvanceLogStart(partition=pid, offset=Offset(offset)), code)
        if p is not None and code is None:
            p["lo"] = max(p["lo"], offset)

    @rule(name=names, records=st.sampled_from([5, 9]))
    def limit(self, name: str, records: int) -> None:
        if name in self.model:
            self.expect(AlterTopicConfig(name=name, set_=(("retention.records", str(records)),)), None)
            self.model[name]["records"] = records

    @rule(name=names, index=indexes, offset=offsets, stale=staleness, records=st.sampled_from([5, 5, 9, -1]))
    def retain(self, name: str, index: int, offset: int, stale: int, records: int) -> None:
        """By the limits that the topic has now, or by others."""
        p = self.model_partition(name, index)
        pid = partition_id(self.topic_id(name), PartitionIndex(index))
        item = retained(pid, (p["epoch"] if p else 0) - stale, offset, records=records)
        touched = self.apply(retention(item, item)).touched
        is_due = p is not None and not stale and self.model[name].get("records") == records
        if p is not None and is_due and p["lo"] < offset <= p["hwm"]:
            p["lo"] = offset
            assert touched == (pid,)
        else:
            assert touched == ()

    @rule(name=names, producer=st.booleans())
    def retry_under_a_request_id(self, name: str, producer: bool) -> None:
        self.last_request += 1
        command: Command = AllocateProducerId(request_id=rid(self.last_request))
        if not producer:
            command = AddPartitions(name=f"no-{name}", partition_count=1, request_id=rid(self.last_request))
        first = self.apply(command)
        digest = self.driver.machine.digest()
        assert self.apply(command) == first
        assert self.driver.machine.digest() == digest

    @rule()
    def restart_from_a_snapshot(self) -> None:
        machine = self.driver.machine
        restored = Machine.restore(machine.snapshot())
        assert restored.state == machine.state
        assert restored.digest() == machine.digest()
        self.driver = Driver(restored)

    # -------------------------------------------------------------------------------------------- always
    @invariant()
    def state_is_the_models(self) -> None:
        state = self.driver.machine.state
        assert set(state.topics) == set(self.model)
        for name, topic in self.model.items():
            real = state.topics[name].partitions
            assert [self._seen(p) for p in real] == topic["partitions"]
        self.check_groups(state)
        seen = {
            n: {"incarnation": e.incarnation, "fenced": e.fenced, "disk": int.from_bytes(e.disk, "big")}
            for n, e in state.nodes.items()
        }
        assert seen == self.nodes

    @invariant()
    def hwm_never_goes_back(self) -> None:
        for topic in self.driver.machine.state.topics.values():
            for p in topic.partitions:
                assert p.hwm >= self.hwm_peaks.get(p.pid, 0)
                self.hwm_peaks[p.pid] = p.hwm

    @staticmethod
    def _seen(p: PartitionState) -> dict[str, Any]:
        return {
            "replicas": p.replicas,
            "leader": p.leader,
            "hwm": p.hwm,
            "next": p.next_offset,
            "lo": p.log_start,
            "ts": p.ts_ns,
            "epoch": p.epoch,
            "incomplete": set(p.incomplete),
        }


ClusterLife.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)
test_random_life_agrees_with_a_model_of_dicts = ClusterLife.TestCase
