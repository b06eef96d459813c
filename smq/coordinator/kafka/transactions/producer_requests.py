"""InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn, EndTxn: producer ids, and the life of a transaction.

Owns the requests' fields and the codes of the answers; `service.transactions` owns the way to commands, and the ids
come from the state machine. Whatever a client cannot know the outcome of is answered as "ask the coordinator again",
because a repetition is safe.
"""

from collections.abc import Awaitable
from typing import Final

from smq.coordinator.kafka.cluster_view import PREFIX, confirmation_failure, coordinator_refusal, is_group
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import INIT_FENCED_VERSION, KafkaError, producer_id_code_of, transaction_code_of
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import GROUP_ANSWER_MS
from smq.coordinator.service.transactions import Producer
from smq.raft_state.commands import AllocateProducerId
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NO_REQUEST, PartitionId, ProducerEpoch, ProducerId
from smq.raft_state.replies import ProducerIdAllocated
from smq.raft_state.state import ClusterState

_BUMPING_VERSION: Final = 5  # from here on the end of a transaction begins the producer's next epoch (KIP-890)
_FENCED_VERSION: Final = 2  # from here on, in all but InitProducerId, PRODUCER_FENCED has a code of its own


def refusal(gateway: Gateway, transactional_id: str) -> KafkaError:
    """NONE if this node coordinates the transactional id. No node has an empty one."""
    return coordinator_refusal(gateway, transactional_id) if transactional_id else KafkaError.INVALID_REQUEST


async def _code_of(change: Awaitable[None], version: int) -> KafkaError:
    try:
        await change
    except SmqError as e:
        return transaction_code_of(e, is_fenced_known=version >= _FENCED_VERSION)
    return KafkaError.NONE


# -------------------------------------------------------------------------------------------- InitProducerId
async def init_producer_id(gateway: Gateway, version: int, request: Struct) -> Struct:
    """Any node answers an idempotent producer; a transactional one asks the coordinator of its id."""
    answer: Struct = {
        "throttle_time_ms": 0,
        "error_code": KafkaError.NONE,
        "producer_id": -1,
        "producer_epoch": -1,
    }
    if request["transactional_id"] is not None:
        return answer | await _init_transactions(gateway, version, request)
    command = AllocateProducerId(
        request_id=NO_REQUEST,
        producer_id=ProducerId(request["producer_id"]),
        producer_epoch=ProducerEpoch(request["producer_epoch"]),
    )
    try:
        reply = await gateway.calls.propose(command, GROUP_ANSWER_MS)
    except SmqError as e:
        return answer | {"error_code": producer_id_code_of(e, version)}
    assert isinstance(reply, ProducerIdAllocated)
    return answer | {"producer_id": reply.producer_id, "producer_epoch": reply.producer_epoch}


async def _init_transactions(gateway: Gateway, version: int, request: Struct) -> Struct:
    """Aborts what the producer before has left open, and fences it. The client asks again until the markers of that
    are written: then it gets its epoch."""
    answer: Struct = {"error_code": refusal(gateway, request["transactional_id"])}
    if answer["error_code"] is not KafkaError.NONE:
        return answer
    timeout_ms = request["transaction_timeout_ms"]
    try:
        reply = await gateway.transactions.start(producer_of(request), timeout_ms, GROUP_ANSWER_MS)
    except SmqError as e:
        return {"error_code": transaction_code_of(e, is_fenced_known=version >= INIT_FENCED_VERSION)}
    return answer | {"producer_id": reply.producer_id, "producer_epoch": reply.producer_epoch}


