"""Every command and every reply of the replicated state machine, one row each.

Owns all that is known about a class: its tag, the order of its fields, the handler that applies it, the feature level
that introduced it, which cache remembers the reply to it, the settings that it names, and which part of a node looks at
the state after it. The codec, the machine, the proposer, what follows an apply and the tests' random values are derived
from these rows: a new command is a class in `commands`, a handler and a row. From the first release on, a tag is never
reused, and a row never changes: new fields are a new row with the next version. It must never do more than list and
look up. `command_codec`, `machine`, the proposer and the applied state import it.
"""

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from smq.raft_state import commands, replies
from smq.raft_state.binary import FLAG, INT16, INT32, INT64, TEXT, Fixed, Group, Kind, Many, Record
from smq.raft_state.cluster_config import CLUSTER_CONFIG
from smq.raft_state.commands import Command, Coordinated, Request
from smq.raft_state.config_keys import ConfigKey
from smq.raft_state.fields import (
    ACKNOWLEDGEMENTS,
    ACLS,
    ANY_ID,
    ASSIGNMENTS,
    CONFIG,
    CONSUMER_UPDATES,
    CREDENTIALS,
    FINGERPRINT,
    GROUP_MEMBER,
    LISTENERS,
    NAMED_BLOBS,
    OFFSET_COMMITS,
    PARTITION,
    PARTITION_LISTS,
    QUOTAS,
    Code,
    HwmAdvances,
    ItemResults,
    OffsetRequests,
)
from smq.raft_state.handlers import (
    acls,
    batches,
    cluster_config,
    compaction,
    consumers,
    elections,
    expiry,
    groups,
    members,
    nodes,
    partitions,
    producer_ids,
    quotas,
    topics,
    transactions,
    users,
)
from smq.raft_state.handlers import external_offsets as external
from smq.raft_state.limits import BIRTH_ID_BYTES
from smq.raft_state.replies import Applied
from smq.raft_state.state import Cache, ClusterState, ReplyCache
from smq.raft_state.topic_config import TOPIC_CONFIG

C = TypeVar("C", bound=Command)


