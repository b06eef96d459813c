"""The data types that clients return to their users: descriptions of the cluster, positions, records.

Owns the shapes, and how they are read from the wire. Plain data: it must never do I/O. Every module may import it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from smq.clients.lag_totals import LagFigures, LagTotal, lags_by_member, total_of
from smq.clients.pb import smq_pb2 as pb

if TYPE_CHECKING:  # a command that reads no records need not load their codec
    from smq.records import Headers

TopicPartition: TypeAlias = tuple[str, int]
KAFKA_GROUP_PREFIX: Final = "kafka-cg-"  # of groups of Kafka clients, whose group g is kafka-cg-g here

# Which records a reader gets: up to the last stable offset and none of an aborted transaction, or all below the high
# water mark, whatever becomes of their transactions.
Isolation: TypeAlias = Literal["read_committed", "read_uncommitted"]
ISOLATIONS: Final[Mapping[str, "pb.Isolation.ValueType"]] = {
    "read_committed": pb.READ_COMMITTED,
    "read_uncommitted": pb.READ_UNCOMMITTED,
}


class ConsumerRecord(NamedTuple):
    """A record below the high water mark. `timestamp_ms` is the producer's create time, `ts_ns` the leader's append
    time in nanoseconds, which is strictly increasing in a partition, record by record."""

    topic: str
    partition: int
    offset: int
    ts_ns: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: "Headers"


class RawBatch(NamedTuple):
    """One RecordBatch v2, exactly as in the log. Its first records may be below the requested position.
    `ts_ns` is that of `base_offset`; at the offset that lies n beyond, it is n more."""

    topic: str
    partition: int
    base_offset: int
    last_offset: int
    ts_ns: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedRange:
    """The answer of a one-shot fetch. `batches` is empty if nothing arrived within the wait. A batch without data has
    no record for this reader: it was aborted, or says how a transaction ended."""

    log_start: int
    hwm: int
    lso: int
    batches: tuple[RawBatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDescription:
    node: int
    grpc_address: str
    http_address: str
    kafka_address: str
    fenced: bool
    incarnation: int
    drained: bool
    rack: str  # "" for none
    feature_level: int  # the highest that the node knows


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionDescription:
    partition: int
    leader: int
    leader_available: bool
    epoch: int
    replicas: tuple[int, ...]
    log_start: int
    hwm: int
    next_offset: int
    is_end_known: bool = True  # False: the leader has not answered, `hwm` and `next_offset` may be higher


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDescription:
    name: str
    topic_id: bytes
    replication_factor: int
    config: dict[str, str]
    created_ms: int
    partitions: tuple[PartitionDescription, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDescription:
    cluster_id: str
    raft_leader: int | None
    nodes: tuple[NodeDescription, ...]
    topics: tuple[TopicDescription, ...]
    feature_level: int  # of the cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    topic: str
    partition: int
    is_leader: bool
    epoch: int
    log_start: int
    hwm: int
    appended_end: int
    durable_end: int
    verified_end: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """What a node has seen happen, as its console shows it."""

    at_ms: int  # Unix time, by the node's clock
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    node: int
    incarnation: int
    is_ready: bool
    raft_leader: int | None
    raft_term: int
    applied_index: int
    commit_index: int
    digest: str
    replicas: tuple[ReplicaStatus, ...]
    certificate_ends_ms: int | None = None  # Unix time; None if the node has no TLS
    warnings: tuple[str, ...] = ()  # conditions that need an operator's action
    disk_free_bytes: int = 0  # on the file system of its data
    disk_total_bytes: int = 0
    events: tuple[NodeEvent, ...] = ()  # the newest ones, the oldest of them first
    now_ms: int = 0  # Unix time by the node's clock, when it answered; 0 from a node that does not say it
    version: str = ""  # of the smq that it runs


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedOffset:
    """Where a reader starts. `clamped`: the request was outside [lo, hi], this is the nearest offset inside."""

    offset: int
    clamped: bool
    lo: int
    hi: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRange:
    """The linearizable state of a partition; ring slots [range_start, range_stop)."""

    topic: str
    partition: int
    topic_id: bytes
    range_start: int
    range_stop: int
    log_start: int
    lso: int
    hwm: int
    next_offset: int
    leader: int
    epoch: int
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedOffset:
    """`offset` is the next one to read."""

    offset: int
    metadata: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMembership:
    """A group, and its member that acts for it; without a member id, none."""

    group: str
    member_id: str = ""
    instance_id: str = ""
    generation: int = -1


def member_message(membership: GroupMembership) -> pb.GroupMember | None:
    """None if no member acts."""
    if not membership.member_id:
        return None
    return pb.GroupMember(
        member_id=membership.member_id, instance_id=membership.instance_id, generation=membership.generation
    )


def cluster_from_message(m: pb.DescribeClusterResponse) -> ClusterDescription:
    nodes = tuple(
        NodeDescription(
            node=n.node,
            grpc_address=n.grpc_address,
            http_address=n.http_address,
            kafka_address=n.kafka_address,
            fenced=n.fenced,
            incarnation=n.incarnation,
            drained=n.drained,
            rack=n.rack,
            feature_level=n.feature_level,
        )
        for n in m.nodes
    )
    return ClusterDescription(
        cluster_id=m.cluster_id,
        raft_leader=m.raft_leader if m.HasField("raft_leader") else None,
        nodes=nodes,
        topics=tuple(_topic(t) for t in m.topics),
        feature_level=m.feature_level,
    )


def _topic(t: pb.TopicInfo) -> TopicDescription:
    partitions = tuple(
        PartitionDescription(
            partition=p.partition,
            leader=p.leader,
            leader_available=p.leader_available,
            epoch=p.epoch,
            replicas=tuple(p.replicas),
            log_start=p.log_start,
            hwm=p.hwm,
            next_offset=p.next_offset,
            is_end_known=not p.end_unknown,
        )
        for p in sorted(t.partitions, key=lambda p: p.partition)
    )
    return TopicDescription(
        name=t.name,
        topic_id=t.topic_id,
        replication_factor=t.replication_factor,
        config=dict(t.config),
        created_ms=t.created_ms,
        partitions=partitions,
    )


def node_status_from_message(m: pb.NodeStatusResponse) -> NodeStatus:
    replicas = tuple(
        ReplicaStatus(
            topic=r.topic,
            partition=r.partition,
            is_leader=r.is_leader,
            epoch=r.epoch,
            log_start=r.log_start,
            hwm=r.hwm,
            appended_end=r.appended_end,
            durable_end=r.durable_end,
            verified_end=r.verified_end,
            size_bytes=r.size_bytes,
        )
        for r in m.replicas
    )
    return NodeStatus(
        node=m.node,
        incarnation=m.incarnation,
        is_ready=m.is_ready,
        raft_leader=m.raft_leader if m.HasField("raft_leader") else None,
        raft_term=m.raft_term,
        applied_index=m.applied_index,
        commit_index=m.commit_index,
        digest=m.digest,
        replicas=replicas,
        warnings=tuple(m.warnings),
        certificate_ends_ms=m.certificate_ends_ms if m.HasField("certificate_ends_ms") else None,
        disk_free_bytes=m.disk_free_bytes,
        disk_total_bytes=m.disk_total_bytes,
        events=tuple(NodeEvent(at_ms=e.at_ms, kind=e.kind, text=e.text) for e in m.events),
        now_ms=m.now_ms,
        version=m.version,
    )


def range_from_message(m: pb.GetPartitionRangeInfoResponse) -> PartitionRange:
    return PartitionRange(
        topic=m.topic,
        partition=m.partition,
        topic_id=m.topic_id,
        range_start=m.range_start,
        range_stop=m.range_stop,
        log_start=m.log_start,
        lso=m.lso,
        hwm=m.hwm,
        next_offset=m.next_offset,
        leader=m.leader,
        epoch=m.epoch,
        replicas=tuple(m.replicas),
    )


@dataclass(frozen=True, slots=True)
class ClusterSetting:
    """A setting of the whole cluster. If it is not set, `value` is the default, which a node.toml may replace."""

    key: str
    value: str
    is_set: bool


@dataclass(frozen=True, slots=True)
class User:
    """A user, and the iterations of each mechanism by which it may log in."""

    name: str
    mechanisms: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acl:
    """A rule about what a user may do, in Kafka's words. "*" stands for every user, every host, and every name of a
    literal pattern."""

    user: str
    operation: str  # all, read, write, create, delete, alter, describe, describe_configs, alter_configs, ...
    resource: str  # topic, group, cluster, transactional_id
    name: str
    pattern: str = "literal"  # or prefixed
    permission: str = "allow"  # or deny, which beats it
    host: str = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class AclDecision:
    """`rule` is the one that decides; None for a super user, or if no rule matches."""

    is_allowed: bool
    is_super_user: bool
    rule: Acl | None


def acl_from_message(acl: pb.Acl) -> Acl:
    return Acl(**{name: getattr(acl, name) for name in ACL_FIELDS})


ACL_FIELDS = tuple(field.name for field in fields(Acl))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What a user, a client id, both, or an address may use of each node, in Kafka's words. "" stands for each one that
    has no quota of its own; None for none."""

    key: str  # producer_byte_rate, consumer_byte_rate, request_percentage, controller_mutation_rate, ...
    value: float  # at most three decimals; 0 removes it
    user: str | None = None
    client_id: str | None = None
    ip: str | None = None


