"""Produce: from the bytes of a request to the logs of its partitions, per batch and never per record.

Owns the answers to producers. The batches are views of the request's bytes: the node copies each once, into its log.
There is no task and no future: the node's callbacks count down, and the last one answers.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import structlog

from smq.coordinator.kafka.cluster import LeaderHints, are_ids_known, topic_names
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError, code_of
from smq.coordinator.kafka.gateway import Gateway
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import TopicId
from smq.replication.api import Acks, Produced

log = structlog.get_logger(__name__)

BY_ID_VERSION: Final = 13
_ACKS: Final = {-1: Acks.ALL, 0: Acks.NONE, 1: Acks.LEADER}


class ProduceCall:
    """One request under way. It calls `respond` once, with None if acks=0 wants no answer. If a request with acks=0
    fails, it calls `fail` instead: closing the connection is the only way to report that."""

    def __init__(
        self, gateway: Gateway, version: int, respond: Callable[[Struct | None], None], fail: Callable[[], None]
    ) -> None:
        self._gateway = gateway
        self._version = version
        self._respond = respond
        self._fail = fail
        self._hints = LeaderHints(gateway.state, gateway.calls.node.node_id)
        self._answers: list[Struct] = []
        self._left = 1  # for this call itself, until the node has all partitions
        self._acks: Acks | None = None
        self._has_failed = False

    def start(self, request: Struct) -> None:
        self._acks = _ACKS.get(request["acks"])
        names = self._names_known_here(request)
        if None not in names:
            self._start_topics(request, names, KafkaError.NONE)
            return
        if self._acks is not None and self._acks is not Acks.NONE:
            self._expect_all(request)
        are_known = are_ids_known(request["topic_data"])
        done = partial(self._on_confirmed, request)
        self._gateway.calls.node.find(lambda state: are_known(state) or None, request["timeout_ms"], done)

    def _expect_all(self, request: Struct) -> None:
        """While the names are looked up, requests that come later find them known: they must not overtake this one."""
        for topic in request["topic_data"]:
            for data in topic["partition_data"]:
                if data["records"]:
                    self._gateway.calls.node.expect(TopicId(topic["topic_id"]), data["index"], data["records"])

    def _names_known_here(self, request: Struct) -> list[str | None]:
        by_id = self._version >= BY_ID_VERSION
        return topic_names(self._gateway.state, request["topic_data"], "name", by_id=by_id)

    def _on_confirmed(self, request: Struct, result: bool | SmqError | None) -> None:
        """Called by the node, which an exception in here would end."""
        try:
            code = code_of(result) if isinstance(result, SmqError) else KafkaError.UNKNOWN_TOPIC_ID
            self._start_topics(request, self._names_known_here(request), code)
        except Exception as e:
            log.error("kafka_produce_failed", exc_info=e)
            self._fail()

    def _start_topics(self, request: Struct, names: list[str | None], code_of_unknown: KafkaError) -> None:
        for topic, name in zip(request["topic_data"], names, strict=True):
            answers: list[Struct] = []
            self._answers.append({"name": topic["name"], "topic_id": topic["topic_id"], "partition_responses": answers})
            for data in topic["partition_data"]:
                answer: Struct = {"index": data["index"], "error_code": KafkaError.NONE, "base_offset": -1}
                answers.append(answer)
                self._left += 1
                if name is None:
                    code = code_of_unknown if self._acks is not None else KafkaError.INVALID_REQUIRED_ACKS
                    self._refuse(answer, code, None)
                else:
                    self._start_partition(request, name, data, answer)
        self._count_down()

    def _start_partition(self, request: Struct, name: str, data: Struct, answer: Struct) -> None:
        records = data["records"]
        code = self._refusal(request, records)
        if code is not KafkaError.NONE or self._acks is None:
            self._refuse(answer, code, None)
            return
        done = partial(self._on_done, name, answer)
        try:
            self._gateway.calls.node.produce(name, data["index"], records, self._acks, request["timeout_ms"], done)
        except SmqError as e:  # the node raises what it finds immediately
            done(e)

    def _refusal(self, request: Struct, records: memoryview | None) -> KafkaError:
        """What can be refused without the node."""
        if self._acks is None:
            return KafkaError.INVALID_REQUIRED_ACKS
        if not records:
            return KafkaError.INVALID_RECORD
        if request["transactional_id"] is not None:
            return KafkaError.INVALID_TXN_STATE
        return KafkaError.NONE

    def _on_done(self, name: str, answer: Struct, result: Produced | SmqError) -> None:
        """Called by the node, which an exception in here would end."""
        try:
            self._answer(name, answer, result)
        except Exception as e:
            log.error("kafka_produce_failed", topic=name, exc_info=e)
            self._fail()

    def _answer(self, name: str, answer: Struct, result: Produced | SmqError) -> None:
        if isinstance(result, SmqError):
            self._refuse(answer, code_of(result), str(result), name)
            return
        answer["base_offset"] = result.base_offset
        part = self._gateway.state.partition_of(name, answer["index"])
        answer["log_start_offset"] = part.log_start if part is not None else -1
        self._count_down()

    def _refuse(self, answer: Struct, code: KafkaError, message: str | None, name: str = "") -> None:
        self._has_failed = True
        answer["error_code"] = code
        answer["error_message"] = message
        self._hints.add(answer, code, name, answer["index"])
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
        self._respond({"responses": self._answers, "throttle_time_ms": 0, "node_endpoints": self._hints.endpoints})
