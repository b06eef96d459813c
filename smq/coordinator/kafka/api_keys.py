"""Which keys and versions of the Kafka protocol a node serves: the table that ApiVersions, connections and docs share.

Owns the floors and ceilings. A key is in the table only if all of it, in all of these versions, does what its
definition says. What is missing is not advertised.

Floors are Kafka 4's own, which every client we tested accepts (of Produce it advertises lower ones than it serves, see
`metadata`). Ceilings are those of the definitions unless the row says why not.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Final

from smq.coordinator.kafka.codec import (
    Decoder,
    Encoder,
    Message,
    Versions,
    compile_decoder,
    compile_encoder,
    load_message,
)


class ApiKey(enum.IntEnum):
    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    OFFSET_FOR_LEADER_EPOCH = 23
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_ACLS = 29
    CREATE_ACLS = 30
    DELETE_ACLS = 31
    DESCRIBE_CONFIGS = 32
    ALTER_CONFIGS = 33
    DESCRIBE_LOG_DIRS = 35
    SASL_AUTHENTICATE = 36
    CREATE_PARTITIONS = 37
    DELETE_GROUPS = 42
    ELECT_LEADERS = 43
    INCREMENTAL_ALTER_CONFIGS = 44
    LIST_PARTITION_REASSIGNMENTS = 46
    OFFSET_DELETE = 47
    DESCRIBE_CLIENT_QUOTAS = 48
    ALTER_CLIENT_QUOTAS = 49
    DESCRIBE_USER_SCRAM_CREDENTIALS = 50
    ALTER_USER_SCRAM_CREDENTIALS = 51
    DESCRIBE_QUORUM = 55
    UPDATE_FEATURES = 57
    DESCRIBE_CLUSTER = 60
    DESCRIBE_PRODUCERS = 61
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66
    CONSUMER_GROUP_HEARTBEAT = 68
    CONSUMER_GROUP_DESCRIBE = 69
    LIST_CONFIG_RESOURCES = 74
    DESCRIBE_TOPIC_PARTITIONS = 75


@dataclass(frozen=True, slots=True)
class Served:
    """One row: the definitions' name and the versions that are served."""

    name: str
    versions: Versions


