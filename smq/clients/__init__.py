"""Python producer, consumer and admin, and the wire contract. Needs only grpcio, protobuf and the record codec.

Owns the public names: the errors, and the rest, each imported on first use. It must never import the server, Spark,
lmdb, pysyncobj or uvloop: executors and small scripts import it. Users, spark_connector and coordinator may import it.
"""

import importlib
import os
from typing import TYPE_CHECKING, Final

from smq.raft_state.errors import (
    AppendLost,
    AuthenticationFailed,
    BatchDiffers,
    BatchTooLarge,
    ClientClosed,
    CorruptBatch,
    DataDamaged,
    ErrorCode,
    FeatureNotEnabled,
    FencedInstance,
    Forked,
    GroupNotEmpty,
    GroupSubscribed,
    IllegalGeneration,
    InconsistentProtocol,
    InternalError,
    InvalidBatch,
    InvalidConfig,
    InvalidCredential,
    InvalidOffset,
    InvalidPartitionCount,
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    InvalidRequest,
    InvalidTimestamp,
    InvalidTopicName,
    InvalidTransactionState,
    InvalidTransactionTimeout,
    LeaderUnavailable,
    LimitExceeded,
    LoginNeeded,
    NoCommittedOffset,
    NodeNotReady,
    NoQuorum,
    NotAuthorized,
    NotCoordinator,
    NotLeader,
    NotReplica,
    OffsetNotAvailable,
    OffsetOutOfRange,
    OffsetStaged,
    OffsetTaken,
    OutOfOrderSequence,
    Overloaded,
    ProducerFenced,
    RebalanceInProgress,
    RequestExpired,
    SessionExists,
    ShuttingDown,
    SmqError,
    StorageFull,
    Timeout,
    TooManyProducers,
    TopicExists,
    TransactionEnding,
    UnknownGroup,
    UnknownMember,
    UnknownNode,
    UnknownPartition,
    UnknownSession,
    UnknownTopic,
    UnknownTransactionalId,
    UnknownUser,
    Unreachable,
    UpgradeNeeded,
    UserExists,
    WrongStorage,
    WrongWriter,
)

if TYPE_CHECKING:
    from smq.clients.admin import Admin
    from smq.clients.consumer import Consumer
    from smq.clients.interceptors import ConsumerInterceptor, ProducerInterceptor
    from smq.clients.login import Login
    from smq.clients.offset_assigner import OffsetAssigner
    from smq.clients.positions import OFFSET_TYPES, StartAt
    from smq.clients.producer import Producer, ProducerStats, RecordMetadata
    from smq.clients.producing.delivery import BatchMetadata, Delivery
    from smq.clients.producing.outgoing import ProducerRecord
    from smq.clients.search import RecordFilter, SearchPage
    from smq.clients.serde import JSON, STRING, Serde
    from smq.clients.sync import SyncAdmin, SyncConsumer, SyncOffsetAssigner, SyncProducer
    from smq.clients.tls import Tls
    from smq.clients.types import ConsumerRecord, GroupMembership, RawBatch

__all__ = [
    "JSON",
    "OFFSET_TYPES",
    "STRING",
    "Admin",
    "AppendLost",
    "AuthenticationFailed",
    "BatchDiffers",
    "BatchMetadata",
    "BatchTooLarge",
    "ClientClosed",
    "Consumer",
    "ConsumerInterceptor",
    "ConsumerRecord",
    "CorruptBatch",
    "DataDamaged",
    "Delivery",
    "ErrorCode",
    "FeatureNotEnabled",
    "FencedInstance",
    "Forked",
    "GroupMembership",
    "GroupNotEmpty",
    "GroupSubscribed",
    "IllegalGeneration",
    "InconsistentProtocol",
    "InternalError",
    "InvalidBatch",
    "InvalidConfig",
    "InvalidCredential",
    "InvalidOffset",
    "InvalidPartitionCount",
    "InvalidReplicaAssignment",
    "InvalidReplicationFactor",
    "InvalidRequest",
    "InvalidTimestamp",
    "InvalidTopicName",
    "InvalidTransactionState",
    "InvalidTransactionTimeout",
    "LeaderUnavailable",
    "LimitExceeded",
    "Login",
    "LoginNeeded",
    "NoCommittedOffset",
    "NoQuorum",
    "NodeNotReady",
    "NotAuthorized",
    "NotCoordinator",
    "NotLeader",
    "NotReplica",
    "OffsetAssigner",
    "OffsetNotAvailable",
    "OffsetOutOfRange",
    "OffsetStaged",
    "OffsetTaken",
    "OutOfOrderSequence",
    "Overloaded",
    "Producer",
    "ProducerFenced",
    "ProducerInterceptor",
    "ProducerRecord",
    "ProducerStats",
    "RawBatch",
    "RebalanceInProgress",
    "RecordFilter",
    "RecordMetadata",
    "RequestExpired",
    "SearchPage",
    "Serde",
    "SessionExists",
    "ShuttingDown",
    "SmqError",
    "StartAt",
    "StorageFull",
    "SyncAdmin",
    "SyncConsumer",
    "SyncOffsetAssigner",
    "SyncProducer",
    "Timeout",
    "Tls",
    "TooManyProducers",
    "TopicExists",
    "TransactionEnding",
    "UnknownGroup",
    "UnknownMember",
    "UnknownNode",
    "UnknownPartition",
    "UnknownSession",
    "UnknownTopic",
    "UnknownTransactionalId",
    "UnknownUser",
    "Unreachable",
    "UpgradeNeeded",
    "UserExists",
    "WrongStorage",
    "WrongWriter",
]

# gRPC reads this when it is imported. Its handlers of forks end or hang children that never use it (see `forked`).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_MODULES: Final = {
    "Login": "smq.clients.login",
    "Admin": "smq.clients.admin",
    "JSON": "smq.clients.serde",
    "STRING": "smq.clients.serde",
    "Serde": "smq.clients.serde",
    "Delivery": "smq.clients.producing.delivery",
    "BatchMetadata": "smq.clients.producing.delivery",
    "Consumer": "smq.clients.consumer",
    "ConsumerInterceptor": "smq.clients.interceptors",
    "ConsumerRecord": "smq.clients.types",
    "GroupMembership": "smq.clients.types",
    "OFFSET_TYPES": "smq.clients.positions",
    "OffsetAssigner": "smq.clients.offset_assigner",
    "Producer": "smq.clients.producer",
    "ProducerInterceptor": "smq.clients.interceptors",
    "ProducerRecord": "smq.clients.producing.outgoing",
    "ProducerStats": "smq.clients.producer",
    "RawBatch": "smq.clients.types",
    "RecordFilter": "smq.clients.search",
    "RecordMetadata": "smq.clients.producer",
    "SearchPage": "smq.clients.search",
    "StartAt": "smq.clients.positions",
    "SyncAdmin": "smq.clients.sync",
    "SyncConsumer": "smq.clients.sync",
    "SyncOffsetAssigner": "smq.clients.sync",
    "SyncProducer": "smq.clients.sync",
    "Tls": "smq.clients.tls",
}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
