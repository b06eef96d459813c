"""Commands and replies as bytes: what lies in the Raft log, travels between nodes, and fills the reply cache.

Owns the tag of every command and reply and the order of its fields. First byte: the codec version; second: the
tag; in version 3 the age of the request follows. All are for ever: a tag is never reused, fields are never reordered;
a change adds a version and keeps reading the old one. What an older version can say is written as it says it: every
value has one encoding, and an older smq reads whatever uses nothing new. No pickle. Anything that is not exactly what
this smq writes is a CodecError.
"""

import struct
from typing import Any, Final, cast

from smq.raft_state.binary import INT64, Bytes, CodecError, Reader, Record
from smq.raft_state.commands import Command, RegisterNode, Reply, Request
from smq.raft_state.limits import COMMAND_BYTES_MAX
from smq.raft_state.registry import COMMANDS, REPLIES

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

_NEWEST: Final = {row.tag: row.record for row in COMMANDS}
_COMMAND_TAGS: Final = {row.record.cls: row.tag for row in COMMANDS}
_REPLY_TAGS: Final = {row.record.cls: row.tag for row in REPLIES}
_REGISTER: Final = _COMMAND_TAGS[RegisterNode]
_WITHOUT_RACK: Final = Record(RegisterNode, _NEWEST[_REGISTER].fields[:-1])

# What each version can say.
_COMMANDS: Final = {
    _FIRST_VERSION: {**_NEWEST, _REGISTER: _WITHOUT_RACK},
    _RACK_VERSION: {_REGISTER: _NEWEST[_REGISTER]},
    VERSION: {row.tag: row.record for row in COMMANDS if issubclass(row.record.cls, Request)},
}
_REPLIES: Final = {_FIRST_VERSION: {row.tag: row.record for row in REPLIES}}


def is_boundable(command: Command) -> bool:
    """Whether a command has a request id, and so may say how old its request is."""
    return isinstance(command, Request)


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
