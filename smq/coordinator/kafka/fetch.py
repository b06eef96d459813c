"""Fetch: the stored bytes of many partitions in one response, now or as soon as there are enough.

Owns the answers to readers. Batches leave as they are in the log, as parts of the response's gather list. It knows
no sessions: `fetch_sessions` completes a request before, and shortens its answer after. Any replica serves, up to the
high water mark that it knows, or to the last stable offset for readers of what is committed. A client that names its
rack is sent to a replica there, and back to the leader if that one lags (KIP-392). A topic that is asked for by id is
read by id: another one may have its name by then.
"""

from collections.abc import Mapping
from typing import Final

from smq.coordinator.kafka.cluster_view import LeaderHints, are_ids_known, check_epoch, topic_names
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError, fetch_code_of
from smq.coordinator.kafka.fetch_sessions import BY_ID_VERSION
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import FETCH_BARRIER_MS, FETCH_WAIT_MS_MAX, KAFKA_CONFIRM_MS
from smq.coordinator.service.audience import told_of
from smq.coordinator.service.fetching import KnownRange, Outcome, PartitionFetch, fetch_many, known_range
from smq.coordinator.service.name_lookup import confirm_unknown
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NodeId, Offset, TopicId
from smq.raft_state.state import ClusterState, PartitionState
from smq.raft_state.topic_config import MAX_MESSAGE_BYTES, config_value
from smq.replication.api import Fetched
from smq.replication.partition.by_name import partition_in

_NO_OFFSET: Final = -1
_READ_COMMITTED: Final = 1


async def fetch(gateway: Gateway, version: int, request: Struct) -> Struct:
    answers: list[Struct] = []
    wanted: list[PartitionFetch] = []
    places: list[Struct] = []  # the answer for each of `wanted`
    names, code_of_unknown = _names_known_here(gateway, version, request), KafkaError.NONE
    if None in names:
        code_of_unknown = await _confirm_unknown(gateway, request)
        names = _names_known_here(gateway, version, request)
    hints = LeaderHints(gateway)
    is_committed = request["isolation_level"] == _READ_COMMITTED
    for topic, name in zip(request["topics"], names, strict=True):
        topic_id = TopicId(topic["topic_id"]) if version >= BY_ID_VERSION else None
        partitions: list[Struct] = []
        answers.append({"topic": topic["topic"], "topic_id": topic["topic_id"], "partitions": partitions})
        for requested in topic["partitions"]:
            answer = _empty(requested["partition"], request["isolation_level"])
            partitions.append(answer)
            if name is None:
                answer["error_code"] = code_of_unknown
                continue
            want = _wanted(name, topic_id, requested, is_committed=is_committed)
            code = _refusal(gateway, want, requested)
            if code is not KafkaError.NONE:
                answer["error_code"] = code
                hints.add(answer, code, want.asked, want.partition)
                continue
            nearer = _nearer(gateway, want, request["rack_id"])
            if nearer is not None:
                answer["preferred_read_replica"] = nearer
                _fill_known_range(gateway, answer, want)
                continue
            wanted.append(want)
            places.append(answer)
    has_answers = len(places) < sum(len(topic["partitions"]) for topic in answers)
    outcomes = await _fetch_all(gateway, request, wanted, is_due=has_answers)
    for want, answer, outcome in zip(wanted, places, outcomes, strict=True):
        _fill(gateway, version, want, answer, outcome, hints)
        if request["rack_id"] and isinstance(outcome, Fetched):
            _send_back(gateway, want, answer, outcome)
    return {
        "throttle_time_ms": 0,
        "error_code": KafkaError.NONE,
        "session_id": 0,
        "responses": answers,
        "node_endpoints": hints.endpoints,
    }


def records_bytes(answer: Struct) -> int:
    parts = (part for topic in answer["responses"] for part in topic["partitions"])
    return sum(len(batch) for part in parts for batch in part["records"] or ())


async def _fetch_all(gateway: Gateway, request: Struct, wanted: list[PartitionFetch], *, is_due: bool) -> list[Outcome]:
    if not wanted:
        return []
    wait_ms = 0 if is_due else min(max(request["max_wait_ms"], 0), FETCH_WAIT_MS_MAX)
    bytes_max = min(max(request["max_bytes"], 1), gateway.response_bytes_max)
    needed = _bytes_needed(gateway, wanted, bytes_max)
    try:
        return await fetch_many(
            gateway.calls,
            wanted,
            max_wait_ms=wait_ms,
            answer_ms=wait_ms + FETCH_BARRIER_MS,
            bytes_max=bytes_max,
            bytes_min=request["min_bytes"],
            reserve=lambda _: gateway.inflight.reserved(needed),
        )
    except SmqError:
        return [None] * len(wanted)  # too many answers are being read, or are not taken by their clients: nothing yet


def _bytes_needed(gateway: Gateway, wanted: list[PartitionFetch], bytes_max: int) -> int:
    """What the answer can hold: of each partition the bytes that the client asks for, or one batch that is larger."""
    needed = 0
    for want in wanted:
        topic = gateway.calls.node.state.topics.get(want.topic)
        batch_max = int(config_value(topic.config, MAX_MESSAGE_BYTES)) if topic is not None else 0
        needed += max(want.max_bytes, batch_max)
        if needed >= bytes_max:
            return bytes_max
    return needed


def _wanted(name: str, topic_id: TopicId | None, requested: Struct, *, is_committed: bool) -> PartitionFetch:
    return PartitionFetch(
        topic=name,
        topic_id=topic_id,
        partition=requested["partition"],
        offset=requested["fetch_offset"],
        max_bytes=max(requested["partition_max_bytes"], 1),
        is_committed=is_committed,
    )


