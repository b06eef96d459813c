"""Frames and hellos: any bytes, in any pieces, with any damage."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.replication.net.frames import (
    FrameDamaged,
    FrameError,
    FrameKind,
    FrameReader,
    Hello,
    decode_hello,
    encode_hello,
)
from tests.unit.replication.net.test_tcp import DATA, ONE, TWO, frame


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 1000])
def test_frames_are_the_same_however_the_bytes_arrive(step: int) -> None:
    payloads = [b"", b"a", b"bc" * 20, b"", b"d" * 100]
    stream = b"".join(map(frame, payloads))
    reader = FrameReader()
    got = [
        (kind, bytes(payload))
        for at in range(0, len(stream), step)
        for kind, payload in reader.feed(stream[at : at + step])
    ]
    assert got == [(FrameKind.MESSAGE, p) for p in payloads]


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=4), st.data())
def test_a_frame_with_flipped_bits_is_never_taken(payloads: list[bytes], data: st.DataObject) -> None:
    """The frames before it are, nothing after it is, and the reader never waits for more bytes than there are."""
    stream = bytearray(b"".join(map(frame, payloads)))
    flips = data.draw(st.sets(st.integers(0, 8 * len(stream) - 1), min_size=1, max_size=3))
    for bit in flips:
        stream[bit // 8] ^= 1 << bit % 8
    damaged_at, at = 0, 0
    while (at := at + len(frame(payloads[damaged_at]))) <= min(flips) // 8:
        damaged_at += 1
    reader, got = FrameReader(), list[bytes]()
    with pytest.raises(FrameDamaged):
        got.extend(bytes(payload) for _, payload in reader.feed(bytes(stream)))
    assert got == payloads[:damaged_at]


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(0, 64))
def test_for_any_bytes_the_reader_gives_frames_or_a_frame_error(chunks: list[bytes], cap: int) -> None:
    reader = FrameReader()
    reader.payload_bytes_max = cap
    held = 0
    try:
        for chunk in chunks:
            for _, payload in reader.feed(chunk):
                held = max(held, len(payload))
    except FrameError:
        pass
    assert held <= cap


@given(st.binary(max_size=200))
def test_any_hello_decodes_or_is_a_frame_error(payload: bytes) -> None:
    for candidate in (payload, b"SMQP\x00\x01" + payload):
        try:
            decode_hello(memoryview(candidate))
        except FrameError:
            pass


def test_a_hello_round_trips() -> None:
    hello = Hello(
        sender=ONE,
        receiver=TWO,
        channel=DATA,
        process=bytes(range(16)),
        serial=2**64 - 1,
        wall_ms=-1,
        cluster_id="smq-é",
    )
    assert decode_hello(memoryview(encode_hello(hello))) == hello


def test_any_truncated_hello_is_an_error() -> None:
    whole = encode_hello(
        Hello(sender=ONE, receiver=TWO, channel=DATA, process=b"p" * 16, serial=1, wall_ms=7, cluster_id="")
    )
    for end in range(len(whole)):
        with pytest.raises(FrameError):
            decode_hello(memoryview(whole[:end]))
    assert struct.calcsize(">4sHiiB16sQq") == len(whole)
