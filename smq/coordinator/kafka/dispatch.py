"""Dispatch: from the bytes of a request to its handler, and from the handler's answer to the parts of the response.

Owns the headers of requests and responses, and the table of handlers, which has exactly the keys that `api_keys`
serves. It holds no connection: `connection` hands it frames and takes gather lists.
"""

import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from smq.coordinator.kafka import (
    authorization,
    committed_offsets,
    group_admin,
    group_membership,
    log_offsets,
    metadata,
    topic_admin,
    wire,
)
from smq.coordinator.kafka.api_keys import SERVED, ApiKey, is_header_flexible, request_decoder, response_encoder
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.configs import admin as configs_admin
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.kafka.fetch import fetch
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.kafka.group_membership import LONG_POLLS, Client
from smq.coordinator.kafka.metadata import find_coordinator
from smq.coordinator.kafka.tools import listings
from smq.coordinator.kafka.tools.active_producers import describe_producers
from smq.coordinator.kafka.tools.leader_election import elect_leaders
from smq.coordinator.kafka.tools.log_dirs import describe_log_dirs
from smq.coordinator.kafka.tools.raft_quorum import describe_quorum
from smq.coordinator.kafka.tools.topic_partitions import describe_topic_partitions
from smq.coordinator.kafka.transactions import changes
from smq.coordinator.kafka.transactions.changes import init_producer_id
from smq.coordinator.kafka.transactions.listings import describe_transactions, list_transactions
from smq.coordinator.kafka.transactions.offsets import txn_offset_commit
from smq.coordinator.kafka.wire import Budget, Buffer, CodecError

Handler: TypeAlias = Callable[[Gateway, int, Struct], Awaitable[Struct]]

_HEADER: Final = struct.Struct(">hhi")  # key, version, correlation id; a nullable string follows
_RESPONSE_HEADER: Final = struct.Struct(">ii")  # size, correlation id

# Produce is missing: it needs no task (see `produce`). So are JoinGroup and SyncGroup, which begin in their turn and
# then wait outside it: see `begin`.
HANDLERS: Final[Mapping[int, Handler]] = {
    ApiKey.FETCH: fetch,
    ApiKey.LIST_OFFSETS: log_offsets.list_offsets,
    ApiKey.METADATA: metadata.metadata,
    ApiKey.OFFSET_COMMIT: committed_offsets.offset_commit,
    ApiKey.OFFSET_FETCH: committed_offsets.offset_fetch,
    ApiKey.FIND_COORDINATOR: find_coordinator,
    ApiKey.HEARTBEAT: group_membership.heartbeat,
    ApiKey.LEAVE_GROUP: group_membership.leave_group,
    ApiKey.DESCRIBE_GROUPS: group_admin.describe_groups,
    ApiKey.LIST_GROUPS: group_admin.list_groups,
    ApiKey.API_VERSIONS: metadata.answer_api_versions,
    ApiKey.CREATE_TOPICS: topic_admin.create_topics,
    ApiKey.DELETE_TOPICS: topic_admin.delete_topics,
    ApiKey.DELETE_RECORDS: log_offsets.delete_records,
    ApiKey.INIT_PRODUCER_ID: init_producer_id,
    ApiKey.OFFSET_FOR_LEADER_EPOCH: log_offsets.offset_for_leader_epoch,
    ApiKey.ADD_PARTITIONS_TO_TXN: changes.add_partitions_to_txn,
    ApiKey.ADD_OFFSETS_TO_TXN: changes.add_offsets_to_txn,
    ApiKey.END_TXN: changes.end_txn,
    ApiKey.TXN_OFFSET_COMMIT: txn_offset_commit,
    ApiKey.DESCRIBE_ACLS: authorization.describe_acls,
    ApiKey.DESCRIBE_CONFIGS: configs_admin.describe_configs,
    ApiKey.ALTER_CONFIGS: configs_admin.alter_configs,
    ApiKey.DESCRIBE_LOG_DIRS: describe_log_dirs,
    ApiKey.CREATE_PARTITIONS: topic_admin.create_partitions,
    ApiKey.DELETE_GROUPS: group_admin.delete_groups,
    ApiKey.ELECT_LEADERS: elect_leaders,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: configs_admin.incremental_alter_configs,
    ApiKey.LIST_PARTITION_REASSIGNMENTS: listings.list_partition_reassignments,
    ApiKey.OFFSET_DELETE: committed_offsets.offset_delete,
    ApiKey.DESCRIBE_CLIENT_QUOTAS: listings.describe_client_quotas,
    ApiKey.DESCRIBE_QUORUM: describe_quorum,
    ApiKey.DESCRIBE_CLUSTER: metadata.describe_cluster,
    ApiKey.DESCRIBE_PRODUCERS: describe_producers,
    ApiKey.DESCRIBE_TRANSACTIONS: describe_transactions,
    ApiKey.LIST_TRANSACTIONS: list_transactions,
    ApiKey.LIST_CONFIG_RESOURCES: listings.list_config_resources,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: describe_topic_partitions,
}


