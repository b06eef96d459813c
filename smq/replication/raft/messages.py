"""Raft's messages between two nodes, and their bytes.

Owns the wire form of Raft's own CONTROL messages: one kind byte, a fixed header, then raw bytes. There is no
pickle, and nothing in a message is ever executed. A message that does not decode to the last byte is refused with
MalformedMessage. It must never do I/O or hold state. Everything in this package may import it.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

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


class MalformedMessage(Exception):
    """The bytes are not a message. None of them was used."""


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

_KIND_REQUEST_VOTE: Final = 1
_KIND_PRE_VOTE: Final = 2
_KIND_VOTE: Final = 3
_KIND_PRE_VOTE_GRANTED: Final = 4
_KIND_TERM_NOTICE: Final = 5
_KIND_TIMEOUT_NOW: Final = 6
_KIND_APPEND: Final = 7
_KIND_CHUNK: Final = 8
_KIND_REPLY: Final = 9
_KIND_CONFIRM: Final = 10
_KIND_CONFIRMED: Final = 11

_ELECTION = struct.Struct(f">BQQQ{DISK_ID_BYTES}sB")  # kind, term, last index, last term, disk, is admitted
_GRANT = struct.Struct(f">BQ{DISK_ID_BYTES}s")  # kind, term, disk
_TERM = struct.Struct(">BQ")  # kind, term
_APPEND = struct.Struct(">BQQQQQI")  # kind, term, number, commit, prev index, prev term, count of entries
_ENTRY = struct.Struct(">QI")  # term, length
_CHUNK = struct.Struct(">BQQQQQIQ")  # kind, term, number, index, its term, size, crc, offset
_REPLY = struct.Struct(f">BQQQBB{DISK_ID_BYTES}s")  # kind, term, number, next index, success, reset, disk
_CONFIRM = struct.Struct(">BQQ")  # kind, term, number
_CONFIRMED = struct.Struct(f">BQQ{DISK_ID_BYTES}s")  # kind, term, number, disk

_ELECTION_KINDS: Final[dict[int, type[RequestVote] | type[PreVote]]] = {
    _KIND_REQUEST_VOTE: RequestVote,
    _KIND_PRE_VOTE: PreVote,
}
_GRANT_KINDS: Final[dict[int, type[Vote] | type[PreVoteGranted]]] = {
    _KIND_VOTE: Vote,
    _KIND_PRE_VOTE_GRANTED: PreVoteGranted,
}
_TERM_KINDS: Final[dict[int, type[TermNotice] | type[TimeoutNow]]] = {
    _KIND_TERM_NOTICE: TermNotice,
    _KIND_TIMEOUT_NOW: TimeoutNow,
}
_KIND_OF: Final[dict[type, int]] = {
    kind: number for number, kind in (_ELECTION_KINDS | _GRANT_KINDS | _TERM_KINDS).items()
}


def encode(message: Message) -> list[Buffer]:
    """The parts of one message, to be sent one after another."""
    match message:
        case Append():
            return [_encode_append(message)]
        case AppendReply() as r:
            return [_REPLY.pack(_KIND_REPLY, r.term, r.number, r.next_index, r.success, r.reset, r.disk)]
        case SnapshotChunk() as c:
            head = _CHUNK.pack(_KIND_CHUNK, c.term, c.number, c.index, c.index_term, c.size, c.crc, c.offset)
            return [head, c.data]
        case RequestVote() | PreVote() as v:
            return [_ELECTION.pack(_KIND_OF[type(v)], v.term, v.last_index, v.last_term, v.disk, v.is_admitted)]
        case Confirm() as c:
            return [_CONFIRM.pack(_KIND_CONFIRM, c.term, c.number)]
        case Confirmed() as c:
            return [_CONFIRMED.pack(_KIND_CONFIRMED, c.term, c.number, c.disk)]
        case Vote() | PreVoteGranted() as g:
            return [_GRANT.pack(_KIND_OF[type(g)], g.term, g.disk)]
        case _:
            return [_TERM.pack(_KIND_OF[type(message)], message.term)]


def _encode_append(m: Append) -> bytes:
    parts = [_APPEND.pack(_KIND_APPEND, m.term, m.number, m.commit, m.prev_index, m.prev_term, len(m.entries))]
    for term, entry in m.entries:
        parts.append(_ENTRY.pack(term, len(entry)))
        parts.append(entry)
    return b"".join(parts)


def decode(payload: Buffer) -> Message:
    """Inverse of `encode`, for one complete message. MalformedMessage for anything else."""
    view = memoryview(payload)
    if not view:
        raise MalformedMessage("an empty message")
    kind = view[0]
    try:
        if kind == _KIND_APPEND:
            return _decode_append(view)
        if kind == _KIND_REPLY:
            return _decode_reply(view)
        if kind == _KIND_CHUNK:
            return _decode_chunk(view)
        if kind == _KIND_CONFIRM:
            _, term, number = _CONFIRM.unpack(view)
            _check_numbers(term, number)
            return Confirm(term=term, number=number)
        if kind == _KIND_CONFIRMED:
            _, term, number, disk = _CONFIRMED.unpack(view)
            _check_numbers(term, number)
            return Confirmed(term=term, number=number, disk=DiskId(disk))
        if kind in _ELECTION_KINDS:
            return _decode_election(view)
        if kind in _GRANT_KINDS:
            _, term, disk = _GRANT.unpack(view)
            _check_numbers(term)
            return _GRANT_KINDS[kind](term=term, disk=DiskId(disk))
        if kind in _TERM_KINDS:
            _, term = _TERM.unpack(view)
            _check_numbers(term)
            return _TERM_KINDS[kind](term=term)
    except struct.error as e:
        raise MalformedMessage(f"message of kind {kind} with {len(view)} bytes: {e}") from e
    raise MalformedMessage(f"message of unknown kind {kind}")


def _decode_election(view: memoryview) -> RequestVote | PreVote:
    kind, term, last_index, last_term, disk, is_admitted = _ELECTION.unpack(view)
    _check_numbers(term, last_index, last_term)
    if is_admitted > 1:
        raise MalformedMessage("a flag is 0 or 1")
    return _ELECTION_KINDS[kind](
        term=term, last_index=last_index, last_term=last_term, disk=DiskId(disk), is_admitted=bool(is_admitted)
    )


def _decode_append(view: memoryview) -> Append:
    _, term, number, commit, prev_index, prev_term, count = _APPEND.unpack_from(view)
    _check_numbers(term, number, commit, prev_index, prev_term)
    if count * (_ENTRY.size + 1) > len(view) - _APPEND.size:
        raise MalformedMessage(f"{count} entries do not fit {len(view)} bytes")
    entries = []
    at = _APPEND.size
    for _ in range(count):
        entry_term, length = _ENTRY.unpack_from(view, at)
        at += _ENTRY.size
        if not 1 <= length <= ENTRY_BYTES_MAX or at + length > len(view):
            raise MalformedMessage(f"an entry of {length} bytes")
        # A copy, because the journal keeps it and must not pin the whole message.
        entry = bytes(view[at : at + length])
        at += length
        if entry[0] not in ENTRY_TYPES or not prev_term <= entry_term <= term:
            raise MalformedMessage(f"an entry of type {entry[0]} and term {entry_term}")
        entries.append((entry_term, entry))
    if at != len(view):
        raise MalformedMessage(f"{len(view) - at} bytes after the last entry")
    return Append(term=term, number=number, commit=commit, prev_index=prev_index, prev_term=prev_term, entries=entries)


def _decode_chunk(view: memoryview) -> SnapshotChunk:
    _, term, number, index, index_term, size, crc, offset = _CHUNK.unpack_from(view)
    _check_numbers(term, number, index, index_term)
    data = view[_CHUNK.size :]
    if size > SNAPSHOT_BYTES_MAX or offset + len(data) > size:
        raise MalformedMessage(f"{len(data)} bytes at {offset} of a snapshot of {size}")
    return SnapshotChunk(
        term=term, number=number, index=index, index_term=index_term, size=size, crc=crc, offset=offset, data=data
    )


def _decode_reply(view: memoryview) -> AppendReply:
    _, term, number, next_index, success, reset, disk = _REPLY.unpack(view)
    _check_numbers(term, number, next_index)
    if success > 1 or reset > 1:
        raise MalformedMessage("a flag is 0 or 1")
    return AppendReply(
        term=term, number=number, next_index=next_index, success=bool(success), reset=bool(reset), disk=DiskId(disk)
    )


def _check_numbers(*numbers: int) -> None:
    if max(numbers) > NUMBER_MAX:
        raise MalformedMessage(f"{max(numbers)} is no term or index")
