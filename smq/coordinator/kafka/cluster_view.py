"""The cluster as Kafka clients see it: brokers, leaders, epochs, names of topics and groups.

Owns how all handlers read the replicated state, the creation of topics on first use, and the prefix of groups:
group g of Kafka is group kafka-cg-g of the cluster, with one set of offsets for both. It must never say "unknown" by
itself: `service.name_lookup` asks the node, which first waits for a barrier.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Final

from smq.coordinator.config.addresses import parse_address
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import OUTCOME_CODES, KafkaError, group_code_of
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import KAFKA_CONFIRM_MS
from smq.coordinator.service.audience import told_of
from smq.coordinator.service.name_lookup import confirm_unknown
from smq.raft_state.command_codec import FeatureNotEnabled, check_keys
from smq.raft_state.commands import CreateTopic
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NO_REQUEST, NodeId, Offset, TopicId
from smq.raft_state.limits import GROUP_NAME_BYTES_MAX, TOPIC_NAME_CHARS_MAX
from smq.raft_state.refusal import Refused
from smq.raft_state.replies import TopicCreated
from smq.raft_state.state import ClusterState, NodeState, PartitionState
from smq.raft_state.topic_config import TOPIC_CONFIG, check_value
from smq.raft_state.topic_rules import is_topic_name
from smq.replication.commands.proposer import rejection
from smq.replication.partition.by_name import partition_in

NO_TOPIC_ID: Final = bytes(16)
# Kafka's own topics, which clients take for internal ones. smq has neither: it keeps offsets in the replicated state.
INTERNAL_TOPICS: Final = ("__consumer_offsets", "__transaction_state")


def new_topic(
    gateway: Gateway,
    name: str,
    *,
    partitions: int = -1,
    replicas: int = -1,
    config: tuple[tuple[str, str], ...] = (),
    assignments: tuple[tuple[NodeId, ...], ...] = (),
) -> CreateTopic:
    """-1 leaves a number to the cluster. SmqError for a name or a configuration that can be refused without Raft: a
    request may hold megabytes of either."""
    if len(name) > TOPIC_NAME_CHARS_MAX:
        raise SmqError(ErrorCode.INVALID_TOPIC_NAME, f"the name has {len(name)} characters")
    if assignments:
        partitions, replicas = len(assignments), len(assignments[0])
    with refusals_as_errors():
        check_keys(TOPIC_CONFIG, dict(config), gateway.state.feature_level)
        for key, value in config:
            check_value(key, value, gateway.state.feature_level)
    gateway.settings.check_topic(dict(config))
    return CreateTopic(
        request_id=NO_REQUEST,
        name=name,
        topic_id=TopicId(secrets.token_bytes(16)),
        partition_count=gateway.settings.num_partitions(gateway.state) if partitions == -1 else partitions,
        replication_factor=gateway.settings.replication_factor(gateway.state) if replicas == -1 else replicas,
        config=config,
        assignments=assignments,
        start_offset=Offset(0),
        created_ms=time.time_ns() // 1_000_000,
    )


@contextlib.contextmanager
def refusals_as_errors() -> Iterator[None]:
    """The state machine's own checks, made before a command or instead of one, fail as the command would."""
    try:
        yield
    except Refused as e:
        raise rejection(e.rejected) from None
    except FeatureNotEnabled as e:
        raise SmqError(ErrorCode.FEATURE_NOT_ENABLED, str(e)) from None


async def create_on_use(gateway: Gateway, name: str, timeout_ms: int) -> None:
    """Creates the topic, unless another client was faster. SmqError if it cannot be created."""
    try:
        command = new_topic(gateway, name)
        gateway.mutate(command.partition_count)
        reply = await gateway.calls.propose(command, timeout_ms)
        assert isinstance(reply, TopicCreated)
    except SmqError as e:
        if e.code is not ErrorCode.TOPIC_EXISTS:
            raise


def endpoint(node: NodeState, listener: str) -> tuple[str, int] | None:
    """For clients of that listener; None if the node does not have it for Kafka."""
    address = told_of(node, listener).kafka_address
    return parse_address("kafka_address", address) if address else None


def brokers(gateway: Gateway, *, with_fenced: bool = False) -> list[Struct]:
    """The nodes that a client may connect to, as `{node_id, host, port, rack}`."""
    out: list[Struct] = []
    for number, node in sorted(gateway.state.nodes.items()):
        address = endpoint(node, gateway.listener)
        if address is not None and (with_fenced or not node.fenced):
            out.append({"node_id": number, "host": address[0], "port": address[1], "rack": node.rack or None})
    return out


def controller(gateway: Gateway) -> int:
    """Any node serves the requests of Kafka's controller. Clients get Raft's leader, which need not forward them."""
    leader = gateway.calls.node.status().raft_leader
    node = gateway.state.nodes.get(leader) if leader is not None else None
    if node is not None and not node.fenced and endpoint(node, gateway.listener) is not None:
        return node.node
    found = brokers(gateway)
    return int(found[0]["node_id"]) if found else -1