def _names_known_here(gateway: Gateway, version: int, request: Struct) -> list[str | None]:
    return topic_names(gateway.calls.node.state, request["topics"], "topic", by_id=version >= BY_ID_VERSION)


async def _confirm_unknown(gateway: Gateway, request: Struct) -> KafkaError:
    """The code for ids that are unknown afterwards."""
    try:
        await confirm_unknown(gateway.calls, are_ids_known(request["topics"]), KAFKA_CONFIRM_MS)
    except SmqError:
        return KafkaError.NOT_LEADER_OR_FOLLOWER  # consumers retry this one, whatever the reason
    return KafkaError.UNKNOWN_TOPIC_ID


def _known(gateway: Gateway, want: PartitionFetch) -> PartitionState | None:
    return partition_in(gateway.calls.node.state, want.asked, want.partition)


def _refusal(gateway: Gateway, want: PartitionFetch, requested: Struct) -> KafkaError:
    known = _known(gateway, want)
    return check_epoch(known, requested["current_leader_epoch"]) if known is not None else KafkaError.NONE


def _nearer(gateway: Gateway, want: PartitionFetch, rack: str) -> NodeId | None:
    """The replica in the client's rack that the client should ask instead."""
    known = _known(gateway, want) if rack else None
    if known is None or known.leader != gateway.calls.node.node_id:
        return None
    node = gateway.calls.node
    ends, hwm = node.follower_ends(known.pid), node.known_hwm(known)
    offset, listener = want.offset, gateway.listener
    return preferred_replica(node.state, known, ends, hwm=hwm, rack=rack, offset=offset, listener=listener)


def _send_back(gateway: Gateway, want: PartitionFetch, answer: Struct, found: Fetched) -> None:
    """Sends the client back to the leader if this follower cannot serve it. Only clients that name a rack expect
    this."""
    known = _known(gateway, want)
    if known is None or known.leader == gateway.calls.node.node_id:
        return
    if is_behind(found, offset=want.offset, is_ready=gateway.calls.node.is_ready):
        answer["error_code"] = KafkaError.OFFSET_NOT_AVAILABLE


def _empty(index: int, isolation_level: int) -> Struct:
    return {
        "partition_index": index,
        "error_code": KafkaError.NONE,
        "high_watermark": _NO_OFFSET,
        "last_stable_offset": _NO_OFFSET,
        "log_start_offset": _NO_OFFSET,
        "aborted_transactions": [] if isolation_level else None,
        "records": [],
    }


def _fill(
    gateway: Gateway, version: int, want: PartitionFetch, answer: Struct, outcome: Outcome, hints: LeaderHints
) -> None:
    if isinstance(outcome, SmqError):
        code = _code_of(outcome, want, version)
        answer["error_code"] = code
        hints.add(answer, code, want.asked, want.partition)
        if outcome.details.lo is not None and outcome.details.hi is not None:
            # Out of range. Kafka gives no range here, and its readers ask for it.
            answer |= {"log_start_offset": outcome.details.lo, "high_watermark": outcome.details.hi}
        return
    if outcome is None:  # the response was full before this partition's turn
        _fill_known_range(gateway, answer, want)
        return
    _fill_range(answer, outcome)
    answer["records"] = [batch.data for batch in outcome.batches]
    if want.is_committed:
        answer["aborted_transactions"] = [
            {"producer_id": aborted.producer_id, "first_offset": aborted.first} for aborted in outcome.aborted
        ]


def _code_of(error: SmqError, want: PartitionFetch, version: int) -> KafkaError:
    if want.topic_id is not None and error.code is ErrorCode.UNKNOWN_TOPIC:
        return KafkaError.UNKNOWN_TOPIC_ID
    return fetch_code_of(error, version)


def _fill_known_range(gateway: Gateway, answer: Struct, want: PartitionFetch) -> None:
    known = _known(gateway, want)
    if known is not None:
        _fill_range(answer, known_range(gateway.calls.node, known))


def _fill_range(answer: Struct, found: Fetched | KnownRange) -> None:
    answer["high_watermark"] = found.hwm
    answer["last_stable_offset"] = found.lso
    answer["log_start_offset"] = found.log_start


# ---------------------------------------------------------------------------------------------- racks (KIP-392)
def preferred_replica(
    state: ClusterState,
    partition: PartitionState,
    ends: Mapping[NodeId, Offset],
    *,
    hwm: Offset,
    rack: str,
    offset: int,
    listener: str,
) -> NodeId | None:
    """Of the followers in the client's rack that hold `offset`, the one that holds most, as Kafka's
    RackAwareReplicaSelector. None if the leader is as near, or if only the leader can answer (out of range). `ends` are
    the leader's `follower_ends`, and `hwm` is its own. Among equals the first replica wins, so that partitions
    spread."""
    leader = state.nodes.get(partition.leader)
    if not rack or leader is None or leader.rack == rack or not partition.log_start <= offset <= hwm:
        return None
    near = [n for n in partition.replicas if ends.get(n, -1) >= offset and _is_reachable(state, n, rack, listener)]
    return max(near, key=lambda n: ends[n], default=None)


def _is_reachable(state: ClusterState, number: NodeId, rack: str, listener: str) -> bool:
    node = state.nodes.get(number)
    return node is not None and not node.fenced and node.rack == rack and bool(told_of(node, listener).kafka_address)


def is_behind(found: Fetched, *, offset: int, is_ready: bool) -> bool:
    """Whether a follower that found no records cannot know that there are none: it lacks committed records, or it has
    lost the cluster and knows an old high water mark. Its client must not stay with it."""
    return found.readable_end <= offset and (not is_ready or offset < found.hwm)