SERVED: Final[Mapping[int, Served]] = MappingProxyType(
    {
        ApiKey.PRODUCE: Served("Produce", Versions(3, 13)),
        ApiKey.FETCH: Served("Fetch", Versions(4, 18)),
        ApiKey.LIST_OFFSETS: Served("ListOffsets", Versions(1, 11)),
        ApiKey.METADATA: Served("Metadata", Versions(0, 13)),
        ApiKey.OFFSET_COMMIT: Served("OffsetCommit", Versions(1, 10)),  # 1: kaf and other users of older saramas
        ApiKey.OFFSET_FETCH: Served("OffsetFetch", Versions(1, 10)),
        ApiKey.FIND_COORDINATOR: Served("FindCoordinator", Versions(0, 6)),
        ApiKey.JOIN_GROUP: Served("JoinGroup", Versions(0, 9)),
        ApiKey.HEARTBEAT: Served("Heartbeat", Versions(0, 4)),
        ApiKey.LEAVE_GROUP: Served("LeaveGroup", Versions(0, 5)),
        ApiKey.SYNC_GROUP: Served("SyncGroup", Versions(0, 5)),
        ApiKey.DESCRIBE_GROUPS: Served("DescribeGroups", Versions(0, 6)),
        ApiKey.LIST_GROUPS: Served("ListGroups", Versions(0, 5)),
        # After version 0 come tokens without headers, of clients before Kafka 1.0.
        ApiKey.SASL_HANDSHAKE: Served("SaslHandshake", Versions(1, 1)),
        ApiKey.API_VERSIONS: Served("ApiVersions", Versions(0, 4)),
        ApiKey.CREATE_TOPICS: Served("CreateTopics", Versions(2, 7)),
        ApiKey.DELETE_TOPICS: Served("DeleteTopics", Versions(1, 6)),
        ApiKey.DELETE_RECORDS: Served("DeleteRecords", Versions(0, 2)),
        # Version 6, of two-phase commits with other systems, is unstable in Kafka 4.3, which does not serve it either.
        ApiKey.INIT_PRODUCER_ID: Served("InitProducerId", Versions(0, 5)),
        ApiKey.OFFSET_FOR_LEADER_EPOCH: Served("OffsetForLeaderEpoch", Versions(2, 4)),
        # Versions 4 and 5 are how Kafka's brokers ask one another. smq's nodes look into the replicated state.
        ApiKey.ADD_PARTITIONS_TO_TXN: Served("AddPartitionsToTxn", Versions(0, 3)),
        ApiKey.ADD_OFFSETS_TO_TXN: Served("AddOffsetsToTxn", Versions(0, 4)),
        ApiKey.END_TXN: Served("EndTxn", Versions(0, 5)),
        ApiKey.TXN_OFFSET_COMMIT: Served("TxnOffsetCommit", Versions(0, 5)),
        ApiKey.DESCRIBE_ACLS: Served("DescribeAcls", Versions(1, 3)),
        ApiKey.CREATE_ACLS: Served("CreateAcls", Versions(1, 3)),
        ApiKey.DELETE_ACLS: Served("DeleteAcls", Versions(1, 3)),
        ApiKey.DESCRIBE_CONFIGS: Served("DescribeConfigs", Versions(1, 4)),
        ApiKey.ALTER_CONFIGS: Served("AlterConfigs", Versions(0, 2)),
        ApiKey.DESCRIBE_LOG_DIRS: Served("DescribeLogDirs", Versions(1, 5)),
        ApiKey.SASL_AUTHENTICATE: Served("SaslAuthenticate", Versions(0, 2)),
        ApiKey.CREATE_PARTITIONS: Served("CreatePartitions", Versions(0, 3)),
        ApiKey.DELETE_GROUPS: Served("DeleteGroups", Versions(0, 2)),
        ApiKey.ELECT_LEADERS: Served("ElectLeaders", Versions(0, 2)),
        ApiKey.INCREMENTAL_ALTER_CONFIGS: Served("IncrementalAlterConfigs", Versions(0, 1)),
        ApiKey.LIST_PARTITION_REASSIGNMENTS: Served("ListPartitionReassignments", Versions(0, 0)),
        ApiKey.OFFSET_DELETE: Served("OffsetDelete", Versions(0, 0)),
        ApiKey.DESCRIBE_CLIENT_QUOTAS: Served("DescribeClientQuotas", Versions(0, 1)),
        ApiKey.ALTER_CLIENT_QUOTAS: Served("AlterClientQuotas", Versions(0, 1)),
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: Served("DescribeUserScramCredentials", Versions(0, 0)),
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS: Served("AlterUserScramCredentials", Versions(0, 0)),
        ApiKey.DESCRIBE_QUORUM: Served("DescribeQuorum", Versions(0, 2)),
        ApiKey.UPDATE_FEATURES: Served("UpdateFeatures", Versions(0, 2)),
        ApiKey.DESCRIBE_CLUSTER: Served("DescribeCluster", Versions(0, 2)),
        ApiKey.DESCRIBE_PRODUCERS: Served("DescribeProducers", Versions(0, 0)),
        ApiKey.DESCRIBE_TRANSACTIONS: Served("DescribeTransactions", Versions(0, 0)),
        ApiKey.LIST_TRANSACTIONS: Served("ListTransactions", Versions(0, 2)),
        ApiKey.CONSUMER_GROUP_HEARTBEAT: Served("ConsumerGroupHeartbeat", Versions(0, 1)),
        ApiKey.CONSUMER_GROUP_DESCRIBE: Served("ConsumerGroupDescribe", Versions(0, 0)),
        ApiKey.LIST_CONFIG_RESOURCES: Served("ListConfigResources", Versions(0, 1)),
        ApiKey.DESCRIBE_TOPIC_PARTITIONS: Served("DescribeTopicPartitions", Versions(0, 0)),
    }
)


@cache
def request_message(key: int) -> Message:
    return load_message(SERVED[key].name + "Request")


@cache
def response_message(key: int) -> Message:
    return load_message(SERVED[key].name + "Response")


@cache
def request_decoder(key: int, version: int) -> Decoder:
    """The decoder of a served key and version. The first call compiles it, which takes a millisecond."""
    return compile_decoder(request_message(key), version)


@cache
def response_encoder(key: int, version: int) -> Encoder:
    return compile_encoder(response_message(key), version)


@cache
def is_header_flexible(key: int, version: int) -> bool:
    """Whether the header of a request has tagged fields. So does the header of its response, except for ApiVersions,
    which a client reads before it knows the node's versions."""
    return version in request_message(key).flexible
