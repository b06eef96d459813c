"""Subscriptions and assignments as bytes: other clients read ours, we read theirs, and garbage is no crash."""

import io
import struct
from contextlib import suppress

import pytest
from aiokafka.coordinator.protocol import ConsumerProtocol
from hypothesis import given
from hypothesis import strategies as st

from smq.clients.groups.protocol import (
    Subscription,
    Unreadable,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from smq.coordinator.groups.protocols import subscribed_topics

names = st.text(min_size=1, max_size=9)
places = st.frozensets(st.tuples(names, st.integers(0, 2**31 - 1)), max_size=9)


@given(st.frozensets(names, max_size=5), places, st.integers(-1, 2**31 - 1))
def test_what_is_written_is_read(topics: frozenset[str], owned: frozenset[tuple[str, int]], generation: int) -> None:
    whole = Subscription(topics=tuple(sorted(topics)), owned=owned, generation=generation)
    assert decode_subscription(encode_subscription(whole, is_cooperative=True)) == whole
    assert decode_subscription(encode_subscription(whole, is_cooperative=False)) == Subscription(topics=whole.topics)
    assert decode_assignment(encode_assignment(owned)) == owned
    for is_cooperative in (True, False):  # the coordinator reads the topics, too
        assert subscribed_topics(encode_subscription(whole, is_cooperative=is_cooperative)) == topics


@given(st.frozensets(names, max_size=5), places)
def test_another_client_reads_and_writes_the_same(topics: frozenset[str], owned: frozenset[tuple[str, int]]) -> None:
    for is_cooperative in (True, False):
        data = encode_subscription(Subscription(topics=tuple(topics), owned=owned), is_cooperative=is_cooperative)
        read = ConsumerProtocol.METADATA.decode(io.BytesIO(data))
        assert set(read.subscription) == topics
    theirs = ConsumerProtocol.METADATA(0, sorted(topics), b"user data").encode()
    assert decode_subscription(theirs) == Subscription(topics=tuple(sorted(topics)))
    assigned = ConsumerProtocol.ASSIGNMENT.decode(io.BytesIO(encode_assignment(owned)))
    assert {(tp.topic, tp.partition) for tp in assigned.partitions()} == owned
    assert decode_assignment(assigned.encode()) == owned


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for decode in (decode_subscription, decode_assignment):
        with suppress(Unreadable):
            decode(data)


def test_no_bytes_are_an_empty_assignment_and_no_subscription() -> None:
    assert decode_assignment(b"") == frozenset()
    with pytest.raises(Unreadable):
        decode_subscription(b"")


def test_count_without_elements_is_refused_at_once() -> None:
    with pytest.raises(Unreadable):
        decode_assignment(struct.pack(">hi", 0, 2**31 - 1))
