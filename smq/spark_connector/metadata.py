"""`.option("metadata", "partitions")` and `"groups"`: what the cluster knows of itself, as DataFrames.

Owns their options, columns and rows. They are facts of the moment at which the read is planned, gathered on the
driver through `smq.clients`; a task only hands them on. No record is read here.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from smq.clients.sync import SyncAdmin
from smq.clients.tls import Tls
from smq.clients.types import ClusterDescription, ReplicaStatus
from smq.raft_state.errors import ErrorCode, SmqError
from smq.spark_connector.errors import OptionError
from smq.spark_connector.option_values import topics as topics_of
from smq.spark_connector.option_values import whole_number
from smq.spark_connector.options import RETRY_TIMEOUT_MS_DEFAULT, TLS_KEYS, servers_of, tls_of

Row: TypeAlias = tuple[Any, ...]
NODE_TIMEOUT_MS: Final = 2_000.0  # a node that hangs leaves nulls, and does not hold up the rest
KNOWN: Final = ("metadata", "servers", "subscribe", "group", "retryTimeoutMs", *TLS_KEYS)
_BY_LOWER_NAME: Final = {
    name.lower(): name for name in (*KNOWN, "bootstrap.servers", "kafka.bootstrap.servers", "path", "__datasource__")
}

PARTITION_COLUMNS: Final[dict[str, DataType]] = {
    "topic": StringType(),
    "partition": IntegerType(),
    "log_start": LongType(),
    "hwm": LongType(),
    "next_offset": LongType(),
    "leader": IntegerType(),
    "leader_available": BooleanType(),
    "epoch": IntegerType(),
    "replicas": ArrayType(IntegerType()),
    "silent_replicas": ArrayType(IntegerType()),  # gave no answer: the next two do not count them
    "size_bytes": LongType(),  # of the largest replica; null where none answered
    "replica_lag": LongType(),  # records that the slowest replica has yet to fetch; null where none answered
}
GROUP_COLUMNS: Final[dict[str, DataType]] = {
    "group": StringType(),  # a Kafka client's group g is kafka-cg-g
    "state": StringType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),  # the next one to read; null where nothing is committed
    "metadata": StringType(),  # what the consumer committed beside it
    "committed_ms": LongType(),  # when, Unix time; null where nothing is committed
    "log_start": LongType(),
    "hwm": LongType(),
    "lag": LongType(),  # records from `offset` to the high water mark; never negative; null where nothing is committed
    "member_id": StringType(),  # who was assigned the partition; null where nobody was
    "client_id": StringType(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataOptions:
    """A validated read of `kind`. No topics, or no groups: all there are."""

    kind: str
    servers: tuple[str, ...]
    tls: Tls | None
    topics: tuple[str, ...]
    groups: tuple[str, ...]
    timeout_ms: int


def metadata_options(options: Mapping[str, str]) -> MetadataOptions:
    """OptionError where something is missing, wrong, or of no use here."""
    kind = options["metadata"].strip().lower()
    if kind not in _KINDS:
        raise OptionError(f"option 'metadata' is one of {', '.join(map(repr, _KINDS))}, not {options['metadata']!r}")
    for key in options:
        if key.lower() not in _BY_LOWER_NAME:
            near = difflib.get_close_matches(key.lower(), list(_BY_LOWER_NAME), n=1)
            hint = f"did you mean {_BY_LOWER_NAME[near[0]]!r}?" if near else f"it knows {', '.join(KNOWN)}"
            raise OptionError(f"a read of metadata has no option {key!r}; {hint}")
    groups = tuple(part.strip() for part in options.get("group", "").split(",") if part.strip())
    if kind != "groups" and "group" in options:
        raise OptionError("option 'group' belongs to metadata 'groups'")
    subscribe = options.get("subscribe")
    return MetadataOptions(
        kind=kind,
        servers=servers_of(options),
        tls=tls_of(options),
        topics=topics_of(subscribe) if subscribe is not None else (),
        groups=groups,
        timeout_ms=whole_number(options, "retryTimeoutMs") or RETRY_TIMEOUT_MS_DEFAULT,
    )


def metadata_schema(kind: str) -> StructType:
    """The columns of this kind. OptionError for a kind that there is not."""
    found = _KINDS.get(kind.strip().lower())
    if found is None:
        raise OptionError(f"option 'metadata' is one of {', '.join(map(repr, _KINDS))}, not {kind!r}")
    return StructType([StructField(name, type_) for name, type_ in found.columns.items()])


class MetadataSlice(InputPartition):
    """The rows themselves: there are few."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__(None)
        self.rows = rows


