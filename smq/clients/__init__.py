"""Python producer, consumer and admin, and the wire contract. Needs only grpcio, protobuf and the record codec.

Owns the public names: the errors, and the rest, each imported on first use. It must never import the server, Spark,
lmdb, pysyncobj or uvloop: executors and small scripts import it. Users, spark_connector and coordinator may import it.
"""

import importlib
import os
from typing import TYPE_CHECKING, Final

from smq.raft_state.errors import (
    AppendLost as AppendLost,
)
from smq.raft_state.errors import (
    BatchTooLarge as BatchTooLarge,
)
from smq.raft_state.errors import (
    ClientClosed as ClientClosed,
)
from smq.raft_state.errors import (
    CorruptBatch as CorruptBatch,
)
from smq.raft_state.errors import (
    DataDamaged as DataDamaged,
)
from smq.raft_state.errors import (
    ErrorCode as ErrorCode,
)
from smq.raft_state.errors import (
    FeatureNotEnabled as FeatureNotEnabled,
)
from smq.raft_state.errors import (
    FencedInstance as FencedInstance,
)
from smq.raft_state.errors import (
    Forked as Forked,
)
from smq.raft_state.errors import (
    GroupNotEmpty as GroupNotEmpty,
)
from smq.raft_state.errors import (
    GroupSubscribed as GroupSubscribed,
)
from smq.raft_state.errors import (
    IllegalGeneration as IllegalGeneration,
)
from smq.raft_state.errors import (
    InconsistentProtocol as InconsistentProtocol,
)
from smq.raft_state.errors import (
    InternalError as InternalError,
)
from smq.raft_state.errors import (
    InvalidBatch as InvalidBatch,
)
from smq.raft_state.errors import (
    InvalidConfig as InvalidConfig,
)
from smq.raft_state.errors import (
    InvalidOffset as InvalidOffset,
)
from smq.raft_state.errors import (
    InvalidPartitionCount as InvalidPartitionCount,
)
from smq.raft_state.errors import (
    InvalidReplicaAssignment as InvalidReplicaAssignment,
)
from smq.raft_state.errors import (
    InvalidReplicationFactor as InvalidReplicationFactor,
)
from smq.raft_state.errors import (
    InvalidRequest as InvalidRequest,
)
from smq.raft_state.errors import (
    InvalidTimestamp as InvalidTimestamp,
)
from smq.raft_state.errors import (
    InvalidTopicName as InvalidTopicName,
)
from smq.raft_state.errors import (
    InvalidTransactionState as InvalidTransactionState,
)
from smq.raft_state.errors import (
    InvalidTransactionTimeout as InvalidTransactionTimeout,
)
from smq.raft_state.errors import (
    LeaderUnavailable as LeaderUnavailable,
)
from smq.raft_state.errors import (
    LimitExceeded as LimitExceeded,
)
from smq.raft_state.errors import (
    NoCommittedOffset as NoCommittedOffset,
)
from smq.raft_state.errors import (
    NodeNotReady as NodeNotReady,
)
from smq.raft_state.errors import (
    NoQuorum as NoQuorum,
)
from smq.raft_state.errors import (
    NotCoordinator as NotCoordinator,
)
from smq.raft_state.errors import (
    NotLeader as NotLeader,
)
from smq.raft_state.errors import (
    NotReplica as NotReplica,
)
from smq.raft_state.errors import (
    OffsetNotAvailable as OffsetNotAvailable,
)
from smq.raft_state.errors import (
    OffsetOutOfRange as OffsetOutOfRange,
)
from smq.raft_state.errors import (
    OffsetStaged as OffsetStaged,
)
from smq.raft_state.errors import (
    OutOfOrderSequence as OutOfOrderSequence,
)
from smq.raft_state.errors import (
    Overloaded as Overloaded,
)
from smq.raft_state.errors import (
    ProducerFenced as ProducerFenced,
)
from smq.raft_state.errors import (
    RebalanceInProgress as RebalanceInProgress,
)
from smq.raft_state.errors import (
    RequestExpired as RequestExpired,
)
from smq.raft_state.errors import (
    SessionExists as SessionExists,
)
from smq.raft_state.errors import (
    ShuttingDown as ShuttingDown,
)
from smq.raft_state.errors import (
    SmqError as SmqError,
)
from smq.raft_state.errors import (
    StorageFull as StorageFull,
)
from smq.raft_state.errors import (
    Timeout as Timeout,
)
from smq.raft_state.errors import (
    TooManyProducers as TooManyProducers,
)
from smq.raft_state.errors import (
    TopicExists as TopicExists,
)
from smq.raft_state.errors import (
    TransactionEnding as TransactionEnding,
)
from smq.raft_state.errors import (
    UnknownGroup as UnknownGroup,
)
from smq.raft_state.errors import (
    UnknownMember as UnknownMember,
)
from smq.raft_state.errors import (
    UnknownNode as UnknownNode,
)
from smq.raft_state.errors import (
    UnknownPartition as UnknownPartition,
)
from smq.raft_state.errors import (
    UnknownSession as UnknownSession,
)
from smq.raft_state.errors import (
    UnknownTopic as UnknownTopic,
)
from smq.raft_state.errors import (
    UnknownTransactionalId as UnknownTransactionalId,
)
from smq.raft_state.errors import (
    Unreachable as Unreachable,
)
from smq.raft_state.errors import (
    UpgradeNeeded as UpgradeNeeded,
)
from smq.raft_state.errors import (
    WrongStorage as WrongStorage,
)

if TYPE_CHECKING:
    from smq.clients.admin import Admin as Admin
    from smq.clients.consumer import Consumer as Consumer
    from smq.clients.interceptors import ConsumerInterceptor as ConsumerInterceptor
    from smq.clients.interceptors import ProducerInterceptor as ProducerInterceptor
    from smq.clients.offset_assigner import OffsetAssigner as OffsetAssigner
    from smq.clients.positions import OFFSET_TYPES as OFFSET_TYPES
    from smq.clients.positions import StartAt as StartAt
    from smq.clients.producer import Producer as Producer
    from smq.clients.producer import ProducerStats as ProducerStats
    from smq.clients.producer import RecordMetadata as RecordMetadata
    from smq.clients.producing.delivery import BatchMetadata as BatchMetadata
    from smq.clients.producing.delivery import Delivery as Delivery
    from smq.clients.producing.outgoing import ProducerRecord as ProducerRecord
    from smq.clients.search import RecordFilter as RecordFilter
    from smq.clients.search import SearchPage as SearchPage
    from smq.clients.serde import JSON as JSON
    from smq.clients.serde import STRING as STRING
    from smq.clients.serde import Serde as Serde
    from smq.clients.sync import SyncAdmin as SyncAdmin
    from smq.clients.sync import SyncConsumer as SyncConsumer
    from smq.clients.sync import SyncOffsetAssigner as SyncOffsetAssigner
    from smq.clients.sync import SyncProducer as SyncProducer
    from smq.clients.tls import Tls as Tls
    from smq.clients.types import ConsumerRecord as ConsumerRecord
    from smq.clients.types import GroupMembership as GroupMembership
    from smq.clients.types import RawBatch as RawBatch

# gRPC reads this when it is imported. Its handlers of forks end or hang children that never use it (see `forked`).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_MODULES: Final = {
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
