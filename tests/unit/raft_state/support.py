"""Short ways to drive a Machine in tests: every command goes through the codec, every state through the invariants."""

from dataclasses import replace
from typing import Any

from smq.raft_state.command_codec import decode_command, encode_command
from smq.raft_state.commands import (
    NO_FINGERPRINT,
    UNSEEN,
    Acknowledgement,
    Acl,
    AddToTransaction,
    AdvanceClock,
    AdvanceExternalHwms,
    AdvanceHwms,
    AlterClusterConfig,
    AlterUser,
    ApplyRetention,
    AssignConsumers,
    AssignMembers,
    Assignment,
    AssignOffsets,
    Command,
    CommitBatch,
    CommitOffsets,
    CompactSegment,
    CompleteReplica,
    CompleteReplicas,
    CompleteTransactions,
    ConsumerUpdate,
    Coordinated,
    CreateTopic,
    DeleteGroup,
    DeleteOffsets,
    ElectLeader,
    EndTransaction,
    ExternalAdvance,
    Fingerprint,
    FormGeneration,
    GroupMember,
    HwmAdvance,
    InitTransactions,
    Joining,
    JoinTransactions,
    Listener,
    MarkIncomplete,
    OffsetCommit,
    Partitions,
    Quota,
    ReconcileConsumers,
    RegisterNode,
    RemoveMembers,
    ReplaceMember,
    Request,
    RetainedStart,
    ScramCredential,
    Seal,
    StagedTransaction,
    StageOffsets,
    Subscription,
    UpdateConsumers,
    WrittenMarker,
)
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers.fencing import changes_before
from smq.raft_state.ids import (
    DiskId,
    Epoch,
    Generation,
    Incarnation,
    LogIndex,
    NodeId,
    Offset,
    PartitionId,
    PartitionIndex,
    ProducerEpoch,
    ProducerId,
    RequestId,
    TopicId,
    TsNs,
    partition_id,
)
from smq.raft_state.invariants import check
from smq.raft_state.limits import CLOCK_ELAPSED_MS_MAX, default_init
from smq.raft_state.machine import Machine
from smq.raft_state.replies import Applied, Rejected, Reply
from smq.raft_state.state import ClusterState, GroupState, PartitionState


def tid(n: int) -> TopicId:
    """A topic id that a reader can recognize."""
    return TopicId(n.to_bytes(16, "big"))


def pid(topic: int, index: int = 0) -> PartitionId:
    return partition_id(tid(topic), PartitionIndex(index))


def rid(n: int) -> RequestId:
    return RequestId(n.to_bytes(16, "big"))


def did(n: int) -> DiskId:
    return DiskId(n.to_bytes(16, "big"))


def register(
    node: int,
    incarnation: int = 1,
    address: str = "host:1",
    disk: int = 0,
    kafka: str = "",
    rack: str = "",
    level: int = 1,
    listeners: tuple[Listener, ...] = (),
) -> RegisterNode:
    """On the disk with the node's number, unless another is named."""
    return RegisterNode(
        node=NodeId(node),
        incarnation=Incarnation(incarnation),
        disk=did(disk or max(node, 0)),
        grpc_address=address,
        http_address="host:2",
        kafka_address=kafka,
        rack=rack,
        feature_level=level,
        listeners=listeners,
    )


def credential(mechanism: int, iterations: int = 4_096) -> ScramCredential:
    """Of SCRAM-SHA-256 (1) or SCRAM-SHA-512 (2)."""
    size = {1: 32, 2: 64}.get(mechanism, 1)
    return ScramCredential(
        mechanism=mechanism,
        iterations=iterations,
        salt=b"salt",
        stored_key=b"k" * size,
        server_key=b"s" * size,
    )


def user(name: str, *credentials: ScramCredential, unset: tuple[int, ...] = (), request: int = 0) -> AlterUser:
    request_id = rid(request) if request else RequestId(b"")
    return AlterUser(request_id=request_id, name=name, set_=credentials, unset=unset, decoy_secret=b"x" * 32)


def acl(name: str, operation: int = 3, permission: int = 3, **fields: Any) -> Acl:
    """User:alice may read the topic of this name."""
    given: dict[str, Any] = {"resource": 2, "pattern": 3, "principal": "User:alice", "host": "*"} | fields
    return Acl(name=name, operation=operation, permission=permission, **given)


