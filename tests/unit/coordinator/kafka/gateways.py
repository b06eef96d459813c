"""The Kafka port's gateway to a node, for tests of single requests and connections that join no group."""

from typing import Any, cast

from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import MIB
from smq.coordinator.service.byte_budget import InflightBytes
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.settings import Settings


def gateway_to(calls: NodeCalls | None, inflight: InflightBytes) -> Gateway:
    """`calls` None: for what asks the node nothing."""
    return Gateway(
        calls=cast(Any, calls),
        groups=cast(Any, None),
        settings=Settings({}),
        request_bytes_max=8 * MIB,
        response_bytes_max=8 * MIB,
        data_dir="/data",
        inflight=inflight,
    )


def fetch_of(name: str, topic_id: bytes) -> Struct:
    """A request for partition 0 of one topic, from its first record on."""
    part = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": MIB, "current_leader_epoch": -1}
    return {
        "session_id": 0,
        "isolation_level": 0,
        "rack_id": "",
        "max_wait_ms": 0,
        "min_bytes": 1,
        "max_bytes": MIB,
        "topics": [{"topic": name, "topic_id": topic_id, "partitions": [part]}],
    }
