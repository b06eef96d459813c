"""Raft's messages: what goes in comes out, and nothing else is ever accepted."""

import os
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state.binary import CodecError
from smq.raft_state.ids import DiskId
from smq.replication.raft.messages import (
    ENTRY_BYTES_MAX,
    NO_OP,
    REGULAR,
    SNAPSHOT_BYTES_MAX,
    Append,
    AppendReply,
    Confirm,
    Confirmed,
    Message,
    PreVote,
    PreVoteGranted,
    RequestVote,
    SnapshotChunk,
    TermNotice,
    TimeoutNow,
    Vote,
    decode,
    encode,
)

NUMBERS = st.integers(0, 1 << 62)
COMMANDS = st.binary(max_size=50).map(lambda body: bytes([REGULAR]) + body) | st.just(bytes([NO_OP]))


@st.composite
def messages(draw: st.DrawFn) -> Message:
    term, a, b = draw(NUMBERS), draw(NUMBERS), draw(NUMBERS)
    entries = [(term, command) for command in draw(st.lists(COMMANDS, max_size=4))]
    data = draw(st.binary(max_size=40))
    disk, is_admitted = DiskId(draw(st.binary(min_size=16, max_size=16))), draw(st.booleans())
    choices: list[Message] = [
        RequestVote(term=term, last_index=a, last_term=b, disk=disk, is_admitted=is_admitted),
        PreVote(term=term, last_index=a, last_term=b, disk=disk, is_admitted=is_admitted),
        Vote(term=term, disk=disk),
        PreVoteGranted(term=term, disk=disk),
        TermNotice(term=term),
        TimeoutNow(term=term),
        Append(term=term, number=a, commit=b, prev_index=a, prev_term=term, entries=entries),
        SnapshotChunk(term=term, number=a, index=b, index_term=a, size=100, crc=7, offset=9, data=data),
        AppendReply(term=term, number=a, next_index=b, success=True, reset=False, disk=disk),
        Confirm(term=term, number=a),
        Confirmed(term=term, number=a, disk=disk),
    ]
    return draw(st.sampled_from(choices))


def to_bytes(message: Message) -> bytes:
    return b"".join(encode(message))


@given(messages())
def test_every_message_comes_back_as_it_was(message: Message) -> None:
    assert decode(to_bytes(message)) == message


@given(messages(), st.data())
def test_a_cut_or_lengthened_message_is_refused_or_another_chunk(message: Message, data: st.DataObject) -> None:
    raw = to_bytes(message)
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    for damaged in (cut, raw + b"\0"):
        if isinstance(message, SnapshotChunk) and len(damaged) > 50:
            continue  # a chunk's data has the length it has: the whole snapshot's checksum covers it
        with pytest.raises(CodecError):
            decode(damaged)


@given(st.binary(max_size=200))
def test_noise_is_refused_or_decodes_and_never_raises_another_error(noise: bytes) -> None:
    try:
        decode(noise)
    except CodecError:
        pass


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("/tmp/smq-pickle-was-executed",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_message_is_refused_and_not_executed(protocol: int) -> None:
    for payload in (Bomb(), {"type": "append_entries", "term": 1}):
        with pytest.raises(CodecError):
            decode(pickle.dumps(payload, protocol))
    assert not os.path.exists("/tmp/smq-pickle-was-executed")


@pytest.mark.parametrize("entry", [b"\x02" + pickle.dumps(("add", "host:1")), b"\x03\x80", b""])
def test_entries_of_the_librarys_membership_and_version_types_are_refused(entry: bytes) -> None:
    append = Append(term=3, number=1, commit=0, prev_index=1, prev_term=1, entries=[(3, entry)])
    with pytest.raises(CodecError):
        decode(to_bytes(append))


def test_an_oversized_entry_or_snapshot_is_refused() -> None:
    entry = bytes(ENTRY_BYTES_MAX + 1)
    append = Append(term=3, number=1, commit=0, prev_index=1, prev_term=1, entries=[(3, entry)])
    with pytest.raises(CodecError, match="an entry of"):
        decode(to_bytes(append))
    chunk = SnapshotChunk(
        term=1, number=1, index=1, index_term=1, size=SNAPSHOT_BYTES_MAX + 1, crc=0, offset=0, data=b""
    )
    with pytest.raises(CodecError, match="of a snapshot of"):
        decode(to_bytes(chunk))


def test_an_entry_of_a_term_after_the_messages_is_refused() -> None:
    append = Append(term=3, number=1, commit=0, prev_index=1, prev_term=1, entries=[(4, bytes([REGULAR]))])
    with pytest.raises(CodecError):
        decode(to_bytes(append))
