"""FindCoordinator: the node that coordinates a group or a transactional id.

Owns the answer, which comes from the replicated state alone: any node gives it.
"""

from typing import Final

from smq.coordinator.kafka.cluster import endpoint
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.kafka.group_names import PREFIX, is_group
from smq.raft_state.coordinators import coordinator_of

_MANY_KEYS_VERSION: Final = 4  # for several groups
_KEY_OF_GROUP: Final = 0
_KEY_OF_TRANSACTION: Final = 1


async def find_coordinator(gateway: Gateway, version: int, request: Struct) -> Struct:
    if version >= _MANY_KEYS_VERSION:
        found = [_coordinator(gateway, key, request["key_type"]) for key in request["coordinator_keys"]]
        return {"throttle_time_ms": 0, "coordinators": found}
    return {"throttle_time_ms": 0} | _coordinator(gateway, request["key"], request["key_type"])


def _coordinator(gateway: Gateway, key: str, key_type: int) -> Struct:
    answer: Struct = {"key": key, "error_code": KafkaError.NONE, "error_message": None}
    no_node = {"node_id": -1, "host": "", "port": -1}
    if key_type not in (_KEY_OF_GROUP, _KEY_OF_TRANSACTION):
        message = "only groups and transactional ids have coordinators: key types 0 and 1"
        return answer | no_node | {"error_code": KafkaError.INVALID_REQUEST, "error_message": message}
    if key_type == _KEY_OF_GROUP and not is_group(key):
        return answer | no_node | {"error_code": KafkaError.INVALID_GROUP_ID}
    slot = coordinator_of(gateway.state, PREFIX + key if key_type == _KEY_OF_GROUP else key)
    node = gateway.state.nodes.get(slot.node)
    address = endpoint(node, gateway.listener) if node is not None and not node.fenced else None
    if address is None:
        return answer | no_node | {"error_code": KafkaError.COORDINATOR_NOT_AVAILABLE}
    return answer | {"node_id": slot.node, "host": address[0], "port": address[1]}
