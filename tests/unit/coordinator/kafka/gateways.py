"""The Kafka port's gateway to a node, for tests of single requests and connections that join no group."""

from typing import Any, cast

from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.kafka.inflight import InflightBytes
from smq.coordinator.limits import MIB
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
