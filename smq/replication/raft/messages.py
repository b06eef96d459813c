"""Raft's messages between two nodes, and their bytes.

Owns the wire form of Raft's own CONTROL messages, as a table; Append, which carries the entries of every proposal, is
written by hand, for speed. There is no pickle, and nothing in a message is ever executed. A message that does not
decode to the last byte is refused with CodecError, and none of it is used. It must never do I/O or hold state.
Everything in this package may import it.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from smq.raft_state.binary import FLAG, UINT32, UINT64, Bounded, CodecError, Fixed, TaggedLayout, View
from smq.raft_state.ids import DiskId
from smq.raft_state.limits import DISK_ID_BYTES
from smq.replication.ports import Buffer

NUMBER_MAX: Final = 1 << 62  # terms and indexes beyond it are noise: at a million a second it takes 146,000 years
COMMAND_BYTES_MAX: Final = 1 << 20  # one entry fits one message whole, so there is no path that cuts entries up
ENTRY_BYTES_MAX: Final = COMMAND_BYTES_MAX + 1  # the type byte
SNAPSHOT_BYTES_MAX: Final = 1 << 30  # a receiver assembles it in memory; 10,000 partitions take about 2 MiB

REGULAR: Final = 0  # an entry's first byte: a command of the state machine follows
NO_ANSWER: Final = 0  # number of an Append that needs no answer: it only reports a moved commit index
NO_OP: Final = 1  # an entry's only byte: a new leader's first entry
ENTRY_TYPES: Final = (REGULAR, NO_OP)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestVote:
    """`is_admitted`: the sender has applied the registration of this disk (see raft/voters.py)."""

    term: int
    last_index: int
    last_term: int
    disk: DiskId
    is_admitted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """Granted. A refusal is silence, or a TermNotice."""

    term: int
    disk: DiskId


@dataclass(frozen=True, slots=True, kw_only=True)
class PreVote:
    """Would you vote for me in `term`? Changes nothing on either side."""

    term: int
    last_index: int
    last_term: int
    disk: DiskId
    is_admitted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PreVoteGranted:
    term: int
    disk: DiskId


@dataclass(frozen=True, slots=True, kw_only=True)
class TermNotice:
    """Your message was of an older term; this is mine."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutNow:
    """Stand for election immediately: your leader hands over."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Entries from prev_index + 1 on. `number` grows by one with each message of a leadership that needs an answer."""

    term: int
    number: int
    commit: int
    prev_index: int
    prev_term: int
    entries: Sequence[tuple[int, bytes]]  # (term, type byte and command)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotChunk:
    """`size` and `crc` are those of the whole snapshot (see journal.Snapshot.crc)."""

    term: int
    number: int
    index: int
    index_term: int
    size: int
    crc: int
    offset: int
    data: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendReply:
    """Answers the Append or SnapshotChunk with this number.

    success: everything below next_index matches the leader's log and is durable here. reset: it did not fit,
    send from next_index. Neither: received, continue (a chunk); with number 0: alive, and nothing else.
    """

    term: int
    number: int
    next_index: int
    success: bool
    reset: bool
    disk: DiskId


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm:
    """Do you still follow me in `term`? A leader asks for reads (see raft/leader.py)."""

    term: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """Yes, I did when the question with this number came."""

    term: int
    number: int
    disk: DiskId


Message: TypeAlias = (
    RequestVote
    | Vote
    | PreVote
    | PreVoteGranted
    | TermNotice
    | TimeoutNow
    | Append
    | SnapshotChunk
    | AppendReply
    | Confirm
    | Confirmed
)

_APPEND_TAG: Final = 7
_APPEND = struct.Struct(">BQQQQQI")  # tag, term, number, commit, prev index, prev term, count of entries
_ENTRY = struct.Struct(">QI")  # term, length

_NUMBER: Final = Bounded(NUMBER_MAX)
_TERM: Final = ("term", _NUMBER)
_NUMBERED: Final = ("number", _NUMBER)
_DISK: Final = ("disk", Fixed(DISK_ID_BYTES))
_CANDIDATE: Final = (_TERM, ("last_index", _NUMBER), ("last_term", _NUMBER), _DISK, ("is_admitted", FLAG))