def live_leader(state: ClusterState, partition: PartitionState) -> NodeState | None:
    node = state.nodes.get(partition.leader)
    if node is None or node.fenced or node.incarnation != partition.leader_incarnation:
        return None
    return node


def describe_partition(gateway: Gateway, partition: PartitionState) -> Struct:
    """What Metadata and DescribeTopicPartitions say of it. A leader that the client cannot reach is none."""
    state = gateway.state
    leader = live_leader(state, partition)
    if leader is not None and endpoint(leader, gateway.listener) is None:
        leader = None
    live = [n for n in partition.replicas if n in state.nodes and not state.nodes[n].fenced]
    return {
        "error_code": KafkaError.NONE if leader is not None else KafkaError.LEADER_NOT_AVAILABLE,
        "partition_index": partition.index,
        "leader_id": leader.node if leader is not None else -1,
        "leader_epoch": partition.epoch,
        "replica_nodes": partition.replicas,
        "isr_nodes": live,
        "offline_replicas": [n for n in partition.replicas if n not in live],
    }


def code_of_unknown_topic(name: str) -> KafkaError:
    return KafkaError.UNKNOWN_TOPIC_OR_PARTITION if is_topic_name(name) else KafkaError.INVALID_TOPIC_EXCEPTION


def topic_names(state: ClusterState, topics: list[Struct], name_key: str, *, by_id: bool) -> list[str | None]:
    """The names of the topics of a request. None for an id that this node has not applied, which proves nothing."""
    if by_id:
        return [state.topic_names.get(TopicId(topic["topic_id"])) for topic in topics]
    return [topic[name_key] for topic in topics]


def are_ids_known(topics: list[Struct]) -> Callable[[ClusterState], bool]:
    """For `confirm_unknown`, of a request that names topics by id."""
    return lambda state: all(topic["topic_id"] in state.topic_names for topic in topics)


async def confirmation_failure(gateway: Gateway, are_known: Callable[[ClusterState], bool]) -> SmqError | None:
    """None once `confirm_unknown` has returned. Otherwise why it has not: what the state does not know may exist."""
    try:
        await confirm_unknown(gateway.calls, are_known, KAFKA_CONFIRM_MS)
    except SmqError as e:
        return e
    return None


def coordinator_refusal(gateway: Gateway, group: str) -> KafkaError:
    """NONE if this node coordinates the group, whose name is that of the cluster."""
    return OUTCOME_CODES[gateway.groups.refusal(group)]


async def barrier_failure(gateway: Gateway) -> KafkaError:
    """NONE once this node has applied all that was committed before this call."""
    try:
        await gateway.calls.barrier(KAFKA_CONFIRM_MS)
    except SmqError as e:
        return group_code_of(e)
    return KafkaError.NONE


def epoch_at(partition: PartitionState, offset: int) -> int:
    """The epoch of the record at an offset; the current one at and beyond the end."""
    for entry in reversed(partition.history):
        if entry.start <= offset:
            return entry.epoch
    return partition.history[0].epoch


def check_epoch(partition: PartitionState, epoch: int) -> KafkaError:
    """The KIP-320 check of the epoch that the client knows; -1 is none."""
    if epoch < 0 or epoch == partition.epoch:
        return KafkaError.NONE
    return KafkaError.FENCED_LEADER_EPOCH if epoch < partition.epoch else KafkaError.UNKNOWN_LEADER_EPOCH


class LeaderHints:
    """KIP-951: an error names the present leader, so that the client need not ask for metadata first."""

    _CODES: Final = (KafkaError.NOT_LEADER_OR_FOLLOWER, KafkaError.FENCED_LEADER_EPOCH)

    def __init__(self, gateway: Gateway) -> None:
        self._state = gateway.calls.node.state
        self._me = gateway.calls.node.node_id
        self._listener = gateway.listener
        self._named: dict[int, Struct] = {}

    def add(self, answer: Struct, code: KafkaError, topic: str | TopicId, index: int) -> None:
        """Adds `current_leader` to the answer for a partition of the topic with this name or id."""
        if code not in self._CODES:
            return
        partition = partition_in(self._state, topic, index)
        leader = live_leader(self._state, partition) if partition is not None else None
        address = endpoint(leader, self._listener) if leader is not None else None
        if partition is None or leader is None or address is None or leader.node == self._me:
            return
        answer["current_leader"] = {"leader_id": leader.node, "leader_epoch": partition.epoch}
        host, port = address
        self._named[leader.node] = {"node_id": leader.node, "host": host, "port": port, "rack": leader.rack or None}

    @property
    def endpoints(self) -> list[Struct]:
        return list(self._named.values())


PREFIX: Final = "kafka-cg-"


def is_group(name: str) -> bool:
    """Whether a group can have this name. A longer one need not travel through Raft to be refused."""
    return bool(name) and len((PREFIX + name).encode()) <= GROUP_NAME_BYTES_MAX