def quota(key: str, thousandths: int, **entity: str) -> Quota:
    """By kind of entity the name: `user="alice"`, or "" for the default."""
    named = {kind.replace("_", "-"): name for kind, name in entity.items()}
    return Quota(entity=tuple(sorted(named.items())), key=key, thousandths=thousandths)


def listener(name: str) -> Listener:
    return Listener(name=name, grpc_address=f"{name}:1", kafka_address=f"{name}:2")


def topic(n: int, name: str = "", partitions: int = 1, replicas: int = 3, start: int = 0) -> CreateTopic:
    return CreateTopic(
        name=name or f"t{n}",
        topic_id=tid(n),
        partition_count=partitions,
        replication_factor=replicas,
        start_offset=Offset(start),
        created_ms=1_700_000_000_000,
    )


def settings(*unset: str, **set_: object) -> AlterClusterConfig:
    """`settings("a.b", c_d=1)` resets a.b and sets c.d."""
    changes = tuple(sorted((key.replace("_", "."), str(value)) for key, value in set_.items()))
    return AlterClusterConfig(set_=changes, unset=unset)


def kept_minutes(minutes: int) -> AlterClusterConfig:
    """Groups without members keep their offsets so long."""
    return settings(offsets_retention_minutes=minutes)


def producers_kept_ms(ms: int) -> AlterClusterConfig:
    """Partitions remember producers so long."""
    return settings(producer_id_expiration_ms=ms)


def seal(node: int, end: int, incarnation: int = 1) -> Seal:
    return Seal(node=NodeId(node), incarnation=Incarnation(incarnation), end=Offset(end))


def elect(
    partition: PartitionId,
    epoch: int,
    candidate: int,
    end: int,
    incarnation: int = 1,
    *,
    seals: tuple[Seal, ...] | None = None,
    by_leader: bool = False,
) -> ElectLeader:
    """If no seals are given: of nodes 1 to 3, whose logs end there, too."""
    return ElectLeader(
        partition=partition,
        expected_epoch=Epoch(epoch),
        candidate=NodeId(candidate),
        incarnation=Incarnation(incarnation),
        end=Offset(end),
        seals=tuple(seal(node, end) for node in (1, 2, 3)) if seals is None else seals,
        by_leader=by_leader,
    )


def completed(*items: tuple[PartitionId, int, int], incarnation: int = 1) -> CompleteReplicas:
    """(partition, epoch, node) each."""
    return CompleteReplicas(
        items=tuple(
            CompleteReplica(partition=p, epoch=Epoch(epoch), node=NodeId(node), incarnation=Incarnation(incarnation))
            for p, epoch, node in items
        )
    )


def marked(node: int, *partitions: PartitionId, incarnation: int = 1) -> MarkIncomplete:
    return MarkIncomplete(node=NodeId(node), incarnation=Incarnation(incarnation), partitions=partitions)


def compact(
    partition: PartitionId,
    epoch: int,
    seen: int,
    start: int,
    end: int,
    digest: int = 1,
    *,
    tombstones_ms: int = 0,
    is_reset: bool = False,
    log_start: int = 0,
) -> CompactSegment:
    return CompactSegment(
        partition=partition,
        epoch=Epoch(epoch),
        compactions_seen=seen,
        log_start_seen=Offset(log_start),
        start=Offset(start),
        end=Offset(end),
        digest=digest.to_bytes(16, "big"),
        tombstones_ms=tombstones_ms,
        is_reset=is_reset,
    )


def advance(partition: PartitionId, epoch: int, hwm: int, next_offset: int = -1, ts_ns: int = 0) -> HwmAdvance:
    return HwmAdvance(
        partition=partition,
        epoch=Epoch(epoch),
        hwm=Offset(hwm),
        next_offset=Offset(next_offset if next_offset >= 0 else hwm),
        ts_ns=TsNs(ts_ns),
    )


def retained(
    partition: PartitionId, epoch: int, offset: int, *, ms: int = -1, size: int = -1, records: int = -1
) -> RetainedStart:
    return RetainedStart(partition=partition, epoch=Epoch(epoch), offset=Offset(offset), limits=(ms, size, records))


def retention(*items: RetainedStart) -> ApplyRetention:
    return ApplyRetention(items=items)


