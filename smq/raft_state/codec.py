"""Commands and replies as bytes: what lies in the Raft log, travels between nodes, and fills the reply cache.

Owns the tag of every command and reply and the order of its fields. First byte: the codec version; second: the
tag; in version 3 the age of the request follows. All are for ever: a tag is never reused, fields are never reordered;
a change adds a version and keeps reading the old one. What an older version can say is written as it says it: every
value has one encoding, and an older smq reads whatever uses nothing new. No pickle. Anything that is not exactly what
this smq writes is a CodecError.
"""

import struct
from dataclasses import dataclass
from typing import Any, Final, cast

from smq.raft_state.binary import (
    FLAG,
    INT16,
    INT32,
    INT64,
    TEXT,
    U8,
    U16,
    U32,
    Blob,
    Bytes,
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
    AddPartitions,
    AdvanceExternalHwms,
    AdvanceHwms,
    AdvanceLogStart,
    AllocateProducerId,
    AlterTopicConfig,
    AssignMembers,
    Assignment,
    AssignOffsets,
    Barrier,
    Command,
    CommitCoordinatedOffsets,
    CommitMemberOffsets,
    CommitOffsets,
    CreateTopic,
    DeleteGroup,
    DeleteOffsets,
    DeleteTopic,
    Done,
    ElectLeader,
    ExpireOffsets,
    ExternalAdvance,
    ExternalHwm,
    FenceNode,
    FormGeneration,
    GenerationFormed,
    GroupMember,
    HwmAdvance,
    HwmsAdvanced,
    InitCluster,
    LeaderElected,
    OffsetCommit,
    OffsetsAssigned,
    ProducerIdAllocated,
    RegisterNode,
    Rejected,
    RemoveMembers,
    ReplaceMember,
    Reply,
    Results,
    SetNodeDrained,
    SetOffsetsRetention,
    TopicCreated,
    UnfenceNode,
)
from smq.raft_state.errors import ErrorCode
from smq.raft_state.limits import COMMAND_BYTES_MAX, PARTITION_ID_BYTES

__all__ = [
    "VERSION",
    "CodecError",
    "decode_command",
    "decode_proposal",
    "decode_reply",
    "encode_command",
    "encode_reply",
    "is_boundable",
]

VERSION: Final = 3  # the newest: a command with a request id, behind the age of its request
_RACK_VERSION: Final = 2  # RegisterNode with a rack, and nothing else
_FIRST_VERSION: Final = 1
_HEADER: Final = struct.Struct(">BB")  # version, tag

# Request, topic and disk ids carry a length, so that one of a wrong length is refused by the machine, with a typed
# rejection, and not by an exception where it is proposed.
_ANY_ID: Final = Blob(U8, 255)
_PARTITION: Final = Fixed(PARTITION_ID_BYTES)
_REQUEST: Final = ("request_id", _ANY_ID)
_CONFIG: Final = Many(Group((TEXT, TEXT)))
_NODE: Final = (("node", INT32), ("incarnation", INT64))
_COMMITS: Final = (
    "items",
    Many(Record(OffsetCommit, (("partition", _PARTITION), ("offset", INT64), ("metadata", TEXT)))),
)
_COORDINATED: Final = (_REQUEST, ("group", TEXT), ("coordinator_epoch", INT32))
NAMED_BLOBS: Final = Many(Group((TEXT, Blob(U32, COMMAND_BYTES_MAX))))
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
_REGISTER_NODE_V1: Final = (
    *_NODE,
    ("disk", _ANY_ID),
    ("grpc_address", TEXT),
    ("http_address", TEXT),
    ("kafka_address", TEXT),
)
# partition, epoch, hwm, next_offset, ts_ns
_HWM_ITEM: Final = struct.Struct(f">{PARTITION_ID_BYTES}siqqq")


@dataclass(frozen=True, slots=True)
class _HwmItems:
    """The hot one: a struct an item."""

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
class _Code:
    """An ErrorCode by its wire number. One that this version does not know reads as INTERNAL."""

    def write(self, out: bytearray, value: ErrorCode) -> None:
        out += U16.pack(value.number)

    def read(self, reader: Reader) -> ErrorCode:
        return ErrorCode.from_number(reader.unpack(U16)[0])


@dataclass(frozen=True, slots=True)
class _Result:
    """A reply inside of another, by its tag."""

    tags: tuple[int, ...]

    def write(self, out: bytearray, value: Reply) -> None:
        tag = _REPLY_TAGS[type(value)]
        if tag not in self.tags:
            raise CodecError(f"{type(value).__name__} is no result of an item")
        out.append(tag)
        REPLIES[tag].write(out, value)

    def read(self, reader: Reader) -> Reply:
        tag = reader.unpack(U8)[0]
        if tag not in self.tags:
            raise CodecError(f"a reply with the tag {tag} as the result of an item")
        return cast(Reply, REPLIES[tag].read(reader))