def _check_chunk(m: SnapshotChunk) -> None:
    if m.size > SNAPSHOT_BYTES_MAX or m.offset + len(m.data) > m.size:
        raise CodecError(f"{len(m.data)} bytes at {m.offset} of a snapshot of {m.size}")


_TABLE: Final = (
    TaggedLayout(1, RequestVote, *_CANDIDATE),
    TaggedLayout(2, PreVote, *_CANDIDATE),
    TaggedLayout(3, Vote, _TERM, _DISK),
    TaggedLayout(4, PreVoteGranted, _TERM, _DISK),
    TaggedLayout(5, TermNotice, _TERM),
    TaggedLayout(6, TimeoutNow, _TERM),
    TaggedLayout(
        8,
        SnapshotChunk,
        _TERM,
        _NUMBERED,
        ("index", _NUMBER),
        ("index_term", _NUMBER),
        ("size", UINT64),
        ("crc", UINT32),
        ("offset", UINT64),
        rest=[("data", View())],
        check=_check_chunk,
    ),
    TaggedLayout(9, AppendReply, _TERM, _NUMBERED, ("next_index", _NUMBER), ("success", FLAG), ("reset", FLAG), _DISK),
    TaggedLayout(10, Confirm, _TERM, _NUMBERED),
    TaggedLayout(11, Confirmed, _TERM, _NUMBERED, _DISK),
)
_OF_CLASS: Final = {layout.cls: layout for layout in _TABLE}


def encode(message: Message) -> list[Buffer]:
    """The parts of one message, to be sent one after another."""
    if isinstance(message, Append):
        return [_encode_append(message)]
    return _OF_CLASS[type(message)].encode(message)


def _encode_append(m: Append) -> bytes:
    parts = [_APPEND.pack(_APPEND_TAG, m.term, m.number, m.commit, m.prev_index, m.prev_term, len(m.entries))]
    for term, entry in m.entries:
        parts.append(_ENTRY.pack(term, len(entry)))
        parts.append(entry)
    return b"".join(parts)


def decode(payload: Buffer) -> Message:
    """Inverse of `encode`, for one complete message. CodecError for anything else."""
    view = memoryview(payload)
    decoder = _DECODERS.get(view[0]) if view else None
    if decoder is None:
        raise CodecError(f"message of unknown kind {view[0]}" if view else "an empty message")
    try:
        return decoder(view)
    except struct.error as e:
        raise CodecError(f"message of kind {view[0]} with {len(view)} bytes: {e}") from e


def _decode_append(view: memoryview) -> Append:
    _, term, number, commit, prev_index, prev_term, count = _APPEND.unpack_from(view)
    if (highest := max(term, number, commit, prev_index, prev_term)) > NUMBER_MAX:
        raise CodecError(f"{highest} is no term or index")
    if count * (_ENTRY.size + 1) > len(view) - _APPEND.size:
        raise CodecError(f"{count} entries do not fit {len(view)} bytes")
    entries = []
    at = _APPEND.size
    for _ in range(count):
        entry_term, length = _ENTRY.unpack_from(view, at)
        at += _ENTRY.size
        if not 1 <= length <= ENTRY_BYTES_MAX or at + length > len(view):
            raise CodecError(f"an entry of {length} bytes")
        # A copy, because the journal keeps it and must not pin the whole message.
        entry = bytes(view[at : at + length])
        at += length
        if entry[0] not in ENTRY_TYPES or not prev_term <= entry_term <= term:
            raise CodecError(f"an entry of type {entry[0]} and term {entry_term}")
        entries.append((entry_term, entry))
    if at != len(view):
        raise CodecError(f"{len(view) - at} bytes after the last entry")
    return Append(term=term, number=number, commit=commit, prev_index=prev_index, prev_term=prev_term, entries=entries)


_DECODERS: Final[dict[int, Callable[[memoryview], Message]]] = {
    **{layout.tag: layout.decode for layout in _TABLE},
    _APPEND_TAG: _decode_append,
}
