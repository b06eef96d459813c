"""`.option("metadata", "partitions")` and `"groups"`: the cluster's metadata as DataFrames.

Owns their options, columns and rows. The driver gathers the rows through `smq.clients` when the read is planned; a task
only passes them on. It must never read a record.
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
from smq.clients.types import ClusterDescription, ReplicaStatus
from smq.raft_state.errors import ErrorCode, SmqError
from smq.spark_connector.errors import OptionError
from smq.spark_connector.option_values import topics as topics_of
from smq.spark_connector.option_values import whole_number
from smq.spark_connector.options import (
    KAFKA_LOGIN_KEYS,
    LOGIN_KEYS,
    RETRY_TIMEOUT_MS_DEFAULT,
    SERVER_KEYS,
    TLS_KEYS,
    Security,
    security_of,
    servers_of,
)

Row: TypeAlias = tuple[Any, ...]
NODE_TIMEOUT_MS: Final = 2_000.0  # a hanging node leaves nulls, and does not delay the rest
KNOWN: Final = (
    "metadata",
    "servers",
    "subscribe",
    "group",
    "retryTimeoutMs",
    *TLS_KEYS,
    *LOGIN_KEYS,
    *KAFKA_LOGIN_KEYS,
)
_BY_LOWER_NAME: Final = {name.lower(): name for name in (*KNOWN, *SERVER_KEYS, "path", "__datasource__")}

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
    "silent_replicas": ArrayType(IntegerType()),  # gave no answer: the next two columns ignore them
    "size_bytes": LongType(),  # of the largest replica; null if none answered
    "replica_lag": LongType(),  # records that the slowest replica has yet to fetch; null if none answered
}
GROUP_COLUMNS: Final[dict[str, DataType]] = {
    "group": StringType(),  # a Kafka client's group g is kafka-cg-g
    "state": StringType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),  # the next one to read; null if nothing is committed
    "metadata": StringType(),  # the consumer's text in the commit
    "committed_ms": LongType(),  # Unix time of the commit; null if nothing is committed
    "log_start": LongType(),
    "hwm": LongType(),
    "lag": LongType(),  # offsets from `offset`, or without one from `log_start`, to `hwm`; never negative
    # Each is null if it is not known, as `lag` if the partition's leader does not answer.
    "lag_records": LongType(),  # those that can still be read; null also where compaction has been
    "lag_bytes": LongType(),  # stored size of the batches with them
    "lag_ms": LongType(),  # since the next of them was appended; 0 without one
    "member_id": StringType(),  # the member with the partition; null if it is not assigned
    "client_id": StringType(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataOptions:
    """A validated read of `kind`. No topics, or no groups, means all."""

    kind: str
    servers: tuple[str, ...]
    security: Security
    topics: tuple[str, ...]
    groups: tuple[str, ...]
    timeout_ms: int


def metadata_options(options: Mapping[str, str]) -> MetadataOptions:
    """OptionError if an option is missing, wrong, or meaningless here."""
    kind = options["metadata"].strip().lower()
    if kind not in _KINDS:
        raise OptionError(_unknown_kind(options["metadata"]))
    for key in options:
        if key.lower() not in _BY_LOWER_NAME:
            near = difflib.get_close_matches(key.lower(), list(_BY_LOWER_NAME), n=1)
            hint = f"did you mean {_BY_LOWER_NAME[near[0]]!r}?" if near else f"known options: {', '.join(KNOWN)}"
            raise OptionError(f"a metadata read has no option {key!r}; {hint}")
    groups = tuple(part.strip() for part in options.get("group", "").split(",") if part.strip())
    if kind != "groups" and "group" in options:
        raise OptionError("option 'group' belongs to metadata 'groups'")
    subscribe = options.get("subscribe")
    return MetadataOptions(
        kind=kind,
        servers=servers_of(options),
        security=security_of(options),
        topics=topics_of(subscribe) if subscribe is not None else (),
        groups=groups,
        timeout_ms=whole_number(options, "retryTimeoutMs") or RETRY_TIMEOUT_MS_DEFAULT,
    )


def metadata_schema(kind: str) -> StructType:
    """The columns of this kind. OptionError for an unknown kind."""
    found = _KINDS.get(kind.strip().lower())
    if found is None:
        raise OptionError(_unknown_kind(kind))
    return StructType([StructField(name, type_) for name, type_ in found.columns.items()])


def _unknown_kind(kind: str) -> str:
    return f"option 'metadata' must be one of {', '.join(map(repr, _KINDS))}, not {kind!r}"


class MetadataSlice(InputPartition):
    """The rows themselves: there are few."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__(None)
        self.rows = rows


class MetadataReader(DataSourceReader):
    """One read asks the cluster once. A user's schema chooses columns by name."""

    def __init__(self, options: MetadataOptions, schema: StructType) -> None:
        self._options = options
        columns = list(_KINDS[options.kind].columns)
        wanted = [field.name.lower() for field in schema.fields]  # as Spark compares names
        for name, field in zip(wanted, schema.fields, strict=True):
            if _KINDS[options.kind].columns.get(name) != field.dataType:
                columns_text = metadata_schema(options.kind).simpleString()
                message = f"metadata {options.kind!r} has no column {field.simpleString()}; its columns: {columns_text}"
                raise OptionError(message)
        self._positions = [columns.index(name) for name in wanted]

    def partitions(self) -> list[InputPartition]:
        options = self._options
        with SyncAdmin(
            options.servers,
            **options.security._asdict(),
            timeout_ms=options.timeout_ms,
            connect_timeout_ms=options.timeout_ms,
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
    """Each answering node's report on its own replicas."""
    found = {}
    for node in cluster.nodes:
        if node.fenced or not node.grpc_address:
            continue
        try:
            with SyncAdmin(
                [node.grpc_address],
                **options.security._asdict(),
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
            group = admin.describe_group(name, with_sizes=True)
        except SmqError as e:
            if e.code is ErrorCode.UNKNOWN_GROUP and not options.groups:
                continue  # deleted between the two calls
            raise
        owners = {place: member for member in group.members for place in member.partitions}
        for p in sorted(group.positions, key=lambda p: (p.topic, p.partition)):
            if p.topic not in topics:
                continue
            owner = owners.get((p.topic, p.partition))
            committed_ms = None if p.offset is None else p.committed_ms
            yield (
                *(name, group.summary.state, p.topic, p.partition, p.offset, p.metadata, committed_ms),
                *(p.log_start, p.hwm, *p.figures),
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
