"""Blocking versions of producer, consumer, admin and offset assigner, for scripts, notebooks and Spark executors.

Owns the names. Users import them through `smq.clients`.
"""

from smq.clients.sync.admin import SyncAdmin as SyncAdmin
from smq.clients.sync.assigner import SyncOffsetAssigner as SyncOffsetAssigner
from smq.clients.sync.consumer import SyncConsumer as SyncConsumer
from smq.clients.sync.producer import SyncProducer as SyncProducer