# ---------------------------------------------------------------------------------------- AddPartitionsToTxn
async def add_partitions_to_txn(gateway: Gateway, version: int, request: Struct) -> Struct:
    """All partitions or none: beside one that is unknown, the others are not attempted."""
    wanted = [(t["name"], index) for t in request["v3_and_below_topics"] for index in t["partitions"]]
    name = request["v3_and_below_transactional_id"]
    code = refusal(gateway, name)
    codes: dict[tuple[str, int], KafkaError] = {}
    if code is KafkaError.NONE:
        pids, codes = await _find(gateway, wanted)
        if any(found is not KafkaError.NONE for found in codes.values()):
            code = KafkaError.OPERATION_NOT_ATTEMPTED
        else:
            producer = Producer(
                transactional_id=name,
                producer_id=ProducerId(request["v3_and_below_producer_id"]),
                producer_epoch=ProducerEpoch(request["v3_and_below_producer_epoch"]),
            )
            added = gateway.transactions.add(producer, GROUP_ANSWER_MS, partitions=tuple(pids))
            code = await _code_of(added, version)
    topics = []
    for topic in request["v3_and_below_topics"]:
        results = []
        for index in topic["partitions"]:
            own = codes.get((topic["name"], index), KafkaError.NONE)
            results.append({"partition_index": index, "partition_error_code": own or code})
        topics.append({"name": topic["name"], "results_by_partition": results})
    return {"throttle_time_ms": 0, "results_by_topic_v3_and_below": topics}


async def _find(
    gateway: Gateway, wanted: list[tuple[str, int]]
) -> tuple[list[PartitionId], dict[tuple[str, int], KafkaError]]:
    """The partitions, and a code for each."""

    def are_known(state: ClusterState) -> bool:
        return all(state.partition_of(*item) is not None for item in wanted)

    failure = await confirmation_failure(gateway, are_known)
    unknown = KafkaError.UNKNOWN_TOPIC_OR_PARTITION if failure is None else KafkaError.COORDINATOR_NOT_AVAILABLE
    pids: list[PartitionId] = []
    codes: dict[tuple[str, int], KafkaError] = {}
    for item in wanted:
        part = gateway.state.partition_of(*item)
        codes[item] = KafkaError.NONE if part is not None else unknown
        if part is not None:
            pids.append(part.pid)
    return pids, codes


# ------------------------------------------------------------------------------------------- AddOffsetsToTxn
async def add_offsets_to_txn(gateway: Gateway, version: int, request: Struct) -> Struct:
    code = refusal(gateway, request["transactional_id"])
    if not is_group(request["group_id"]):
        code = code or KafkaError.INVALID_GROUP_ID
    if code is KafkaError.NONE:
        groups = (PREFIX + request["group_id"],)
        added = gateway.transactions.add(producer_of(request), GROUP_ANSWER_MS, groups=groups)
        code = await _code_of(added, version)
    return {"throttle_time_ms": 0, "error_code": code}


# ---------------------------------------------------------------------------------------------------- EndTxn
async def end_txn(gateway: Gateway, version: int, request: Struct) -> Struct:
    """Answered once the decision is made: every reader sees it, sooner or later, and nothing else. From version 5 on
    with the id and epoch that the producer goes on with, which a repetition gets again."""
    answer: Struct = {
        "throttle_time_ms": 0,
        "error_code": refusal(gateway, request["transactional_id"]),
    }
    if answer["error_code"] is not KafkaError.NONE:
        return answer
    try:
        next_one = await gateway.transactions.end(
            producer_of(request),
            GROUP_ANSWER_MS,
            is_commit=request["committed"],
            is_bumping=version >= _BUMPING_VERSION,
        )
    except SmqError as e:
        return answer | {"error_code": transaction_code_of(e, is_fenced_known=version >= _FENCED_VERSION)}
    if next_one is not None:
        answer |= {"producer_id": next_one.producer_id, "producer_epoch": next_one.producer_epoch}
    return answer


def producer_of(request: Struct) -> Producer:
    """As all requests but AddPartitionsToTxn name it."""
    return Producer(
        transactional_id=request["transactional_id"],
        producer_id=ProducerId(request["producer_id"]),
        producer_epoch=ProducerEpoch(request["producer_epoch"]),
    )
