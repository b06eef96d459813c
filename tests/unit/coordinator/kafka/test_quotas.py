"""A client that has used more than its quota hears how long to wait, and is not read until then (KIP-219, KIP-599)."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError
from smq.raft_state.commands import AlterClusterConfig, AlterQuotas
from smq.raft_state.handlers.quotas import Key
from smq.testing.kafka_client import RawKafka, batch
from tests.unit.coordinator.kafka.test_logins import Port, log_in, with_port
from tests.unit.raft_state.support import quota

RATE = 10_000  # bytes per second: ten seconds of it may be taken immediately
THOUSAND = 1_000


def limited(port: Port, key: Key, value: float, **entity: str) -> None:
    port.change(AlterQuotas(quotas=(quota(key, round(value * THOUSAND), **(entity or {"user": "alice"})),)))


def produced(raw: RawKafka, size: int, acks: int = -1) -> Struct:
    data = [{"name": "t", "partition_data": [{"index": 0, "records": [batch(b"x" * size)]}]}]
    return raw.call(ApiKey.PRODUCE, 9, acks=acks, timeout_ms=10_000, topic_data=data)


def fetched(raw: RawKafka, max_bytes: int = 1 << 20) -> Struct:
    parts = [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20}]
    topics = [{"topic": "t", "partitions": parts}]
    return raw.call(ApiKey.FETCH, 11, replica_id=-1, min_bytes=1, max_bytes=max_bytes, topics=topics)


def timed(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def as_user(port: Port) -> RawKafka:
    raw = port.connect()
    assert log_in(raw) is KafkaError.NONE
    return raw


@pytest.mark.parametrize("key", [Key.PRODUCED, Key.CONSUMED])
def test_a_client_beyond_its_quota_is_told_to_wait_and_not_read_until_then(tmp_path: Path, key: Key) -> None:
    def scenario(port: Port) -> None:
        raw, other = as_user(port), port.connect("")
        send = produced if key is Key.PRODUCED else lambda raw, _size: fetched(raw)
        assert produced(other, 105_000)["throttle_time_ms"] == 0
        limited(port, key, RATE)
        answer = send(raw, 105_000)
        assert 0 < answer["throttle_time_ms"] <= 600
        wait_s = answer["throttle_time_ms"] / 1_000
        shared = as_user(port)  # what a user has used is counted over all its connections
        assert timed(lambda: fetched(other)) < wait_s
        assert timed(lambda: raw.call(ApiKey.API_VERSIONS, 0)) >= wait_s - 0.1  # counted from before the answer
        assert send(shared, 105_000)["throttle_time_ms"] > 5_000
        assert send(other, 105_000)["throttle_time_ms"] == 0

    with_port(tmp_path, scenario)


def test_a_producer_without_acknowledgements_waits_untold(tmp_path: Path) -> None:
    def scenario(port: Port) -> None:
        limited(port, Key.PRODUCED, RATE)
        raw = as_user(port)
        data = [{"name": "t", "partition_data": [{"index": 0, "records": [batch(b"x" * 105_000)]}]}]
        raw.send(ApiKey.PRODUCE, 9, acks=0, timeout_ms=1_000, topic_data=data)
        assert timed(lambda: raw.call(ApiKey.API_VERSIONS, 0)) > 0.3

    with_port(tmp_path, scenario)


def test_a_fetch_is_cut_to_what_the_quota_allows_in_its_window(tmp_path: Path) -> None:
    def scenario(port: Port) -> None:
        raw, other = as_user(port), port.connect("")
        for _ in range(4):
            produced(other, 1_000)
        limited(port, Key.CONSUMED, 220)
        parts = fetched(raw)["responses"][0]["partitions"][0]
        assert 2_000 <= len(parts["records"]) <= 2_200

    with_port(tmp_path, scenario)


def test_request_time_is_that_of_the_loop_and_not_of_waits(tmp_path: Path) -> None:
    def scenario(port: Port) -> None:
        raw = port.connect("")
        limited(port, Key.REQUESTS, 0.5, user="ANONYMOUS")  # 50 ms in ten seconds
        waited = raw.call(ApiKey.FETCH, 11, replica_id=-1, min_bytes=1, max_wait_ms=300, topics=EMPTY)
        assert waited["throttle_time_ms"] == 0
        limited(port, Key.REQUESTS, 0.001, user="ANONYMOUS")
        for answer in (raw.call(ApiKey.METADATA, 12, topics=None), produced(raw, 10)):
            assert answer["throttle_time_ms"] == 1_000  # Kafka's bound
        assert timed(lambda: raw.call(ApiKey.API_VERSIONS, 0)) > 0.5

    with_port(tmp_path, scenario)


EMPTY = [{"topic": "t", "partitions": [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20}]}]


def test_partitions_made_and_deleted_are_refused_to_new_clients_and_slow_down_old_ones(tmp_path: Path) -> None:
    def made(raw: RawKafka, version: int, *names: str, **fields: Any) -> tuple[list[KafkaError], int]:
        topics = [{"name": n, "num_partitions": 15, "replication_factor": 1, "assignments": []} for n in names]
        given = {"timeout_ms": 10_000, "topics": [topic | {"configs": []} for topic in topics], "validate_only": False}
        answer = raw.call(ApiKey.CREATE_TOPICS, version, **(given | fields))
        return [KafkaError(topic["error_code"]) for topic in answer["topics"]], answer["throttle_time_ms"]

    def scenario(port: Port) -> None:
        limited(port, Key.MUTATIONS, 2)  # 22 are there
        raw = as_user(port)
        assert made(raw, 7, "dry", validate_only=True) == ([KafkaError.NONE], 0)
        codes, wait_ms = made(raw, 7, "a", "b", "c")
        assert codes == [KafkaError.NONE, KafkaError.NONE, KafkaError.THROTTLING_QUOTA_EXCEEDED]
        assert 0 < wait_ms <= 4_000
        assert "c" not in port.state.topics
        for key, version, fields, answered in (
            (ApiKey.DELETE_TOPICS, 6, {"topics": [{"name": "a", "topic_id": bytes(16)}]}, "responses"),
            (ApiKey.CREATE_PARTITIONS, 3, {"topics": [{"name": "a", "count": 16, "assignments": None}]}, "results"),
        ):
            answer = as_user(port).call(key, version, timeout_ms=10_000, **fields)
            assert answer[answered][0]["error_code"] == KafkaError.THROTTLING_QUOTA_EXCEEDED
            assert answer["throttle_time_ms"] > 0
        limited(port, Key.MUTATIONS, 1)
        codes, wait_ms = made(as_user(port), 5, "c")
        assert codes == [KafkaError.NONE]
        assert wait_ms > 10_000
        port.change(AlterClusterConfig(set_=(("auto.create.topics.enable", "true"),)))
        used = as_user(port).call(ApiKey.METADATA, 4, topics=[{"name": "used"}], allow_auto_topic_creation=True)
        assert used["throttle_time_ms"] > 10_000
        assert set(port.state.topics) >= {"c", "used"}
        assert made(port.connect(""), 7, "d") == ([KafkaError.NONE], 0)

    with_port(tmp_path, scenario)


def test_an_address_with_too_many_new_connections_is_refused_for_a_while(tmp_path: Path) -> None:
    def scenario(port: Port) -> None:
        limited(port, Key.CONNECTIONS, 1, ip="127.0.0.1")
        made = [port.connect("") for _ in range(11)]
        assert [is_served(raw) for raw in made] == [True] * 10 + [False]
        port.change(AlterQuotas(quotas=(quota(Key.CONNECTIONS, 0, ip="127.0.0.1"),)))
        assert is_served(port.connect(""))

    with_port(tmp_path, scenario)


def is_served(raw: RawKafka) -> bool:
    try:
        return bool(raw.call(ApiKey.API_VERSIONS, 0)["api_keys"])
    except ConnectionError:
        return False