def advances(*items: HwmAdvance) -> AdvanceHwms:
    return AdvanceHwms(items=items)


def external_topic(n: int, name: str = "", partitions: int = 1, start: int = 0) -> CreateTopic:
    return replace(topic(n, name, partitions, replicas=0, start=start), config=(("storage", "external"),))


def assign(*items: tuple[RequestId, PartitionId, int], not_before: int = 0) -> AssignOffsets:
    """(request id, partition, count) each."""
    return AssignOffsets(
        items=tuple(
            Assignment(request_id=request, partition=p, count=count, not_before=Offset(not_before))
            for request, p, count in items
        )
    )


def advance_external(*items: tuple[PartitionId, int]) -> AdvanceExternalHwms:
    return AdvanceExternalHwms(items=tuple(ExternalAdvance(partition=p, offset=Offset(o)) for p, o in items))


CURRENT = Epoch(-1)  # the driver puts in the epoch of the group's coordinator


def commit(
    group: str, *items: tuple[PartitionId, int], request: RequestId = RequestId(b""), at_ms: int = 5
) -> CommitOffsets:
    """Of no member."""
    return CommitOffsets(
        request_id=request,
        group=group,
        coordinator_epoch=CURRENT,
        items=tuple(OffsetCommit(partition=p, offset=Offset(offset)) for p, offset in items),
        committed_ms=at_ms,
    )


def delete_group(group: str) -> DeleteGroup:
    return DeleteGroup(group=group, coordinator_epoch=CURRENT)


def delete_offsets(group: str, generation: int, *partitions: PartitionId) -> DeleteOffsets:
    return DeleteOffsets(
        group=group, coordinator_epoch=CURRENT, generation=Generation(generation), partitions=partitions
    )


# ------------------------------------------------------------------------------------------------ groups
def member(
    member_id: str, *protocols: str, instance: str = "", metadata: bytes = b"m", session_ms: int = 10_000
) -> GroupMember:
    """With the protocol "range" if none is named."""
    return GroupMember(
        member_id=member_id,
        instance_id=instance,
        client_id="client",
        client_host="/host",
        session_timeout_ms=session_ms,
        rebalance_timeout_ms=session_ms,
        protocols=tuple((name, metadata) for name in protocols or ("range",)),
    )


def form(group: str, epoch: int, generation: int, *members: GroupMember, protocol: str = "range") -> FormGeneration:
    """The generation after `generation`; the first member leads."""
    return FormGeneration(
        group=group,
        coordinator_epoch=Epoch(epoch),
        expected_generation=Generation(generation),
        protocol_type="consumer",
        protocol=protocol,
        leader=members[0].member_id if members else "",
        members=members,
    )


def assign_members(group: str, epoch: int, generation: int, **assignments: bytes) -> AssignMembers:
    return AssignMembers(
        group=group,
        coordinator_epoch=Epoch(epoch),
        generation=Generation(generation),
        assignments=tuple(assignments.items()),
    )


def remove(group: str, epoch: int, generation: int, *member_ids: str, at_ms: int = 1_000) -> RemoveMembers:
    return RemoveMembers(
        group=group,
        coordinator_epoch=Epoch(epoch),
        generation=Generation(generation),
        member_ids=member_ids,
        removed_ms=at_ms,
    )


def replaced(group: str, epoch: int, old: str, new: GroupMember) -> ReplaceMember:
    return ReplaceMember(group=group, coordinator_epoch=Epoch(epoch), old_member_id=old, member=new)


def consumer(
    member_id: str, *topics: str, pattern: str = "", instance: str = "", replaces: str = "", session_ms: int = 10_000
) -> ConsumerUpdate:
    """Of a consumer group."""
    named = replace(member(member_id, instance=instance, session_ms=session_ms), session_timeout_ms=0, protocols=())
    return ConsumerUpdate(member=named, subscription=Subscription(topics=topics, pattern=pattern), replaces=replaces)


def update_consumers(group: str, *updates: ConsumerUpdate) -> UpdateConsumers:
    return UpdateConsumers(group=group, coordinator_epoch=CURRENT, updates=updates)


def indexes(topic: int, *found: int) -> Partitions:
    """Partitions of one topic."""
    return ((tid(topic), found),) if found else ()


