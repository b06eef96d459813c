"""DescribeTransactions and ListTransactions: what tools show of the transactions that this node coordinates.

Owns the answers. Kafka's tools ask every node.
"""

from typing import Final

from smq.coordinator.kafka.cluster_view import barrier_failure, coordinator_refusal
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.kafka.transactions.producer_requests import refusal
from smq.coordinator.pattern_re2 import InvalidPattern, matcher
from smq.coordinator.service.transaction_states import STATE_NAMES, open_ms, state_name
from smq.coordinator.service.turns import Turns
from smq.raft_state.ids import PartitionId, split_partition_id
from smq.raft_state.state import ClusterState, TransactionPhase

_KNOWN: Final = frozenset({*STATE_NAMES, "Dead", "PrepareEpochFence"})  # the last two: of Kafka's own


async def describe_transactions(gateway: Gateway, _version: int, request: Struct) -> Struct:
    failure = await barrier_failure(gateway)
    found = [_described(gateway, name, failure) for name in request["transactional_ids"]]
    return {"throttle_time_ms": 0, "transaction_states": found}


def _described(gateway: Gateway, name: str, failure: KafkaError) -> Struct:
    answer: Struct = {
        "error_code": refusal(gateway, name) or failure,
        "transactional_id": name,
        "transaction_state": "",
        "transaction_timeout_ms": 0,
        "transaction_start_time_ms": -1,
        "producer_id": -1,
        "producer_epoch": -1,
        "topics": [],
    }
    if answer["error_code"] is not KafkaError.NONE:
        return answer
    transaction = gateway.state.transactions.get(name)
    if transaction is None:
        return answer | {"error_code": KafkaError.TRANSACTIONAL_ID_NOT_FOUND}
    is_open = transaction.phase is TransactionPhase.ONGOING
    return answer | {
        "transaction_state": state_name(transaction),
        "transaction_timeout_ms": transaction.timeout_ms,
        "transaction_start_time_ms": (transaction.started_ms or gateway.state.expiry_clock_ms) if is_open else -1,
        "producer_id": transaction.producer_id,
        "producer_epoch": transaction.producer_epoch,
        "topics": _topics(gateway.state, transaction.partitions),
    }


def _topics(state: ClusterState, pids: set[PartitionId]) -> list[Struct]:
    topics: dict[str, list[int]] = {}
    for pid in sorted(pids):
        topic_id, index = split_partition_id(pid)
        topics.setdefault(state.topic_names.get(topic_id, ""), []).append(index)
    return [{"topic": name, "partitions": indexes} for name, indexes in topics.items()]


async def list_transactions(gateway: Gateway, _version: int, request: Struct) -> Struct:
    wanted = frozenset(request["state_filters"])
    answer: Struct = {
        "throttle_time_ms": 0,
        "error_code": await barrier_failure(gateway),
        "unknown_state_filters": sorted(wanted - _KNOWN),
        "transaction_states": [],
    }
    try:
        is_asked_for = matcher(request["transactional_id_pattern"] or "(?s).*")
    except InvalidPattern:
        answer["error_code"] = answer["error_code"] or KafkaError.INVALID_REGULAR_EXPRESSION
    if answer["error_code"] is not KafkaError.NONE:
        return answer
    producers, longer_than_ms = frozenset(request["producer_id_filters"]), request["duration_filter"]
    async for name, transaction in Turns().over(sorted(gateway.state.transactions.items())):
        if coordinator_refusal(gateway, name) is not KafkaError.NONE or not is_asked_for(name):
            continue
        shown = state_name(transaction)
        if (wanted and shown not in wanted) or (producers and transaction.producer_id not in producers):
            continue
        open_for_ms = open_ms(gateway.state, transaction)
        if longer_than_ms >= 0 and (open_for_ms is None or open_for_ms <= longer_than_ms):
            continue
        answer["transaction_states"].append(
            {"transactional_id": name, "producer_id": transaction.producer_id, "transaction_state": shown}
        )
    return answer
