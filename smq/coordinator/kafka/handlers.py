"""Which function answers a request, by its key.

Owns the table of handlers, which has exactly the keys that `api_keys` serves. `connection` looks them up.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeAlias

from smq.coordinator.kafka import (
    acls,
    committed_offsets,
    config_admin,
    consumer_groups,
    group_admin,
    group_membership,
    log_offsets,
    metadata,
    quotas,
    sasl,
    topic_admin,
    users,
)
from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.fetch import fetch
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.kafka.metadata import find_coordinator
from smq.coordinator.kafka.tools.active_producers import describe_producers
from smq.coordinator.kafka.tools.leader_election import elect_leaders
from smq.coordinator.kafka.tools.log_dirs import describe_log_dirs
from smq.coordinator.kafka.tools.raft_quorum import describe_quorum
from smq.coordinator.kafka.tools.topic_partitions import describe_topic_partitions, list_partition_reassignments
from smq.coordinator.kafka.transactions import producer_requests
from smq.coordinator.kafka.transactions.listing import describe_transactions, list_transactions
from smq.coordinator.kafka.transactions.producer_requests import init_producer_id
from smq.coordinator.kafka.transactions.staged_offsets import txn_offset_commit

Handler: TypeAlias = Callable[[Gateway, int, Struct], Awaitable[Struct]]

# Produce is missing: it needs no task (see `produce`). So are those of LONG_POLLS.
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
    ApiKey.SASL_HANDSHAKE: sasl.refuse_handshake,  # as the next: where a user is asked for, the connection answers
    ApiKey.SASL_AUTHENTICATE: sasl.refuse_authenticate,
    ApiKey.API_VERSIONS: metadata.answer_api_versions,
    ApiKey.CREATE_TOPICS: topic_admin.create_topics,
    ApiKey.DELETE_TOPICS: topic_admin.delete_topics,
    ApiKey.DELETE_RECORDS: log_offsets.delete_records,
    ApiKey.INIT_PRODUCER_ID: init_producer_id,
    ApiKey.OFFSET_FOR_LEADER_EPOCH: log_offsets.offset_for_leader_epoch,
    ApiKey.ADD_PARTITIONS_TO_TXN: producer_requests.add_partitions_to_txn,
    ApiKey.ADD_OFFSETS_TO_TXN: producer_requests.add_offsets_to_txn,
    ApiKey.END_TXN: producer_requests.end_txn,
    ApiKey.TXN_OFFSET_COMMIT: txn_offset_commit,
    ApiKey.DESCRIBE_ACLS: acls.describe_acls,
    ApiKey.CREATE_ACLS: acls.create_acls,
    ApiKey.DELETE_ACLS: acls.delete_acls,
    ApiKey.DESCRIBE_CONFIGS: config_admin.describe_configs,
    ApiKey.ALTER_CONFIGS: config_admin.alter_configs,
    ApiKey.DESCRIBE_LOG_DIRS: describe_log_dirs,
    ApiKey.CREATE_PARTITIONS: topic_admin.create_partitions,
    ApiKey.DELETE_GROUPS: group_admin.delete_groups,
    ApiKey.ELECT_LEADERS: elect_leaders,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: config_admin.incremental_alter_configs,
    ApiKey.LIST_PARTITION_REASSIGNMENTS: list_partition_reassignments,
    ApiKey.OFFSET_DELETE: committed_offsets.offset_delete,
    ApiKey.DESCRIBE_CLIENT_QUOTAS: quotas.describe_client_quotas,
    ApiKey.ALTER_CLIENT_QUOTAS: quotas.alter_client_quotas,
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: users.describe_user_scram_credentials,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: users.alter_user_scram_credentials,
    ApiKey.DESCRIBE_QUORUM: describe_quorum,
    ApiKey.UPDATE_FEATURES: metadata.update_features,
    ApiKey.DESCRIBE_CLUSTER: metadata.describe_cluster,
    ApiKey.DESCRIBE_PRODUCERS: describe_producers,
    ApiKey.DESCRIBE_TRANSACTIONS: describe_transactions,
    ApiKey.LIST_TRANSACTIONS: list_transactions,
    ApiKey.LIST_CONFIG_RESOURCES: config_admin.list_config_resources,
    ApiKey.CONSUMER_GROUP_DESCRIBE: consumer_groups.describe,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: describe_topic_partitions,
}

LongPoll: TypeAlias = Callable[[Gateway, int, Struct, group_membership.Client], Awaitable[Struct]]
# What begins in its turn and then waits outside it, for other members of the group.
LONG_POLLS: Final[Mapping[int, LongPoll]] = {
    ApiKey.JOIN_GROUP: group_membership.join_group,
    ApiKey.SYNC_GROUP: group_membership.sync_group,
    ApiKey.CONSUMER_GROUP_HEARTBEAT: consumer_groups.heartbeat,
}
