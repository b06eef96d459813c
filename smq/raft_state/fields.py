"""The kinds of field that commands, replies and snapshots share, beyond the plain ones of `binary`.

Owns the bytes of what is inside a command: partition ids, commits, members, high water marks, results. It must never
change a layout that a released version wrote. `registry` and `snapshot` import it.
"""

import struct
from dataclasses import dataclass
from typing import Any, Final

from smq.raft_state.binary import (
    INT32,
    INT64,
    TEXT,
    U8,
    U16,
    U32,
    Blob,
    CodecError,
    Fixed,
    Group,
    Many,
    Reader,
    Record,
    read_count,
    write_count,
)
from smq.raft_state.commands import GroupMember, HwmAdvance, OffsetCommit
from smq.raft_state.errors import ErrorCode
from smq.raft_state.limits import COMMAND_BYTES_MAX, PARTITION_ID_BYTES

# Request, topic and disk ids carry a length. So the machine refuses one of a wrong length with a typed rejection;
# otherwise the proposer would meet an exception.
ANY_ID: Final = Blob(U8, 255)
PARTITION: Final = Fixed(PARTITION_ID_BYTES)
ASSIGNMENTS: Final = Many(Many(INT32))
CONFIG: Final = Many(Group((TEXT, TEXT)))
NAMED_BLOBS: Final = Many(Group((TEXT, Blob(U32, COMMAND_BYTES_MAX))))
OFFSET_COMMITS: Final = Many(
    Record(OffsetCommit, (("partition", PARTITION), ("offset", INT64), ("metadata", TEXT), ("leader_epoch", INT32)))
)
GROUP_MEMBER: Final = Record(
    GroupMember,
    (
        ("member_id", TEXT),
        ("instance_id", TEXT),
        ("client_id", TEXT),
        ("client_host", TEXT),
        ("session_timeout_ms", INT32),
        ("rebalance_timeout_ms", INT32),
        ("protocols", NAMED_BLOBS),
    ),
)
# partition, epoch, hwm, next_offset, ts_ns
_HWM_ITEM: Final = struct.Struct(f">{PARTITION_ID_BYTES}siqqq")


@dataclass(frozen=True, slots=True)
class HwmAdvances:
    """The hot one: one struct per item."""

    def write(self, out: bytearray, value: tuple[HwmAdvance, ...]) -> None:
        write_count(out, len(value))
        pack = _HWM_ITEM.pack
        for item in value:
            if len(item.partition) != PARTITION_ID_BYTES:
                raise CodecError(f"a partition id has {PARTITION_ID_BYTES} bytes, not {len(item.partition)}")
            out += pack(item.partition, item.epoch, item.hwm, item.next_offset, item.ts_ns)

    def read(self, reader: Reader) -> tuple[HwmAdvance, ...]:
        body = reader.take(read_count(reader) * _HWM_ITEM.size)
        return tuple(
            HwmAdvance(partition=pid, epoch=epoch, hwm=hwm, next_offset=next_offset, ts_ns=ts_ns)
            for pid, epoch, hwm, next_offset, ts_ns in _HWM_ITEM.iter_unpack(body)
        )


@dataclass(frozen=True, slots=True)
class Code:
    """An ErrorCode by its wire number. A number that this version does not know reads as INTERNAL."""

    def write(self, out: bytearray, value: ErrorCode) -> None:
        out += U16.pack(value.number)

    def read(self, reader: Reader) -> ErrorCode:
        return ErrorCode.from_number(reader.unpack(U16)[0])


@dataclass(frozen=True, slots=True)
class OneOf:
    """A record of one of several classes, after its tag."""

    records: dict[int, Record]

    def write(self, out: bytearray, value: Any) -> None:
        for tag, record in self.records.items():
            if record.cls is type(value):
                out.append(tag)
                record.write(out, value)
                return
        raise CodecError(f"{type(value).__name__} is not the result of an item")

    def read(self, reader: Reader) -> Any:
        tag = reader.unpack(U8)[0]
        if tag not in self.records:
            raise CodecError(f"a reply with the tag {tag} as the result of an item")
        return self.records[tag].read(reader)