def quota_from_message(quota: pb.Quota) -> Quota:
    entity = {name: getattr(quota, name) for name in ("user", "client_id", "ip") if quota.HasField(name)}
    return Quota(key=quota.key, value=quota.value, **entity)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionSummary:
    transactional_id: str
    state: str  # Empty, Ongoing, PrepareCommit, PrepareAbort, CompleteCommit or CompleteAbort, as in Kafka
    producer_id: int
    producer_epoch: int
    timeout_ms: int  # after which an open transaction is aborted
    open_ms: (
        int | None
    )  # how long it has been open, by the cluster's own clock, which moves in steps; None if it is not


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionDescription:
    """`partitions` of an ended transaction are those whose logs do not say so yet."""

    summary: TransactionSummary
    coordinator: int | None
    partitions: tuple[tuple[str, int], ...]
    groups: tuple[str, ...]  # whose offsets are committed with it


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSummary:
    """An app that commits batches. Both times are by the cluster's own clock, which moves in steps."""

    app: str
    batch_id: int  # the last that it has committed
    idle_ms: int  # since its last commit
    expires_ms: int | None  # until it is forgotten, if it commits nothing; None: never


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """`state` is Empty, PreparingRebalance, CompletingRebalance or Stable. A Kafka client's group g is kafka-cg-g."""

    name: str
    state: str
    protocol_type: str
    members: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """`partitions` are a consumer's assigned partitions; `instance_id` is None unless the member is static."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """`offset` is None if nothing is committed: then the lag counts from the log start, as for a reader that starts
    there. `lag` is None if the end is not known, and never negative."""

    topic: str
    partition: int
    offset: int | None
    log_start: int
    hwm: int
    lag: int | None
    committed_ms: int
    metadata: str
    is_end_known: bool = True  # False: the partition's leader has not answered, `hwm` may be higher
    # Each is None if it is not known, or was not asked for.
    lag_records: int | None = None  # those that can still be read, if neither compaction nor storage=external hide it
    lag_bytes: int | None = None  # stored size of the batches with them
    lag_ms: int | None = None  # since the next record was appended; 0 without one

    @property
    def figures(self) -> LagFigures:
        return LagFigures(self.lag, self.lag_records, self.lag_bytes, self.lag_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDescription:
    summary: GroupSummary
    protocol: str
    coordinator: int | None
    members: tuple[GroupMember, ...]
    positions: tuple[GroupPosition, ...]

    @property
    def lag(self) -> int | None:
        """In offsets, over all partitions that are committed or assigned. None if that of one is not known."""
        return self.lag_total.offsets.value

    @property
    def lag_total(self) -> LagTotal:
        """Over the same partitions. Bytes and age need `with_sizes`."""
        return total_of(p.figures for p in self.positions)

    def lags_by_member(self) -> dict[str, LagTotal]:
        """By member id, over its assigned partitions."""
        assigned = {m.member_id: m.partitions for m in self.members}
        return lags_by_member(assigned, {(p.topic, p.partition): p.figures for p in self.positions})


def transaction_summary_from_message(t: pb.TransactionSummary) -> TransactionSummary:
    return TransactionSummary(
        transactional_id=t.transactional_id,
        state=t.state,
        producer_id=t.producer_id,
        producer_epoch=t.producer_epoch,
        timeout_ms=t.transaction_timeout_ms,
        open_ms=t.open_ms if t.HasField("open_ms") else None,
    )


def transaction_from_message(m: pb.DescribeTransactionResponse) -> TransactionDescription:
    return TransactionDescription(
        summary=transaction_summary_from_message(m.transaction),
        coordinator=m.coordinator if m.HasField("coordinator") else None,
        partitions=tuple((p.topic, p.partition) for p in m.partitions),
        groups=tuple(m.groups),
    )


def app_from_message(a: pb.App) -> AppSummary:
    return AppSummary(
        app=a.app,
        batch_id=a.batch_id,
        idle_ms=a.idle_ms,
        expires_ms=a.expires_ms if a.HasField("expires_ms") else None,
    )


def group_summary_from_message(g: pb.GroupSummary) -> GroupSummary:
    return GroupSummary(
        name=g.group, state=g.state, protocol_type=g.protocol_type, members=g.members, generation=g.generation
    )


def group_from_message(m: pb.DescribeGroupResponse) -> GroupDescription:
    return GroupDescription(
        summary=group_summary_from_message(m.group),
        protocol=m.protocol,
        coordinator=m.coordinator if m.HasField("coordinator") else None,
        members=tuple(
            GroupMember(
                member_id=g.member_id,
                instance_id=g.instance_id if g.HasField("instance_id") else None,
                client_id=g.client_id,
                client_host=g.client_host,
                session_timeout_ms=g.session_timeout_ms,
                partitions=tuple((p.topic, p.partition) for p in g.partitions),
            )
            for g in m.members
        ),
        positions=tuple(
            GroupPosition(
                topic=o.topic,
                partition=o.partition,
                offset=o.offset if o.HasField("offset") else None,
                log_start=o.log_start,
                hwm=o.hwm,
                lag=o.lag if o.HasField("lag") else None,
                committed_ms=o.committed_ms,
                metadata=o.metadata,
                is_end_known=not o.end_unknown,
                lag_records=o.lag_records if o.HasField("lag_records") else None,
                lag_bytes=o.lag_bytes if o.HasField("lag_bytes") else None,
                lag_ms=o.lag_ms if o.HasField("lag_ms") else None,
            )
            for o in m.offsets
        ),
    )