COMMANDS: Final[dict[int, Record]] = {
    1: Record(
        InitCluster,
        (
            ("cluster_id", TEXT),
            ("topics_max", INT64),
            ("partitions_max", INT64),
            ("groups_max", INT64),
            ("replies_max", INT64),
        ),
    ),
    2: Record(RegisterNode, (*_REGISTER_NODE_V1, ("rack", TEXT))),
    3: Record(FenceNode, _NODE),
    4: Record(UnfenceNode, _NODE),
    5: Record(
        CreateTopic,
        (
            _REQUEST,
            ("name", TEXT),
            ("topic_id", _ANY_ID),
            ("partition_count", INT64),
            ("replication_factor", INT64),
            ("config", _CONFIG),
            ("start_offset", INT64),
            ("created_ms", INT64),
        ),
    ),
    6: Record(DeleteTopic, (_REQUEST, ("name", TEXT))),
    7: Record(AddPartitions, (_REQUEST, ("name", TEXT), ("partition_count", INT64))),
    8: Record(AlterTopicConfig, (_REQUEST, ("name", TEXT), ("set_", _CONFIG), ("unset", Many(TEXT)))),
    9: Record(
        ElectLeader,
        (
            ("partition", _PARTITION),
            ("expected_epoch", INT32),
            ("candidate", INT32),
            ("incarnation", INT64),
            ("verified_end", INT64),
        ),
    ),
    10: Record(AdvanceHwms, (("items", _HwmItems()),)),
    11: Record(AdvanceLogStart, (_REQUEST, ("partition", _PARTITION), ("offset", INT64))),
    12: Record(AllocateProducerId, (_REQUEST, ("producer_id", INT64), ("producer_epoch", INT16))),
    13: Record(
        CommitOffsets,
        (
            _REQUEST,
            ("group", TEXT),
            _COMMITS,
            ("committed_ms", INT64),
        ),
    ),
    14: Record(Barrier),
    40: Record(SetNodeDrained, (_REQUEST, ("node", INT32), ("drained", FLAG))),
    41: Record(
        AssignOffsets,
        (
            (
                "items",
                Many(
                    Record(Assignment, (_REQUEST, ("partition", _PARTITION), ("count", INT64), ("not_before", INT64)))
                ),
            ),
        ),
    ),
    42: Record(
        AdvanceExternalHwms,
        (("items", Many(Record(ExternalAdvance, (("partition", _PARTITION), ("offset", INT64))))),),
    ),
    20: Record(
        CommitMemberOffsets,
        (
            _REQUEST,
            ("group", TEXT),
            ("generation", INT32),
            ("member_id", TEXT),
            ("instance_id", TEXT),
            _COMMITS,
            ("committed_ms", INT64),
        ),
    ),
    21: Record(
        FormGeneration,
        (
            *_COORDINATED,
            ("expected_generation", INT32),
            ("protocol_type", TEXT),
            ("protocol", TEXT),
            ("leader", TEXT),
            ("members", Many(GROUP_MEMBER)),
        ),
    ),
    22: Record(AssignMembers, (*_COORDINATED, ("generation", INT32), ("assignments", NAMED_BLOBS))),
    23: Record(
        RemoveMembers,
        (*_COORDINATED, ("generation", INT32), ("member_ids", Many(TEXT)), ("removed_ms", INT64)),
    ),
    24: Record(ReplaceMember, (*_COORDINATED, ("old_member_id", TEXT), ("member", GROUP_MEMBER))),
    25: Record(DeleteGroup, (_REQUEST, ("group", TEXT))),
    26: Record(DeleteOffsets, (_REQUEST, ("group", TEXT), ("generation", INT32), ("partitions", Many(_PARTITION)))),
    27: Record(ExpireOffsets, (("now_ms", INT64),)),
    28: Record(SetOffsetsRetention, (_REQUEST, ("retention_ms", INT64))),
    29: Record(
        CommitCoordinatedOffsets,
        (
            *_COORDINATED,
            ("generation", INT32),
            ("member_id", TEXT),
            ("instance_id", TEXT),
            _COMMITS,
            ("committed_ms", INT64),
        ),
    ),
}

