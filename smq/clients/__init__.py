"""Python producer, consumer and admin, and the wire contract. Needs only grpcio, protobuf and the record codec.

Owns the public names, each imported on first use. It must never import the server, Spark, lmdb, pysyncobj or uvloop:
executors and small scripts import it. Users, spark_connector and coordinator may import it.
"""

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from smq.clients.admin import Admin as Admin
    from smq.clients.consumer import Consumer as Consumer
    from smq.clients.delivery import BatchMetadata as BatchMetadata
    from smq.clients.offset_assigner import OffsetAssigner as OffsetAssigner
    from smq.clients.positions import OFFSET_TYPES as OFFSET_TYPES
    from smq.clients.positions import StartAt as StartAt
    from smq.clients.producer import Producer as Producer
    from smq.clients.producer import ProducerStats as ProducerStats
    from smq.clients.producer import RecordMetadata as RecordMetadata
    from smq.clients.search import RecordFilter as RecordFilter
    from smq.clients.search import SearchPage as SearchPage
    from smq.clients.sync import SyncAdmin as SyncAdmin
    from smq.clients.sync import SyncConsumer as SyncConsumer
    from smq.clients.sync import SyncOffsetAssigner as SyncOffsetAssigner
    from smq.clients.sync import SyncProducer as SyncProducer
    from smq.clients.tls import Tls as Tls
    from smq.clients.types import ConsumerRecord as ConsumerRecord
    from smq.clients.types import RawBatch as RawBatch
    from smq.raft_state.errors import ErrorCode as ErrorCode
    from smq.raft_state.errors import SmqError as SmqError

_MODULES: Final = {
    "Admin": "smq.clients.admin",
    "BatchMetadata": "smq.clients.delivery",
    "Consumer": "smq.clients.consumer",
    "ConsumerRecord": "smq.clients.types",
    "ErrorCode": "smq.raft_state.errors",
    "OFFSET_TYPES": "smq.clients.positions",
    "OffsetAssigner": "smq.clients.offset_assigner",
    "Producer": "smq.clients.producer",
    "ProducerStats": "smq.clients.producer",
    "RawBatch": "smq.clients.types",
    "RecordFilter": "smq.clients.search",
    "RecordMetadata": "smq.clients.producer",
    "SearchPage": "smq.clients.search",
    "SmqError": "smq.raft_state.errors",
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