def assign_consumers(group: str, generation: int, **targets: Partitions) -> AssignConsumers:
    return AssignConsumers(
        group=group,
        coordinator_epoch=CURRENT,
        generation=Generation(generation),
        assignor="uniform",
        targets=tuple(targets.items()),
    )


def heard(
    group: str, member_id: str, epoch: int, owned: Partitions | None = None, *, is_away: bool = False
) -> ReconcileConsumers:
    """A heartbeat; `owned` is None if it does not say what the member has."""
    said = Acknowledgement(
        member_id=member_id, epoch=epoch, owned=owned or (), says_owned=owned is not None, is_away=is_away
    )
    return ReconcileConsumers(group=group, coordinator_epoch=CURRENT, items=(said,))


def member_commit(
    group: str,
    generation: int,
    member_id: str,
    *items: tuple[PartitionId, int],
    instance: str = "",
    at_ms: int = 5,
    epoch: int = 1,
) -> CommitOffsets:
    return CommitOffsets(
        group=group,
        coordinator_epoch=Epoch(epoch),
        generation=Generation(generation),
        member_id=member_id,
        instance_id=instance,
        items=tuple(OffsetCommit(partition=p, offset=Offset(offset)) for p, offset in items),
        committed_ms=at_ms,
    )


# ------------------------------------------------------------------------------------------------ transactions
def init_transactions(name: str, producer: int = -1, epoch: int = -1, timeout_ms: int = 60_000) -> InitTransactions:
    return InitTransactions(
        transactional_id=name,
        coordinator_epoch=CURRENT,
        timeout_ms=timeout_ms,
        producer_id=ProducerId(producer),
        producer_epoch=ProducerEpoch(epoch),
    )


def add(
    name: str, producer: int, epoch: int, *partitions: PartitionId, groups: tuple[str, ...] = ()
) -> AddToTransaction:
    return AddToTransaction(
        transactional_id=name,
        coordinator_epoch=CURRENT,
        producer_id=ProducerId(producer),
        producer_epoch=ProducerEpoch(epoch),
        partitions=partitions,
        groups=groups,
    )


def join(*items: tuple[PartitionId, int, int]) -> JoinTransactions:
    """(partition, producer, epoch) each."""
    return JoinTransactions(items=tuple(Joining(p, ProducerId(n), ProducerEpoch(epoch)) for p, n, epoch in items))


def end(
    name: str,
    producer: int,
    epoch: int,
    *,
    commit: bool,
    fencing: bool = False,
    replacing: bool = False,
    bumping: bool = False,
) -> EndTransaction:
    return EndTransaction(
        transactional_id=name,
        coordinator_epoch=CURRENT,
        producer_id=ProducerId(producer),
        producer_epoch=ProducerEpoch(epoch),
        is_commit=commit,
        is_fencing=fencing,
        is_replacing=replacing,
        is_bumping=bumping,
    )


def stage(
    name: str,
    producer: int,
    epoch: int,
    group: str,
    *items: tuple[PartitionId, int],
    seen: int = UNSEEN,
    generation: int = -1,
    member_id: str = "",
    joining: bool = False,
) -> StageOffsets:
    return StageOffsets(
        group=group,
        coordinator_epoch=CURRENT,
        transactional_id=name,
        transaction_changes_seen=seen,
        producer_id=ProducerId(producer),
        producer_epoch=ProducerEpoch(epoch),
        generation=Generation(generation),
        member_id=member_id,
        items=tuple(OffsetCommit(partition=p, offset=Offset(offset)) for p, offset in items),
        committed_ms=5,
        is_joining=joining,
    )


def batch(
    app: str, batch_id: int, *staged: tuple[str, int, int], wrote: tuple[int, bytes] | None = None
) -> CommitBatch:
    """Of (transactional id, producer id, epoch); `wrote` is the fingerprint: rows and digest."""
    return CommitBatch(
        app=app,
        batch_id=batch_id,
        transactions=tuple(
            StagedTransaction(transactional_id=name, producer_id=ProducerId(pid_), producer_epoch=ProducerEpoch(epoch))
            for name, pid_, epoch in staged
        ),
        fingerprint=Fingerprint(*wrote) if wrote else NO_FINGERPRINT,
    )


