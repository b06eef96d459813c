"""InitProducerId with a transactional id, AddPartitionsToTxn, AddOffsetsToTxn, EndTxn: the life of a transaction.

Owns the way from these requests to commands, at the id's coordinator. The state machine decides; a repetition is safe,
so whatever a client cannot know the outcome of is answered as "ask the coordinator again".
"""

from typing import Final

from smq.coordinator.kafka.cluster import confirmation_failure, coordinator_refusal
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError, transaction_code_of
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.kafka.group_names import PREFIX, is_group
from smq.coordinator.limits import TIMEOUT_MS_DEFAULT
from smq.raft_state.commands import AddToTransaction, EndTransaction, InitTransactions, TransactionChange
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NO_PRODUCER, PartitionId, ProducerEpoch, ProducerId
from smq.raft_state.replies import ProducerIdAllocated, Reply
from smq.raft_state.state import ClusterState, TransactionPhase

_BUMPING_VERSION: Final = 5  # from here on the end of a transaction begins the producer's next epoch (KIP-890)
_FENCED_VERSION: Final = 2  # from here on, in all but InitProducerId, PRODUCER_FENCED has a code of its own
_INIT_FENCED_VERSION: Final = 4
# The transaction that was to be aborted has ended by itself meanwhile, perhaps under a new epoch or id of its producer.
_ENDED: Final = (ErrorCode.INVALID_TRANSACTION_STATE,)
_OVERTAKEN: Final = (*_ENDED, ErrorCode.PRODUCER_FENCED, ErrorCode.UNKNOWN_TRANSACTIONAL_ID)


async def change(gateway: Gateway, command: TransactionChange) -> Reply:
    """Runs a change at the id's coordinator, which must be this node. Raises SmqError."""
    return await gateway.calls.change(
        lambda done: gateway.groups.change(command, TIMEOUT_MS_DEFAULT, done), TIMEOUT_MS_DEFAULT
    )


async def _code_of_change(gateway: Gateway, command: TransactionChange, version: int) -> KafkaError:
    try:
        await change(gateway, command)
    except SmqError as e:
        return transaction_code_of(e, is_fenced_known=version >= _FENCED_VERSION)
    return KafkaError.NONE


# -------------------------------------------------------------------------------------------- InitProducerId
async def init_transactions(gateway: Gateway, version: int, request: Struct) -> Struct:
    """Aborts what the producer before has left open, and fences it. The client asks again until the markers of that
    are written: then it gets its epoch."""
    name = request["transactional_id"]
    answer: Struct = {"error_code": coordinator_refusal(gateway, name)}
    if answer["error_code"] is not KafkaError.NONE:
        return answer
    producer_id, epoch = ProducerId(request["producer_id"]), ProducerEpoch(request["producer_epoch"])
    coordinator_epoch = gateway.groups.epoch_of(name)
    open_one = gateway.state.transactions.get(name)
    try:
        if open_one is not None and open_one.phase is TransactionPhase.ONGOING:
            is_named = producer_id != NO_PRODUCER
            await change(
                gateway,
                EndTransaction(
                    transactional_id=name,
                    coordinator_epoch=coordinator_epoch,
                    producer_id=producer_id if is_named else open_one.producer_id,
                    producer_epoch=epoch if is_named else open_one.producer_epoch,
                    is_commit=False,
                    is_fencing=True,
                    is_replacing=not is_named,
                ),
            )
            return {"error_code": KafkaError.CONCURRENT_TRANSACTIONS}
        reply = await change(
            gateway,
            InitTransactions(
                transactional_id=name,
                coordinator_epoch=coordinator_epoch,
                timeout_ms=request["transaction_timeout_ms"],
                producer_id=producer_id,
                producer_epoch=epoch,
            ),
        )
    except SmqError as e:
        if open_one is not None and e.code in (_OVERTAKEN if producer_id == NO_PRODUCER else _ENDED):
            return {"error_code": KafkaError.CONCURRENT_TRANSACTIONS}
        return {"error_code": transaction_code_of(e, is_fenced_known=version >= _INIT_FENCED_VERSION)}
    assert isinstance(reply, ProducerIdAllocated)
    return answer | {"producer_id": reply.producer_id, "producer_epoch": reply.producer_epoch}


# ---------------------------------------------------------------------------------------- AddPartitionsToTxn
async def add_partitions_to_txn(gateway: Gateway, version: int, request: Struct) -> Struct:
    """All partitions or none: beside one that is unknown, the others are not attempted."""
    wanted = [(t["name"], index) for t in request["v3_and_below_topics"] for index in t["partitions"]]
    name = request["v3_and_below_transactional_id"]
    code = coordinator_refusal(gateway, name)
    codes: dict[tuple[str, int], KafkaError] = {}
    if code is KafkaError.NONE:
        pids, codes = await _find(gateway, wanted)
        if any(found is not KafkaError.NONE for found in codes.values()):
            code = KafkaError.OPERATION_NOT_ATTEMPTED
        else:
            command = AddToTransaction(
                transactional_id=name,
                coordinator_epoch=gateway.groups.epoch_of(name),
                producer_id=ProducerId(request["v3_and_below_producer_id"]),
                producer_epoch=ProducerEpoch(request["v3_and_below_producer_epoch"]),
                partitions=tuple(pids),
            )
            code = await _code_of_change(gateway, command, version)
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
    name = request["transactional_id"]
    code = coordinator_refusal(gateway, name)
    if not is_group(request["group_id"]):
        code = code or KafkaError.INVALID_GROUP_ID
    if code is KafkaError.NONE:
        command = AddToTransaction(
            transactional_id=name,
            coordinator_epoch=gateway.groups.epoch_of(name),
            producer_id=ProducerId(request["producer_id"]),
            producer_epoch=ProducerEpoch(request["producer_epoch"]),
            groups=(PREFIX + request["group_id"],),
        )
        code = await _code_of_change(gateway, command, version)
    return {"throttle_time_ms": 0, "error_code": code}


# ---------------------------------------------------------------------------------------------------- EndTxn
async def end_txn(gateway: Gateway, version: int, request: Struct) -> Struct:
    """Answered once the decision is made: every reader sees it, sooner or later, and nothing else. From version 5 on
    with the id and epoch that the producer goes on with, which a repetition gets again."""
    name = request["transactional_id"]
    answer: Struct = {"throttle_time_ms": 0, "error_code": coordinator_refusal(gateway, name)}
    if answer["error_code"] is not KafkaError.NONE:
        return answer
    command = EndTransaction(
        transactional_id=name,
        coordinator_epoch=gateway.groups.epoch_of(name),
        producer_id=ProducerId(request["producer_id"]),
        producer_epoch=ProducerEpoch(request["producer_epoch"]),
        is_commit=request["committed"],
        is_bumping=version >= _BUMPING_VERSION,
    )
    try:
        reply = await change(gateway, command)
    except SmqError as e:
        return answer | {"error_code": transaction_code_of(e, is_fenced_known=version >= _FENCED_VERSION)}
    if isinstance(reply, ProducerIdAllocated):
        answer |= {"producer_id": reply.producer_id, "producer_epoch": reply.producer_epoch}
    return answer
