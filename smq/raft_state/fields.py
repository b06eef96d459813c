"""The kinds of field that commands, replies and snapshots share, beyond the plain ones of `binary`.

Owns the bytes of what is inside a command: partition ids, commits, members, high water marks, results. It must never
change a layout that a released version wrote. `command_table`, `state` and `snapshot_parts` import it, and replication.
"""

import struct
from dataclasses import dataclass
from typing import Any, Final

from smq.raft_state.binary import (
    FLAG,
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
from smq.raft_state.commands import (
    Acknowledgement,
    Acl,
    Assignment,
    ConsumerUpdate,
    Fingerprint,
    GroupMember,
    HwmAdvance,
    Listener,
    OffsetCommit,
    Partitions,
    Quota,
    ScramCredential,
    Subscription,
)
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import TOPIC_ID_BYTES, TopicId
from smq.raft_state.limits import COMMAND_BYTES_MAX, DIGEST_BYTES_MAX, PARTITION_ID_BYTES, REQUEST_ID_BYTES
from smq.raft_state.replies import OffsetsAssigned

# Request, topic and disk ids, salts and keys carry a length (not the ids of `OffsetRequests`). So the machine refuses
# one of a wrong length with a typed rejection; otherwise the proposer would meet an exception.
ANY_ID: Final = Blob(U8, 255)
PARTITION: Final = Fixed(PARTITION_ID_BYTES)
EPOCH: Final = INT32
OFFSET: Final = INT64
ASSIGNMENTS: Final = Many(Many(INT32))
CONFIG: Final = Many(Group((TEXT, TEXT)))
NAMED_BLOBS: Final = Many(Group((TEXT, Blob(U32, COMMAND_BYTES_MAX))))
OFFSET_COMMITS: Final = Many(
    Record(OffsetCommit, (("partition", PARTITION), ("offset", INT64), ("metadata", TEXT), ("leader_epoch", INT32)))
)
FINGERPRINT: Final = Record(Fingerprint, (("rows", INT64), ("digest", Blob(U8, DIGEST_BYTES_MAX))))
LISTENERS: Final = Many(Record(Listener, (("name", TEXT), ("grpc_address", TEXT), ("kafka_address", TEXT))))
ACLS: Final = Many(
    Record(
        Acl,
        (
            ("resource", INT32),
            ("pattern", INT32),
            ("name", TEXT),
            ("principal", TEXT),
            ("host", TEXT),
            ("operation", INT32),
            ("permission", INT32),
        ),
    )
)
QUOTAS: Final = Many(Record(Quota, (("entity", CONFIG), ("key", TEXT), ("thousandths", INT64))))
CREDENTIALS: Final = Many(
    Record(
        ScramCredential,
        (
            ("mechanism", INT32),
            ("iterations", INT32),
            ("salt", ANY_ID),
            ("stored_key", ANY_ID),
            ("server_key", ANY_ID),
        ),
    )
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
_TOPIC_HEAD: Final = struct.Struct(f">{TOPIC_ID_BYTES}sI")  # its id, how many of its partitions


@dataclass(frozen=True, slots=True)
class PartitionLists:
    """Partitions of several topics: one struct per topic. A target assignment may have 10,000 of them."""

    def write(self, out: bytearray, value: Partitions) -> None:
        write_count(out, len(value))
        for topic_id, indexes in value:
            if len(topic_id) != TOPIC_ID_BYTES:
                raise CodecError(f"a topic's id has {TOPIC_ID_BYTES} bytes, not {len(topic_id)}")
            out += _TOPIC_HEAD.pack(topic_id, len(indexes))
            out += struct.pack(f">{len(indexes)}i", *indexes)

    def read(self, reader: Reader) -> Partitions:
        found = []
        for _ in range(read_count(reader)):
            topic_id, count = reader.unpack(_TOPIC_HEAD)
            found.append((TopicId(topic_id), struct.unpack(f">{count}i", reader.take(4 * count))))
        return tuple(found)


PARTITION_LISTS: Final = PartitionLists()
SUBSCRIPTION: Final = Record(
    Subscription,
    (("topics", Many(TEXT)), ("pattern", TEXT), ("matched", Many(TEXT)), ("assignor", TEXT), ("rack", TEXT)),
)
CONSUMER_UPDATES: Final = Many(
    Record(ConsumerUpdate, (("member", GROUP_MEMBER), ("subscription", SUBSCRIPTION), ("replaces", TEXT)))
)
ACKNOWLEDGEMENTS: Final = Many(
    Record(
        Acknowledgement,
        (
            ("member_id", TEXT),
            ("epoch", INT32),
            ("owned", PARTITION_LISTS),
            ("says_owned", FLAG),
            ("is_away", FLAG),
        ),
    )
)
_ASSIGNMENT: Final = struct.Struct(f">{REQUEST_ID_BYTES}s{PARTITION_ID_BYTES}sqq")  # the fields, in order
_OFFSETS: Final = struct.Struct(">qq")  # OffsetsAssigned: its fields, in order
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
class OffsetRequests:
    """As hot, with thousands of items in a command: one struct per item."""

    def write(self, out: bytearray, value: tuple[Assignment, ...]) -> None:
        write_count(out, len(value))
        pack = _ASSIGNMENT.pack
        for item in value:
            if len(item.request_id) != REQUEST_ID_BYTES or len(item.partition) != PARTITION_ID_BYTES:
                sizes = f"{len(item.request_id)} and {len(item.partition)}"
                raise CodecError(f"ids have {REQUEST_ID_BYTES} and {PARTITION_ID_BYTES} bytes, not {sizes}")
            out += pack(*item)

    def read(self, reader: Reader) -> tuple[Assignment, ...]:
        body = reader.take(read_count(reader) * _ASSIGNMENT.size)
        return tuple(map(Assignment._make, _ASSIGNMENT.iter_unpack(body)))


@dataclass(frozen=True, slots=True)
class Code:
    """An ErrorCode by its wire number. A number that this version does not know reads as INTERNAL."""

    def write(self, out: bytearray, value: ErrorCode) -> None:
        out += U16.pack(value.number)

    def read(self, reader: Reader) -> ErrorCode:
        return ErrorCode.from_number(reader.unpack(U16)[0])


@dataclass(frozen=True, slots=True)
class ItemResults:
    """One result per item of a command: first the tags of all, then their records. Hot while all are assigned offsets,
    which is the usual answer: then one struct per item."""

    records: dict[int, Record]

    def write(self, out: bytearray, value: tuple[Any, ...]) -> None:
        write_count(out, len(value))
        tag_of = {record.cls: tag for tag, record in self.records.items()}
        try:
            out += bytes([tag_of[type(item)] for item in value])
        except KeyError as e:
            raise CodecError(f"{e.args[0].__name__} is not the result of an item") from e
        if all(type(item) is OffsetsAssigned for item in value):
            pack = _OFFSETS.pack
            out += b"".join([pack(item.base, item.last) for item in value])
        else:
            for item in value:
                self.records[tag_of[type(item)]].write(out, item)

    def read(self, reader: Reader) -> tuple[Any, ...]:
        tags = bytes(reader.take(read_count(reader)))
        kinds = [self._record(tag) for tag in sorted(set(tags))]
        if len(kinds) == 1 and kinds[0].cls is OffsetsAssigned:
            body = reader.take(len(tags) * _OFFSETS.size)
            return tuple([OffsetsAssigned(base=base, last=last) for base, last in _OFFSETS.iter_unpack(body)])
        return tuple([self.records[tag].read(reader) for tag in tags])

    def _record(self, tag: int) -> Record:
        if tag not in self.records:
            raise CodecError(f"a reply with the tag {tag} as the result of an item")
        return self.records[tag]