def written(*items: tuple[PartitionId, int, int, int]) -> CompleteTransactions:
    """(partition, epoch, producer, changes) each."""
    return CompleteTransactions(
        items=tuple(
            WrittenMarker(partition=p, epoch=Epoch(epoch), producer_id=ProducerId(producer), changes=changes)
            for p, epoch, producer, changes in items
        )
    )


def proposed(state: ClusterState, command: Coordinated) -> Coordinated:
    """As the group's coordinator proposes it now; numbers that the test has chosen stay."""
    if command.coordinator_epoch == CURRENT:
        command = replace(command, coordinator_epoch=coordinator_of(state, command.subject).epoch)
    if isinstance(command, StageOffsets) and command.transaction_changes_seen == UNSEEN:
        transaction = state.transactions.get(command.transactional_id)
        if transaction is not None:
            command = replace(command, transaction_changes_seen=transaction.changes)
    if command.changes_seen == UNSEEN:
        command = replace(command, changes_seen=changes_before(state, command))
    return command


class Driver:
    """A machine that checks every step: codec round trip, invariants, and that a rejection changes nothing."""

    def __init__(self, machine: Machine | None = None) -> None:
        self.machine = machine or Machine()
        self.index = 0

    def next_index(self) -> LogIndex:
        self.index += 1
        return LogIndex(self.index)

    def apply(self, command: Command) -> Applied:
        """A coordinator's command without numbers is proposed by one that has seen everything."""
        if isinstance(command, Coordinated):
            command = self.proposed(command)
        index = self.next_index()
        decoded = decode_command(encode_command(command, self.machine.state.feature_level))
        assert decoded == command
        before = self._without_replies()
        applied = self.machine.apply(index, decoded)
        check(self.machine.state)
        if isinstance(applied.reply, Rejected):
            assert applied.touched == ()
            assert self._without_replies() == before
        return applied

    def proposed(self, command: Coordinated) -> Coordinated:
        """As the group's coordinator proposes it now."""
        return proposed(self.machine.state, command)

    def ok(self, command: Command) -> Reply:
        """Applies a command that must succeed."""
        reply = self.apply(command).reply
        assert not isinstance(reply, Rejected), reply
        return reply

    def refused(self, command: Command, code: ErrorCode) -> Rejected:
        """Applies a command that must be rejected with this code."""
        reply = self.apply(command).reply
        assert isinstance(reply, Rejected), reply
        assert reply.code is code, reply
        return reply

    def partition(self, partition: PartitionId) -> PartitionState:
        found = self.machine.state.partition(partition)
        assert found is not None
        return found

    def _without_replies(self) -> bytes:
        state = self.machine.state
        replies, state.replies = state.replies, ClusterState().replies
        try:
            return self.machine.snapshot()
        finally:
            state.replies = replies


def aged(replies_before: int, command: Request) -> Request:
    """The command of a node that had counted this many replies when it accepted the request."""
    return replace(command, replies_before=replies_before)


def cluster(nodes: int = 3, *, kafka: bool = False) -> Driver:
    """An initialised cluster of unfenced nodes 1..nodes, all of incarnation 1; with Kafka listeners if requested."""
    driver = Driver()
    driver.ok(default_init("test"))
    for node in range(1, nodes + 1):
        driver.ok(register(node, kafka=f"host:{node}" if kafka else ""))
    return driver


def expire(driver: Driver, now_ms: int) -> None:
    """A step of the clock, proposed with a correct measurement as long as `now_ms` is."""
    before = driver.machine.state.expiry_clock_ms
    elapsed_ms = min(max(now_ms - before, 0), CLOCK_ELAPSED_MS_MAX)
    driver.ok(AdvanceClock(seen_ms=before, elapsed_ms=elapsed_ms, now_ms=now_ms))


def coordinated() -> Driver:
    """One node coordinates everything, in epoch 1."""
    driver = Driver()
    driver.ok(default_init("test"))
    driver.ok(register(1, kafka="host:1"))
    driver.ok(topic(1, partitions=2, replicas=1))
    return driver


def group(driver: Driver, name: str = "g") -> GroupState:
    return driver.machine.state.groups[name]


def stable(driver: Driver, *ids: str) -> None:
    """Generation 1 of "g", each member assigned its own name."""
    driver.ok(form("g", 1, 0, *(member(m) for m in ids)))
    driver.ok(assign_members("g", 1, 1, **{m: m.encode() for m in ids}))
