"""InitProducerId: ids for idempotent producers. Those with a transactional id are in `transactions`.

Owns the answers. The ids themselves come from the state machine.
"""

from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError, producer_id_code_of
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.kafka.transactions.changes import init_transactions
from smq.coordinator.limits import TIMEOUT_MS_DEFAULT
from smq.raft_state.commands import AllocateProducerId
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NO_REQUEST, ProducerEpoch, ProducerId
from smq.raft_state.replies import ProducerIdAllocated


async def init_producer_id(gateway: Gateway, version: int, request: Struct) -> Struct:
    """Any node answers an idempotent producer; a transactional one asks the coordinator of its id."""
    answer: Struct = {
        "throttle_time_ms": 0,
        "error_code": KafkaError.NONE,
        "producer_id": -1,
        "producer_epoch": -1,
    }
    if request["transactional_id"] is not None:
        return answer | await init_transactions(gateway, version, request)
    command = AllocateProducerId(
        request_id=NO_REQUEST,
        producer_id=ProducerId(request["producer_id"]),
        producer_epoch=ProducerEpoch(request["producer_epoch"]),
    )
    try:
        reply = await gateway.calls.propose(command, TIMEOUT_MS_DEFAULT)
    except SmqError as e:
        return answer | {"error_code": producer_id_code_of(e, version)}
    assert isinstance(reply, ProducerIdAllocated)
    return answer | {"producer_id": reply.producer_id, "producer_epoch": reply.producer_epoch}
