"""Authorized operations and DescribeAcls: what a client may do, in a cluster that has no ACLs.

Owns the bit fields. Without ACLs a client may do all that Kafka has for a resource. Only handlers import it.
"""

import enum
from typing import Final

from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.kafka.gateway import Gateway


class _Operation(enum.IntEnum):
    """Kafka's AclOperation: a code is also the position of its bit."""

    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


def _bits(*operations: _Operation) -> int:
    return sum(1 << operation for operation in operations)


_CONFIGS: Final = (_Operation.DESCRIBE_CONFIGS, _Operation.ALTER_CONFIGS)
_NOT_ASKED: Final = -(2**31)
_TOPIC: Final = _bits(
    _Operation.READ,
    _Operation.WRITE,
    _Operation.CREATE,
    _Operation.DELETE,
    _Operation.ALTER,
    _Operation.DESCRIBE,
    *_CONFIGS,
)
_GROUP: Final = _bits(_Operation.READ, _Operation.DELETE, _Operation.DESCRIBE, *_CONFIGS)
_CLUSTER: Final = _bits(
    _Operation.CREATE,
    _Operation.ALTER,
    _Operation.DESCRIBE,
    _Operation.CLUSTER_ACTION,
    _Operation.IDEMPOTENT_WRITE,
    *_CONFIGS,
)


def on_topic(*, is_asked: bool) -> int:
    return _TOPIC if is_asked else _NOT_ASKED


def on_group(*, is_asked: bool) -> int:
    return _GROUP if is_asked else _NOT_ASKED


def on_cluster(*, is_asked: bool) -> int:
    return _CLUSTER if is_asked else _NOT_ASKED


async def describe_acls(_gateway: Gateway, _version: int, _request: Struct) -> Struct:
    """As a Kafka cluster without an authorizer."""
    return {
        "throttle_time_ms": 0,
        "error_code": KafkaError.SECURITY_DISABLED,
        "error_message": "there are no ACLs: every client that can connect may do everything",
        "resources": [],
    }
