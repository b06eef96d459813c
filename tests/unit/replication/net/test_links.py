"""What a turn sends to one peer on one channel leaves in one frame, in order, and never in another session."""

from collections.abc import Callable, Sequence

import pytest

from smq.raft_state.ids import Epoch, NodeId, Offset, PartitionId
from smq.replication.net import links as links_module
from smq.replication.net import wire
from smq.replication.net.links import FRAME_BYTES, Links
from smq.replication.ports import Buffer, Channel, NetworkHandler

A, B = NodeId(2), NodeId(3)
PID = PartitionId(b"p" * 20)


def decoded(message: memoryview) -> wire.Message | bytes:
    """Bytes if it is Raft's, as they were given."""
    return bytes(message[1:]) if message[0] == wire.RAFT else wire.decode(message)


class Frames:
    """A network that keeps each frame as the list of its messages."""

    def __init__(self) -> None:
        self.sent: list[tuple[NodeId, Channel, list[wire.Message | bytes]]] = []
        self.is_up = True

    def start(self, handler: NetworkHandler) -> None: ...

    def send(self, peer: NodeId, channel: Channel, parts: Sequence[Buffer]) -> bool:
        messages = wire.split(memoryview(b"".join(parts)))
        self.sent.append((peer, channel, [decoded(message) for message in messages]))
        return self.is_up

    def is_open(self, peer: NodeId, channel: Channel) -> bool:
        return self.is_up

    def is_at_address(self, peer: NodeId) -> bool:
        return self.is_up

    def backlog_bytes(self, peer: NodeId, channel: Channel) -> int:
        return 1_000

    def close(self) -> None: ...


class Turn:
    def __init__(self) -> None:
        self.network = Frames()
        self.due: list[Callable[[], None]] = []
        self.links = Links(self.network, self.due.append)

    def end(self) -> None:
        due, self.due[:] = list(self.due), []
        for fn in due:
            fn()


def append(*values: bytes) -> wire.Append:
    return wire.Append(PID, Epoch(1), 1, Offset(0), list(values))


def probe(stream: int) -> wire.Probe:
    return wire.Probe(PID, Epoch(1), stream)


@pytest.fixture
def turn() -> Turn:
    return Turn()


def test_the_messages_of_a_turn_share_a_frame_to_each_peer_in_their_order(turn: Turn) -> None:
    for stream in range(3):
        assert turn.links.send(A, Channel.DATA, probe(stream))
    assert turn.links.send(B, Channel.DATA, append(b"x"))
    assert turn.network.sent == []
    turn.end()
    assert turn.network.sent == [
        (A, Channel.DATA, [probe(0), probe(1), probe(2)]),
        (B, Channel.DATA, [append(b"x")]),
    ]
    turn.end()
    assert len(turn.network.sent) == 2
    assert turn.links.send(A, Channel.DATA, probe(3))
    turn.end()
    assert turn.network.sent[2:] == [(A, Channel.DATA, [probe(3)])]


def test_what_raft_says_keeps_its_place_among_the_other_messages_of_its_channel(turn: Turn) -> None:
    turn.links.send_raft(A, [b"an ", b"entry"])
    assert turn.links.send(A, Channel.CONTROL, wire.ReadIndex(7))
    assert turn.links.send(A, Channel.DATA, probe(1))
    turn.links.send_raft(A, [b"a commit index"])
    assert turn.network.sent == []
    turn.end()
    assert turn.network.sent == [
        (A, Channel.CONTROL, [b"an entry", wire.ReadIndex(7), b"a commit index"]),
        (A, Channel.DATA, [probe(1)]),
    ]


def test_what_raft_says_without_a_session_is_not_sent_later(turn: Turn) -> None:
    turn.network.is_up = False
    turn.links.send_raft(A, [b"a vote"])
    turn.network.is_up = True
    turn.links.send_raft(A, [b"another"])
    turn.links.on_session_close(A, Channel.CONTROL)
    turn.end()
    assert turn.network.sent == []


def test_a_long_frame_leaves_within_the_turn_and_what_follows_keeps_its_place(turn: Turn) -> None:
    large = append(b"v" * (FRAME_BYTES // 2))
    for message in (large, large, probe(1)):
        assert turn.links.send(A, Channel.DATA, message)
    assert [len(messages) for _, _, messages in turn.network.sent] == [2]
    turn.end()
    assert [messages for _, _, messages in turn.network.sent] == [[large, large], [probe(1)]]


def test_a_frame_of_many_messages_leaves_within_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "FRAME_PARTS", 4)
    turn = Turn()
    assert turn.links.send(A, Channel.DATA, append(b"a", b"b", b"c"))  # and the part before them
    assert len(turn.network.sent) == 1


def test_what_waits_counts_as_backlog(turn: Turn) -> None:
    assert turn.links.backlog_bytes(A, Channel.DATA) == 1_000
    assert turn.links.send(A, Channel.DATA, append(b"v" * 500))
    waiting = turn.links.backlog_bytes(A, Channel.DATA)
    assert waiting == 1_000 + len(b"".join(wire.encode(append(b"v" * 500))))
    assert turn.links.backlog_bytes(A, Channel.CONTROL) == turn.links.backlog_bytes(B, Channel.DATA) == 1_000
    turn.end()
    assert turn.links.backlog_bytes(A, Channel.DATA) == 1_000


def test_a_message_without_a_session_is_not_sent_later(turn: Turn) -> None:
    turn.network.is_up = False
    assert not turn.links.send(A, Channel.DATA, probe(1))
    turn.network.is_up = True
    turn.end()
    assert turn.network.sent == []


def test_a_message_of_an_ended_session_is_not_sent_in_the_next(turn: Turn) -> None:
    assert turn.links.send(A, Channel.DATA, probe(1))
    turn.links.on_session_close(A, Channel.CONTROL)  # another session
    turn.links.on_session_close(A, Channel.DATA)
    assert turn.links.send(A, Channel.DATA, probe(2))  # the next one has opened
    turn.end()
    assert turn.network.sent == [(A, Channel.DATA, [probe(2)])]


def test_who_flushes_needs_no_callback(turn: Turn) -> None:
    turn.links.collect()
    assert turn.links.send(A, Channel.DATA, probe(1))
    turn.links.flush()
    assert (turn.due, len(turn.network.sent)) == ([], 1)
    assert turn.links.send(A, Channel.DATA, probe(2))
    turn.end()
    assert turn.network.sent[1:] == [(A, Channel.DATA, [probe(2)])]