class Concern(enum.Enum):
    """What a node has to look at after a command is applied."""

    BIRTH = enum.auto()  # it must be that of the node's directory
    ELECTIONS = enum.auto()  # a partition may need a leader, or a node may lead
    BALANCE = enum.auto()  # a partition may belong to another leader
    ENDED_TRANSACTIONS = enum.auto()  # all markers of some are written


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`since` is the feature level that introduced the row: the first byte of its encoding. The tag is the second."""

    tag: int
    record: Record
    since: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRow(Row):
    """`cache` remembers the reply to a request, unless a node chose its id. `settings`: the keys of a configuration
    that a command names, each of which needs its own feature level. `concern`: what a node looks at after it."""

    handler: Callable[[ClusterState, Any], Applied]
    cache: Cache = Cache.ADMINISTRATION
    settings: Callable[[Any], "Settings"] | None = None
    concern: Concern | None = None
    is_before_init: bool = False  # it may be applied before InitCluster


Settings: TypeAlias = tuple[Mapping[str, ConfigKey], Iterable[str]]


def _command(
    tag: int,
    cls: type[C],
    handler: Callable[[ClusterState, C], Applied],
    *fields: tuple[str, Kind],
    settings: Callable[[C], Settings] | None = None,
    concern: Concern | None = None,
    is_frequent: bool = False,
    is_before_init: bool = False,
) -> CommandRow:
    """A row, typed so that mypy refuses a handler of another command. Clients make many of a frequent command, as of
    each that a coordinator proposes: its replies push out no reply to an administrator."""
    cache = Cache.GROUPS_AND_PRODUCERS if is_frequent or issubclass(cls, Coordinated) else Cache.ADMINISTRATION
    record = Record(cls, fields)
    return CommandRow(
        tag=tag,
        record=record,
        handler=handler,
        cache=cache,
        settings=settings,
        concern=concern,
        is_before_init=is_before_init,
    )


def _reply(tag: int, cls: type[replies.Reply], *fields: tuple[str, Kind]) -> Row:
    return Row(tag=tag, record=Record(cls, fields))


_REQUEST: Final = (("request_id", ANY_ID), ("is_from_node", FLAG), ("replies_before", INT64))
_COORDINATED: Final = (*_REQUEST, ("coordinator_epoch", INT32), ("changes_seen", INT64))
_GROUP: Final = (*_COORDINATED, ("group", TEXT))
_TRANSACTION: Final = (*_COORDINATED, ("transactional_id", TEXT))
_PRODUCER: Final = (("producer_id", INT64), ("producer_epoch", INT16))
_INCARNATION: Final = (("node", INT32), ("incarnation", INT64))

COMMANDS: Final[tuple[CommandRow, ...]] = (
    # the cluster and its nodes
    _command(
        1,
        commands.InitCluster,
        nodes.init_cluster,
        ("cluster_id", TEXT),
        ("birth", Fixed(BIRTH_ID_BYTES)),
        ("topics_max", INT64),
        ("partitions_max", INT64),
        ("groups_max", INT64),
        ("replies_max", INT64),
        concern=Concern.BIRTH,
        is_before_init=True,
    ),
    _command(2, commands.Barrier, nodes.barrier, is_before_init=True),
    _command(
        3,
        commands.RegisterNode,
        nodes.register_node,
        *_INCARNATION,
        ("disk", ANY_ID),
        ("grpc_address", TEXT),
        ("http_address", TEXT),
        ("kafka_address", TEXT),
        ("rack", TEXT),
        ("feature_level", INT32),
        ("listeners", LISTENERS),
        concern=Concern.ELECTIONS,
    ),
    _command(40, commands.RaiseFeatureLevel, nodes.raise_feature_level, ("level", INT32)),
    _command(4, commands.FenceNode, nodes.fence_node, *_INCARNATION, concern=Concern.ELECTIONS),
    _command(5, commands.UnfenceNode, nodes.unfence_node, *_INCARNATION, concern=Concern.ELECTIONS),
    _command(
        6,
        commands.SetNodeDrained,
        nodes.set_node_drained,
        *_REQUEST,
        ("node", INT32),
        ("drained", FLAG),
        concern=Concern.BALANCE,
    ),
    _command(
        22,
        commands.AlterClusterConfig,
        cluster_config.alter_cluster_config,
        *_REQUEST,
        ("set_", CONFIG),
        ("unset", Many(TEXT)),
        settings=lambda command: (CLUSTER_CONFIG, (*dict(command.set_), *command.unset)),
    ),
    # users
    _command(
        60,
        commands.AlterUser,
        users.alter_user,
        *_REQUEST,
        ("name", TEXT),
        ("set_", CREDENTIALS),
        ("unset", Many(INT32)),
        ("may_create", FLAG),
        ("may_replace", FLAG),
        ("decoy_secret", ANY_ID),
        ("administrators", Many(TEXT)),
    ),
    _command(62, commands.AlterAcls, acls.alter_acls, *_REQUEST, ("add", ACLS), ("remove", ACLS)),
    _command(63, commands.AlterQuotas, quotas.alter_quotas, *_REQUEST, ("quotas", QUOTAS)),
    _command(61, commands.DeleteUser, users.delete_user, *_REQUEST, ("name", TEXT), ("administrators", Many(TEXT))),
    # topics
    _command(
        7,
        commands.CreateTopic,
        topics.create_topic,
        *_REQUEST,
        ("name", TEXT),
        ("topic_id", ANY_ID),
        ("partition_count", INT64),
        ("replication_factor", INT64),
        ("config", CONFIG),
        ("assignments", ASSIGNMENTS),
        ("start_offset", INT64),
        ("created_ms", INT64),
        settings=lambda command: (TOPIC_CONFIG, dict(command.config)),
        concern=Concern.ELECTIONS,
    ),
    _command(8, commands.DeleteTopic, topics.delete_topic, *_REQUEST, ("name", TEXT)),
    _command(
        9,
        commands.AddPartitions,
        topics.add_partitions,
        *_REQUEST,
        ("name", TEXT),
        ("partition_count", INT64),
        ("assignments", ASSIGNMENTS),
        concern=Concern.ELECTIONS,
    ),
    _command(
        10,
        commands.AlterTopicConfig,
        topics.alter_topic_config,
        *_REQUEST,
        ("name", TEXT),
        ("set_", CONFIG),
        ("unset", Many(TEXT)),
        settings=lambda command: (TOPIC_CONFIG, (*dict(command.set_), *command.unset)),
    ),
    # partitions
    _command(
        11,
        commands.ElectLeader,
        elections.elect_leader,
        ("partition", PARTITION),
        ("expected_epoch", INT32),
        ("candidate", INT32),
        ("incarnation", INT64),
        ("end", INT64),
        ("seals", Many(Record(commands.Seal, (*_INCARNATION, ("end", INT64))))),
        ("by_leader", FLAG),
        concern=Concern.ELECTIONS,
    ),
    _command(
        30,
        commands.CompleteReplicas,
        elections.complete_replicas,
        (
            "items",
            Many(Record(commands.CompleteReplica, (("partition", PARTITION), ("epoch", INT32), *_INCARNATION))),
        ),
    ),
    _command(31, commands.MarkIncomplete, elections.mark_incomplete, *_INCARNATION, ("partitions", Many(PARTITION))),
    # 32 was SetMode, of builds before the first release (docs/rules.md, rule 28): the tag is not given again
    _command(12, commands.AdvanceHwms, partitions.advance_hwms, ("items", HwmAdvances())),
    _command(
        13,
        commands.AdvanceLogStart,
        partitions.advance_log_start,
        *_REQUEST,
        ("partition", PARTITION),
        ("offset", INT64),
    ),
    _command(
        36,
        commands.ApplyRetention,
        partitions.apply_retention,
        (
            "items",
            Many(
                Record(
                    commands.RetainedStart,
                    (
                        ("partition", PARTITION),
                        ("epoch", INT32),
                        ("offset", INT64),
                        ("limits", Group((INT64, INT64, INT64))),
                    ),
                )
            ),
        ),
    ),
    _command(
        35,
        commands.CompactSegment,
        compaction.compact_segment,
        ("partition", PARTITION),
        ("epoch", INT32),
        ("compactions_seen", INT64),
        ("log_start_seen", INT64),
        ("start", INT64),
        ("end", INT64),
        ("digest", ANY_ID),
        ("tombstones_ms", INT64),
        ("is_reset", FLAG),
    ),
    _command(
        14,
        commands.AssignOffsets,
        external.assign_offsets,
        ("items", OffsetRequests()),
    ),
    _command(
        15,
        commands.AdvanceExternalHwms,
        external.advance_external_hwms,
        ("items", Many(Record(commands.ExternalAdvance, (("partition", PARTITION), ("offset", INT64))))),
    ),
    # producers
    _command(
        16,
        commands.AllocateProducerId,
        producer_ids.allocate_producer_id,
        *_REQUEST,
        *_PRODUCER,
        is_frequent=True,
    ),
    # transactions
    _command(
        50,
        commands.InitTransactions,
        transactions.init_transactions,
        *_TRANSACTION,
        ("timeout_ms", INT32),
        *_PRODUCER,
        ("is_temporary", FLAG),
    ),
    _command(
        51,
        commands.AddToTransaction,
        transactions.add_to_transaction,
        *_TRANSACTION,
        *_PRODUCER,
        ("partitions", Many(PARTITION)),
        ("groups", Many(TEXT)),
    ),
    _command(
        52,
        commands.EndTransaction,
        transactions.end_transaction,
        *_TRANSACTION,
        *_PRODUCER,
        ("is_commit", FLAG),
        ("is_fencing", FLAG),
        ("is_replacing", FLAG),
        ("is_bumping", FLAG),
    ),
    _command(
        53,
        commands.StageOffsets,
        transactions.stage_offsets,
        *_GROUP,
        ("transactional_id", TEXT),
        ("transaction_changes_seen", INT64),
        *_PRODUCER,
        ("generation", INT32),
        ("member_id", TEXT),
        ("instance_id", TEXT),
        ("items", OFFSET_COMMITS),
        ("committed_ms", INT64),
        ("is_joining", FLAG),
    ),
    _command(
        54,
        commands.CompleteTransactions,
        transactions.complete_transactions,
        (
            "items",
            Many(
                Record(
                    commands.WrittenMarker,
                    (("partition", PARTITION), ("epoch", INT32), ("producer_id", INT64), ("changes", INT64)),
                )
            ),
        ),
        concern=Concern.ENDED_TRANSACTIONS,
    ),
    _command(
        55,
        commands.JoinTransactions,
        transactions.join_transactions,
        ("items", Many(Record(commands.Joining, (("partition", PARTITION), *_PRODUCER)))),
    ),
    _command(
        56,
        commands.CommitBatch,
        batches.commit_batch,
        *_REQUEST,
        ("app", TEXT),
        ("batch_id", INT64),
        ("transactions", Many(Record(commands.StagedTransaction, (("transactional_id", TEXT), *_PRODUCER)))),
        ("fingerprint", FINGERPRINT),
        is_frequent=True,
    ),
    # groups: what they have committed
    _command(
        17,
        commands.CommitOffsets,
        groups.commit_offsets,
        *_GROUP,
        ("generation", INT32),
        ("member_id", TEXT),
        ("instance_id", TEXT),
        ("items", OFFSET_COMMITS),
        ("committed_ms", INT64),
    ),
    _command(19, commands.DeleteGroup, groups.delete_group, *_GROUP),
    _command(
        20,
        commands.DeleteOffsets,
        groups.delete_offsets,
        *_GROUP,
        ("generation", INT32),
        ("partitions", Many(PARTITION)),
    ),
    _command(
        21,
        commands.AdvanceClock,
        expiry.advance_clock,
        ("seen_ms", INT64),
        ("elapsed_ms", INT64),
        ("now_ms", INT64),
    ),
    # groups: their members
    _command(
        23,
        commands.FormGeneration,
        members.form_generation,
        *_GROUP,
        ("expected_generation", INT32),
        ("protocol_type", TEXT),
        ("protocol", TEXT),
        ("leader", TEXT),
        ("members", Many(GROUP_MEMBER)),
    ),
    _command(
        24,
        commands.AssignMembers,
        members.assign_members,
        *_GROUP,
        ("generation", INT32),
        ("assignments", NAMED_BLOBS),
    ),
    _command(
        25,
        commands.RemoveMembers,
        members.remove_members,
        *_GROUP,
        ("generation", INT32),
        ("member_ids", Many(TEXT)),
        ("removed_ms", INT64),
    ),
    _command(
        26,
        commands.ReplaceMember,
        members.replace_member,
        *_GROUP,
        ("old_member_id", TEXT),
        ("member", GROUP_MEMBER),
    ),
    _command(27, commands.UpdateConsumers, consumers.update_consumers, *_GROUP, ("updates", CONSUMER_UPDATES)),
    _command(
        28,
        commands.AssignConsumers,
        consumers.assign_consumers,
        *_GROUP,
        ("generation", INT32),
        ("assignor", TEXT),
        ("targets", Many(Group((TEXT, PARTITION_LISTS)))),
    ),
    _command(29, commands.ReconcileConsumers, consumers.reconcile_consumers, *_GROUP, ("items", ACKNOWLEDGEMENTS)),
)

ROW_OF: Final[dict[type[Command], CommandRow]] = {row.record.cls: row for row in COMMANDS}


def cache_of(state: ClusterState, request: Request) -> ReplyCache:
    """The cache that remembers the reply to this request."""
    return state.replies[Cache.BY_NODE if request.is_from_node else ROW_OF[type(request)].cache]


_DONE: Final = _reply(1, replies.Done)
_REJECTED: Final = _reply(2, replies.Rejected, ("code", Code()), ("message", TEXT), ("lo", INT64), ("hi", INT64))
_OFFSETS_ASSIGNED: Final = _reply(6, replies.OffsetsAssigned, ("base", INT64), ("last", INT64))
_EXTERNAL_HWM: Final = _reply(7, replies.ExternalHwm, ("hwm", INT64))
_ITEM_RESULTS: Final = ItemResults(
    {row.tag: row.record for row in (_DONE, _REJECTED, _OFFSETS_ASSIGNED, _EXTERNAL_HWM)}
)

REPLIES: Final[tuple[Row, ...]] = (
    _DONE,
    _REJECTED,
    _reply(3, replies.TopicCreated, ("topic_id", ANY_ID)),
    _reply(4, replies.LeaderElected, ("epoch", INT32), ("start", INT64)),
    _reply(5, replies.HwmsAdvanced, ("accepted", Many(FLAG))),
    _OFFSETS_ASSIGNED,
    _EXTERNAL_HWM,
    _reply(8, replies.Results, ("items", _ITEM_RESULTS)),
    _reply(9, replies.ProducerIdAllocated, ("producer_id", INT64), ("producer_epoch", INT16)),
    _reply(10, replies.GenerationFormed, ("generation", INT32)),
    _reply(11, replies.BatchCommitted, ("is_replay", FLAG)),
)
