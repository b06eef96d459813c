"""Produce: from the bytes of a request to the logs of its partitions, per batch and never per record.

Owns the answers to producers. The batches are views of the request's bytes: the node copies each once, into its log.
There is no task and no future: the node's callbacks count down, and the last one answers.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import structlog

from smq.coordinator.kafka.cluster_view import LeaderHints
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError, code_of, produce_code_of
from smq.coordinator.kafka.gateway import Gateway
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import TopicId
from smq.records import is_transactional
from smq.replication.api import Acks, Produced, ProduceRequest
from smq.replication.partition.by_name import partition_in

log = structlog.get_logger(__name__)

BY_ID_VERSION: Final = 13
_JOINING_VERSION: Final = 12  # from here on a batch adds its partition to its transaction (KIP-890)
_RECORD_ERRORS_VERSION: Final = 8  # from here on an answer says which records are bad (KIP-467)
_ACKS: Final = {-1: Acks.ALL, 0: Acks.NONE, 1: Acks.LEADER}


class ProduceCall:
    """One request under way. It calls `respond` once, with None if acks=0 wants no answer. If a request with acks=0
    fails, it calls `fail` instead: closing the connection is the only way to report that."""

    def __init__(
        self,
        gateway: Gateway,
        version: int,
        respond: Callable[[Struct | None], None],
        fail: Callable[[], None],
        oversize: int = 0,
    ) -> None:
        """`oversize`: what the request had, if that is more than the node takes; its records have been dropped."""
        self._gateway = gateway
        self._oversize = oversize
        self._node = gateway.calls.node
        self._version = version
        self._by_id = version >= BY_ID_VERSION
        self._is_transactional = False
        self._respond = respond
        self._fail = fail
        self._hints: LeaderHints | None = None  # once a batch is refused
        self._answers: list[Struct] = []
        self._left = 1  # for this call itself, until the node has all partitions
        self._acks: Acks | None = None
        self._has_failed = False

    def start(self, request: Struct) -> None:
        """Every batch goes to the node within this call, which keeps their order."""
        self._acks = _ACKS.get(request["acks"])
        self._is_transactional = request["transactional_id"] is not None
        for topic in request["topic_data"]:
            answers: list[Struct] = []
            self._answers.append({"name": topic["name"], "topic_id": topic["topic_id"], "partition_responses": answers})
            for data in topic["partition_data"]:
                answer: Struct = {"index": data["index"], "error_code": KafkaError.NONE, "base_offset": -1}
                answers.append(answer)
                self._left += 1
                self._start_partition(
                    request, TopicId(topic["topic_id"]) if self._by_id else topic["name"], data, answer
                )
        self._count_down()

    def _start_partition(self, request: Struct, topic: str | TopicId, data: Struct, answer: Struct) -> None:
        records = data["records"]
        code = self._refusal(request, records)
        if code is not KafkaError.NONE or self._acks is None:
            limit = self._gateway.request_bytes_max
            reason = f"the request has {self._oversize} bytes, and the node takes {limit} (request_bytes_max)"
            self._refuse(answer, code, reason if code is KafkaError.MESSAGE_TOO_LARGE else None, topic)
            return
        done = partial(self._on_done, topic, answer)
        try:
            self._node.produce(
                ProduceRequest(
                    topic,
                    data["index"],
                    records,
                    self._acks,
                    request["timeout_ms"],
                    done,
                    request["transactional_id"],
                    is_joining=self._is_transactional and self._version >= _JOINING_VERSION,
                    names_bad_records=self._version >= _RECORD_ERRORS_VERSION and self._acks is not Acks.NONE,
                )
            )
        except SmqError as e:  # the node raises what it finds immediately
            done(e)

    def _refusal(self, request: Struct, records: memoryview | None) -> KafkaError:
        """What can be refused without the node."""
        if self._acks is None:
            return KafkaError.INVALID_REQUIRED_ACKS
        if self._oversize:
            return KafkaError.MESSAGE_TOO_LARGE
        if not records:
            return KafkaError.INVALID_RECORD
        if self._is_transactional:  # a transaction's records must not be lost with their leader
            return KafkaError.NONE if self._acks is Acks.ALL else KafkaError.INVALID_REQUIRED_ACKS
        # As in Kafka: a request that names no transactional id has no right to any.
        return KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED if is_transactional(records) else KafkaError.NONE

    def _on_done(self, topic: str | TopicId, answer: Struct, result: Produced | SmqError) -> None:
        """Called by the node, which an exception in here would end."""
        try:
            self._answer(topic, answer, result)
        except Exception as e:
            log.error("kafka_produce_failed", topic=topic, exc_info=e)
            self._fail()

    def _answer(self, topic: str | TopicId, answer: Struct, result: Produced | SmqError) -> None:
        if isinstance(result, SmqError):
            answer["record_errors"] = [
                {"batch_index": bad.place, "batch_index_error_message": bad.message} for bad in result.details.records
            ]
            self._refuse(answer, self._code_of(result), str(result), topic)
            return
        answer["base_offset"] = result.base_offset
        if result.is_append_time:
            answer["log_append_time_ms"] = result.ts_ns // 1_000_000
        part = partition_in(self._node.state, topic, answer["index"])
        answer["log_start_offset"] = part.log_start if part is not None else -1
        self._count_down()

    def _code_of(self, error: SmqError) -> KafkaError:
        if self._by_id and error.code is ErrorCode.UNKNOWN_TOPIC:
            return KafkaError.UNKNOWN_TOPIC_ID
        return produce_code_of(error, self._version) if self._is_transactional else code_of(error)

    def _refuse(self, answer: Struct, code: KafkaError, message: str | None, topic: str | TopicId) -> None:
        self._has_failed = True
        answer["error_code"] = code
        answer["error_message"] = message
        if self._hints is None:
            self._hints = LeaderHints(self._gateway)
        self._hints.add(answer, code, topic, answer["index"])
        self._count_down()

    def _count_down(self) -> None:
        self._left -= 1
        if self._left:
            return
        if self._acks is Acks.NONE:
            if self._has_failed:
                self._fail()
            else:
                self._respond(None)
            return
        endpoints = self._hints.endpoints if self._hints is not None else []
        self._respond({"responses": self._answers, "throttle_time_ms": 0, "node_endpoints": endpoints})
