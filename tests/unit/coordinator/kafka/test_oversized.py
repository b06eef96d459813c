"""Requests that are larger than the node takes: what they name is read, and their records are not kept."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.coordinator.kafka.api_keys import SERVED, ApiKey, is_header_flexible, request_message
from smq.coordinator.kafka.codec import CodecError, compile_encoder
from smq.coordinator.kafka.connection import parse_request
from smq.coordinator.kafka.oversized import KEPT_BYTES_MAX, Oversized

VERSIONS = SERVED[ApiKey.PRODUCE].versions


def produce(version: int, sizes: list[list[int]]) -> bytes:
    """A request with records of these sizes, by topic and partition."""
    topics = [
        {
            "name": f"t{number}",
            "topic_id": bytes([number]) * 16,
            "partition_data": [{"index": at, "records": [bytes(size)]} for at, size in enumerate(parts)],
        }
        for number, parts in enumerate(sizes)
    ]
    body = {"transactional_id": None, "acks": -1, "timeout_ms": 7, "topic_data": topics}
    tags = b"\0" if is_header_flexible(ApiKey.PRODUCE, version) else b""
    encoded = compile_encoder(request_message(ApiKey.PRODUCE), version)(body)
    return struct.pack(">hhih", ApiKey.PRODUCE, version, 9, -1) + tags + b"".join(encoded)


@given(
    version=st.integers(VERSIONS.lo, VERSIONS.hi),
    sizes=st.lists(st.lists(st.integers(0, 300), max_size=3), max_size=3),
    piece=st.integers(1, 200),
)
def test_a_request_without_its_records_is_the_request_with_nulls(
    version: int, sizes: list[list[int]], piece: int
) -> None:
    frame = produce(version, sizes)
    oversized = Oversized(len(frame))
    for at in range(0, len(frame), piece):
        assert oversized.frame is None
        data = memoryview(frame)[at : at + piece]
        assert oversized.feed(data) == len(data)
    assert oversized.frame is not None
    expected, found = parse_request(memoryview(frame)), parse_request(oversized.frame)
    assert expected.body is not None
    for topic in expected.body["topic_data"]:
        for data in topic["partition_data"]:
            data["records"] = None
    assert found == expected


@given(st.binary(max_size=200), st.integers(0, 400))
def test_any_bytes_are_a_request_or_are_refused(data: bytes, size: int) -> None:
    try:
        oversized = Oversized(size)
        oversized.feed(memoryview(struct.pack(">hhi", 0, 9, 1) + data))
    except CodecError:
        return
    assert len(oversized._kept) <= len(data) + 8


def test_a_request_with_a_very_long_text_is_refused() -> None:
    head = struct.pack(">hhih", 0, VERSIONS.hi, 1, -1) + b"\0" + b"\xff\xff\xff\xff\x07"
    with pytest.raises(CodecError, match="garbled"):
        Oversized(4 * KEPT_BYTES_MAX).feed(memoryview(head))