REPLIES: Final[dict[int, Record]] = {
    1: Record(Done),
    2: Record(Rejected, (("code", _Code()), ("message", TEXT), ("lo", INT64), ("hi", INT64))),
    3: Record(TopicCreated, (("topic_id", _ANY_ID),)),
    4: Record(LeaderElected, (("epoch", INT32), ("start", INT64))),
    5: Record(HwmsAdvanced, (("accepted", Many(FLAG)),)),
    6: Record(ProducerIdAllocated, (("producer_id", INT64), ("producer_epoch", INT16))),
    40: Record(OffsetsAssigned, (("base", INT64), ("last", INT64))),
    41: Record(ExternalHwm, (("hwm", INT64),)),
    42: Record(Results, (("items", Many(_Result((2, 40, 41)))),)),
    20: Record(GenerationFormed, (("generation", INT32),)),
}

# What each version can say. COMMANDS holds the newest layout of everything.
_COMMANDS: Final = {
    _FIRST_VERSION: {**COMMANDS, 2: Record(RegisterNode, _REGISTER_NODE_V1)},
    _RACK_VERSION: {2: COMMANDS[2]},
    VERSION: {tag: record for tag, record in COMMANDS.items() if record.fields[:1] == (_REQUEST,)},
}
_REPLIES: Final = {_FIRST_VERSION: REPLIES}
_COMMAND_TAGS: Final = {record.cls: tag for tag, record in COMMANDS.items()}
_REPLY_TAGS: Final = {record.cls: tag for tag, record in REPLIES.items()}


def is_boundable(command: Command) -> bool:
    """Whether a command has a request id, and so may say how old its request is."""
    return _COMMAND_TAGS.get(type(command)) in _COMMANDS[VERSION]


def encode_command(command: Command, not_before: int | None = None) -> bytes:
    """CodecError where a value does not fit its field: a bad request that the proposer should have refused.

    `not_before`: how many replies had been counted when the request was first accepted (see `machine`).
    """
    if not_before is not None:
        return _encode(command, _COMMAND_TAGS, _COMMANDS, VERSION, INT64.layout.pack(not_before))
    version = _RACK_VERSION if isinstance(command, RegisterNode) and command.rack else _FIRST_VERSION
    return _encode(command, _COMMAND_TAGS, _COMMANDS, version)


def decode_command(data: Bytes) -> Command:
    """As `decode_proposal`, the command alone."""
    return decode_proposal(data)[0]


def decode_proposal(data: Bytes) -> tuple[Command, int | None]:
    """Inverse of `encode_command`: (command, not_before). CodecError for anything else."""
    value, not_before = _decode(data, _COMMANDS, "command")
    command = cast(Command, value)
    if isinstance(command, RegisterNode) and not command.rack and data[0] != _FIRST_VERSION:
        raise CodecError(f"a registration without a rack is of codec version {_FIRST_VERSION}, not {data[0]}")
    return command, not_before


def encode_reply(reply: Reply) -> bytes:
    """The reply's bytes, as they are forwarded and cached."""
    return _encode(reply, _REPLY_TAGS, _REPLIES, _FIRST_VERSION)


def decode_reply(data: Bytes) -> Reply:
    """Inverse of `encode_reply`; CodecError for anything else."""
    return cast(Reply, _decode(data, _REPLIES, "reply")[0])


def _encode(
    value: Any, tags: dict[Any, int], tables: dict[int, dict[int, Record]], version: int, prefix: bytes = b""
) -> bytes:
    tag = tags.get(type(value))
    if tag is None or tag not in tables[version]:
        raise CodecError(f"{type(value).__name__} has no tag in codec version {version}")
    out = bytearray((version, tag)) + prefix
    try:
        tables[version][tag].write(out, value)
    except (struct.error, UnicodeEncodeError, TypeError, AttributeError, CodecError) as e:
        raise CodecError(f"{type(value).__name__} does not encode: {e}") from e
    if len(out) > COMMAND_BYTES_MAX:
        raise CodecError(f"{type(value).__name__} has {len(out)} bytes, at most {COMMAND_BYTES_MAX} are allowed")
    return bytes(out)


def _decode(data: Bytes, tables: dict[int, dict[int, Record]], what: str) -> tuple[Any, int | None]:
    if len(data) > COMMAND_BYTES_MAX:
        raise CodecError(f"a {what} of {len(data)} bytes, at most {COMMAND_BYTES_MAX} are allowed")
    reader = Reader(data)
    version, tag = reader.unpack(_HEADER)
    table = tables.get(version)
    if table is None:
        raise CodecError(f"a {what} of codec version {version}; this smq reads up to {VERSION}: upgrade it")
    record = table.get(tag)
    if record is None:
        raise CodecError(f"a {what} with the unknown tag {tag}")
    not_before: int | None = INT64.read(reader) if version == VERSION else None
    value = record.read(reader)
    reader.finish()
    return value, not_before