@dataclass(slots=True)  # not frozen, for speed, as BatchHeader
class Request:
    """`body` is None if the version of ApiVersions is unknown: the answer then names the known ones."""

    key: int
    version: int
    correlation_id: int
    client_id: str
    body: Struct | None


def parse_request(frame: memoryview) -> Request:
    """CodecError for a request that is not served: its sender might not be able to read any answer."""
    if len(frame) < _HEADER.size:
        raise CodecError(f"a request has at least {_HEADER.size} bytes, this has {len(frame)}")
    key, version, correlation_id = _HEADER.unpack_from(frame)
    row = SERVED.get(key)
    if row is None:
        raise CodecError(f"key {key} is not served")
    if version not in row.versions:
        if key == ApiKey.API_VERSIONS:
            return Request(key, version, correlation_id, "", None)
        raise CodecError(f"{row.name} is served in versions {row.versions.lo} to {row.versions.hi}, not {version}")
    client_id, position = _read_client(frame, _HEADER.size, is_flexible=is_header_flexible(key, version))
    return Request(key, version, correlation_id, client_id, request_decoder(key, version)(frame, position))


def _read_client(frame: memoryview, position: int, *, is_flexible: bool) -> tuple[str, int]:
    """The client's name, and the position after it and after the tags, of which none is known."""
    try:
        name, position = wire.read_nullable_string(frame, position)
        if is_flexible:
            _, position = wire.read_tags(frame, position, Budget())
    except (struct.error, IndexError, UnicodeDecodeError) as e:
        raise CodecError(f"the header is cut or garbled: {e}") from e
    return name or "", position


def encode_response(request: Request, body: Struct) -> list[Buffer]:
    """The response as parts to be sent in this order."""
    version = request.version if request.body is not None else 0
    parts = response_encoder(request.key, version)(body)
    # The header of an ApiVersions response is never flexible: its reader does not know the node's versions yet.
    tags = b"\0" if request.key != ApiKey.API_VERSIONS and is_header_flexible(request.key, version) else b""
    size = 4 + len(tags) + sum(map(len, parts))
    return [_RESPONSE_HEADER.pack(size, request.correlation_id) + tags, *parts]


async def answer(gateway: Gateway, request: Request) -> Struct:
    """For every key but Produce, JoinGroup and SyncGroup."""
    if request.body is None:
        return metadata.api_versions(KafkaError.UNSUPPORTED_VERSION)
    return await HANDLERS[request.key](gateway, request.version, request.body)


def begin(gateway: Gateway, request: Request, host: str) -> Awaitable[Struct]:
    """For JoinGroup and SyncGroup. The request has begun when this returns; the awaitable is the answer."""
    assert request.body is not None, "only an ApiVersions of an unknown version has none"
    return LONG_POLLS[request.key](gateway, request.version, request.body, Client(request.client_id, f"/{host}"))
