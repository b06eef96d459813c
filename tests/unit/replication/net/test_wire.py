"""Messages between nodes survive the wire, and malformed ones do nothing but raise CodecError."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state.binary import CodecError
from smq.raft_state.ids import DiskId, Epoch, Incarnation, LogIndex, NodeId, Offset, PartitionId, Term
from smq.raft_state.limits import DISK_ID_BYTES
from smq.replication.net import wire
from smq.replication.net.disk_marks import START_BYTES, Mark
from smq.replication.ports import Quorum, QuorumReplica

PIDS = st.binary(min_size=20, max_size=20).map(PartitionId)
INT64 = st.integers(-(2**63), 2**63 - 1)
EPOCHS = st.integers(-(2**31), 2**31 - 1).map(Epoch)
UINT64 = st.integers(0, 2**64 - 1)
UINT32 = st.integers(0, 2**32 - 1)
OFFSETS = INT64.map(Offset)
DISKS = st.sampled_from(wire.DiskCondition)
MARKS = st.builds(
    Mark,
    st.integers(0, 2**31 - 1).map(NodeId),
    st.binary(min_size=DISK_ID_BYTES, max_size=DISK_ID_BYTES).map(DiskId),
    st.binary(min_size=START_BYTES, max_size=START_BYTES),
    UINT64,
    UINT64,
)

QUORUM_REPLICAS = st.builds(
    QuorumReplica,
    node=st.integers(0, 2**31 - 1).map(NodeId),
    disk=st.one_of(st.just(b""), st.binary(min_size=DISK_ID_BYTES, max_size=DISK_ID_BYTES)).map(DiskId),
    end=INT64,
    heard_ms=INT64,
    caught_up_ms=INT64,
)
QUORUMS = st.builds(
    Quorum,
    leader=st.integers(0, 2**31 - 1).map(NodeId),
    term=INT64.map(Term),
    committed_end=INT64,
    voters=st.lists(QUORUM_REPLICAS).map(tuple),
    observers=st.lists(QUORUM_REPLICAS).map(tuple),
)

ENDS = st.builds(
    lambda pid, outcome, epoch, offsets: wire.End(pid, outcome, epoch, *sorted(offsets)),
    PIDS,
    st.sampled_from(wire.EndOutcome),
    EPOCHS,
    st.lists(st.integers(0, 2**63 - 1).map(Offset), min_size=4, max_size=4),
)

MESSAGES = st.one_of(
    st.builds(wire.Heartbeat, INT64.map(Incarnation), st.lists(MARKS, min_size=1).map(tuple), st.booleans(), DISKS),
    st.builds(wire.Propose, UINT64, st.binary()),
    st.builds(wire.ReadIndex, UINT64),
    st.builds(wire.Proposed, UINT64, st.integers(0, 255), INT64.map(LogIndex), st.binary()),
    st.builds(wire.ElectionQuery, UINT64, INT64.map(Term), st.lists(st.tuples(PIDS, EPOCHS)).map(tuple)),
    st.builds(
        wire.ElectionReport,
        UINT64,
        INT64.map(Incarnation),
        st.lists(st.builds(wire.SealedLog, PIDS, OFFSETS, OFFSETS)).map(tuple),
    ),
    st.builds(wire.Sealed, PIDS, EPOCHS),
    st.builds(wire.Commits, st.lists(st.tuples(PIDS, EPOCHS, OFFSETS)).map(tuple)),
    st.builds(wire.Resign, st.lists(st.tuples(PIDS, EPOCHS)).map(tuple)),
    st.builds(wire.Transfer, PIDS, EPOCHS, st.integers(0, 2**31 - 1).map(NodeId)),
    st.builds(wire.DescribeQuorum, UINT64),
    st.builds(wire.QuorumDescribed, UINT64, QUORUMS),
    st.builds(wire.EndsQuery, UINT64, INT64.map(Incarnation), UINT32, st.lists(PIDS).map(tuple)),
    st.builds(wire.EndsReport, UINT64, INT64.map(Incarnation), st.lists(ENDS).map(tuple)),
    st.builds(wire.Ping, UINT64, st.booleans()),
    st.builds(wire.Probe, PIDS, EPOCHS, UINT32),
    st.builds(wire.Ack, PIDS, EPOCHS, INT64.map(Incarnation), OFFSETS, OFFSETS, UINT32, *[st.booleans()] * 4),
    st.builds(wire.Append, PIDS, EPOCHS, UINT32, OFFSETS, st.lists(st.binary())),
)


def encoded(message: wire.Message) -> bytes:
    return b"".join(wire.encode(message))


@given(MESSAGES)
def test_every_message_round_trips(message: wire.Message) -> None:
    assert wire.decode(memoryview(encoded(message))) == message


@given(MESSAGES, st.data())
def test_a_truncated_or_extended_message_is_refused_or_another_message(
    message: wire.Message, data: st.DataObject
) -> None:
    payload = encoded(message)
    cut = payload[: data.draw(st.integers(1, len(payload)))] + data.draw(st.binary(max_size=3))
    try:
        wire.decode(memoryview(cut))
    except CodecError:
        return


@given(st.binary(min_size=1))
def test_garbage_raises_wire_error_or_is_a_message(payload: bytes) -> None:
    try:
        wire.decode(memoryview(payload))
    except CodecError:
        return


def test_a_question_about_too_many_partitions_is_refused() -> None:
    pids = (PartitionId(b"p" * 20),) * (wire.ENDS_MAX + 1)
    for message in (
        wire.EndsQuery(1, Incarnation(2), 3, pids),
        wire.EndsReport(1, Incarnation(2), tuple(wire.End(pid, wire.EndOutcome.KNOWN) for pid in pids)),
    ):
        with pytest.raises(CodecError, match=f"at most {wire.ENDS_MAX}"):
            wire.decode(memoryview(encoded(message)))


@pytest.mark.parametrize(
    ("outcome", "offsets"),
    [(9, (0, 0, 0, 0)), (0, (-1, 0, 0, 0)), (0, (0, 2, 1, 3)), (0, (3, 2, 4, 4)), (0, (0, 1, 3, 2))],
)
def test_an_end_that_cannot_be_is_refused(outcome: int, offsets: tuple[int, ...]) -> None:
    end = wire.End(PartitionId(b"p" * 20), outcome, Epoch(1), *map(Offset, offsets))  # type: ignore[arg-type]  # as a broken node would send it
    with pytest.raises(CodecError):
        wire.decode(memoryview(encoded(wire.EndsReport(1, Incarnation(2), (end,)))))


def test_a_count_beyond_the_payload_is_refused() -> None:
    payload = bytearray(encoded(wire.Append(PartitionId(b"p" * 20), Epoch(1), 1, Offset(0), [b"x"])))
    payload[37:41] = b"\xff\xff\xff\xff"
    with pytest.raises(CodecError):
        wire.decode(memoryview(bytes(payload)))


def test_a_pickle_is_refused() -> None:
    with pytest.raises(CodecError):
        wire.decode(memoryview(pickle.dumps({"type": "append_entries"})))


@given(st.lists(MESSAGES, min_size=1))
def test_messages_that_share_a_frame_come_out_as_they_went_in(messages: list[wire.Message]) -> None:
    payload = b"".join(wire.joined([wire.encode(message) for message in messages]))
    assert [wire.decode(part) for part in wire.split(memoryview(payload))] == messages


@given(st.lists(MESSAGES, min_size=2), st.data())
def test_a_truncated_or_extended_frame_of_several_messages_is_refused(
    messages: list[wire.Message], data: st.DataObject
) -> None:
    payload = b"".join(wire.joined([wire.encode(message) for message in messages]))
    with pytest.raises(CodecError):
        wire.split(memoryview(payload[: data.draw(st.integers(0, len(payload) - 1))]))
    with pytest.raises(CodecError):
        wire.split(memoryview(payload + data.draw(st.binary(min_size=1, max_size=3))))


def test_a_frame_of_several_messages_holds_no_other_frame_and_no_empty_message() -> None:
    ping = wire.encode(wire.Ping(1, False))
    inner = wire.joined([ping, ping])
    parts = wire.split(memoryview(b"".join(wire.joined([inner, ping]))))
    with pytest.raises(CodecError):
        wire.decode(parts[0])
    with pytest.raises(CodecError):
        wire.split(memoryview(b"".join(wire.joined([ping, [b""]]))))


@given(st.binary())
def test_garbage_after_the_kind_of_several_messages_is_refused_or_cut_into_messages(garbage: bytes) -> None:
    payload = bytes(wire.joined([[b"x"], [b"y"]])[0][:1]) + garbage
    try:
        parts = wire.split(memoryview(payload))
    except CodecError:
        return
    assert all(parts)
    assert sum(map(len, parts)) < len(payload)