class MetadataReader(DataSourceReader):
    """One read, one look at the cluster. A user's schema chooses columns by name."""

    def __init__(self, options: MetadataOptions, schema: StructType) -> None:
        self._options = options
        columns = list(_KINDS[options.kind].columns)
        wanted = [field.name.lower() for field in schema.fields]  # as Spark compares names
        for name, field in zip(wanted, schema.fields, strict=True):
            if _KINDS[options.kind].columns.get(name) != field.dataType:
                there = metadata_schema(options.kind).simpleString()
                raise OptionError(f"metadata {options.kind!r} has no column {field.simpleString()}; it is {there}")
        self._positions = [columns.index(name) for name in wanted]

    def partitions(self) -> list[InputPartition]:
        options = self._options
        with SyncAdmin(
            options.servers, tls=options.tls, timeout_ms=options.timeout_ms, connect_timeout_ms=options.timeout_ms
        ) as admin:
            cluster = admin.describe_cluster(options.topics)
            known = {topic.name for topic in cluster.topics}
            for name in options.topics:
                if name not in known:
                    raise SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {name!r}")
            rows = list(_KINDS[options.kind].rows(admin, cluster, options))
        return [MetadataSlice([tuple(row[i] for i in self._positions) for row in rows])]

    def read(self, partition: InputPartition) -> Iterator[Row]:
        return iter(partition.rows if isinstance(partition, MetadataSlice) else [])


def _partition_rows(admin: SyncAdmin, cluster: ClusterDescription, options: MetadataOptions) -> Iterator[Row]:
    replicas = _replica_states(admin, cluster, options)
    for topic in sorted(cluster.topics, key=lambda t: t.name):
        for p in topic.partitions:
            states = [replicas.get((node, topic.name, p.partition)) for node in p.replicas]
            answers = [state for state in states if state is not None]
            silent = [node for node, state in zip(p.replicas, states, strict=True) if state is None]
            yield (
                topic.name,
                p.partition,
                p.log_start,
                p.hwm,
                p.next_offset,
                p.leader,
                p.leader_available,
                p.epoch,
                list(p.replicas),
                silent,
                max((state.size_bytes for state in answers), default=None),
                max((max(p.hwm - state.verified_end, 0) for state in answers), default=None),
            )


def _replica_states(
    admin: SyncAdmin, cluster: ClusterDescription, options: MetadataOptions
) -> dict[tuple[int, str, int], ReplicaStatus]:
    """What each node that answers says of its own replicas."""
    found = {}
    for node in cluster.nodes:
        if node.fenced or not node.grpc_address:
            continue
        try:
            with SyncAdmin(
                [node.grpc_address],
                tls=options.tls,
                timeout_ms=NODE_TIMEOUT_MS,
                connect_timeout_ms=NODE_TIMEOUT_MS,
            ) as one:
                status = one.node_status(node.grpc_address)
        except SmqError:
            continue  # shown as silent
        found.update({(node.node, r.topic, r.partition): r for r in status.replicas})
    return found


def _group_rows(admin: SyncAdmin, cluster: ClusterDescription, options: MetadataOptions) -> Iterator[Row]:
    topics = {topic.name for topic in cluster.topics}
    for name in options.groups or [group.name for group in admin.list_groups()]:
        try:
            group = admin.describe_group(name)
        except SmqError as e:
            if e.code is ErrorCode.UNKNOWN_GROUP and not options.groups:
                continue  # it went between the two questions
            raise
        owners = {place: member for member in group.members for place in member.partitions}
        for p in sorted(group.positions, key=lambda p: (p.topic, p.partition)):
            if p.topic not in topics:
                continue
            owner = owners.get((p.topic, p.partition))
            committed_ms = None if p.offset is None else p.committed_ms
            yield (
                *(name, group.summary.state, p.topic, p.partition, p.offset, p.metadata, committed_ms),
                *(p.log_start, p.hwm, p.lag),
                *((owner.member_id, owner.client_id) if owner is not None else (None, None)),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    columns: dict[str, DataType]
    rows: Callable[[SyncAdmin, ClusterDescription, MetadataOptions], Iterator[Row]]


_KINDS: Final = {
    "partitions": _Kind(columns=PARTITION_COLUMNS, rows=_partition_rows),
    "groups": _Kind(columns=GROUP_COLUMNS, rows=_group_rows),
}
