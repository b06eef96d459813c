"""Commands and replies as bytes, for the Raft log, the messages between nodes, and the reply cache.

Owns the header: the codec version, then the tag. The fields of the registry's row follow. From the first release on, a
layout never changes: a new layout is a row of a new version, and the old row stays readable. Every value has one
encoding. No pickle. Anything that is not exactly what this smq writes is a CodecError.
"""

import struct
from collections.abc import Sequence
from typing import Any, Final, cast

from smq.raft_state.binary import Bytes, CodecError, Reader
from smq.raft_state.command_table import COMMANDS, REPLIES, Row
from smq.raft_state.commands import Command
from smq.raft_state.limits import COMMAND_BYTES_MAX
from smq.raft_state.replies import Reply

__all__ = ["VERSION", "CodecError", "decode_command", "decode_reply", "encode_command", "encode_reply"]

VERSION: Final = max(row.since for row in (*COMMANDS, *REPLIES))
_HEADER: Final = struct.Struct(">BB")  # version, tag


class _Table:
    """The rows of one kind by class, to write, and by header, to read."""

    def __init__(self, what: str, rows: Sequence[Row]) -> None:
        self.what = what
        self._by_class = {row.record.cls: row for row in sorted(rows, key=lambda row: row.since)}  # the newest
        self._by_header = {(row.since, row.tag): row for row in rows}

    def encode(self, value: Any) -> bytes:
        row = self._by_class.get(type(value))
        if row is None:
            raise CodecError(f"{type(value).__name__} is no {self.what}")
        out = bytearray((row.since, row.tag))
        try:
            row.record.write(out, value)
        except (struct.error, UnicodeEncodeError, TypeError, AttributeError, CodecError) as e:
            raise CodecError(f"{type(value).__name__} does not encode: {e}") from e
        if len(out) > COMMAND_BYTES_MAX:
            raise CodecError(f"{type(value).__name__} has {len(out)} bytes, at most {COMMAND_BYTES_MAX} are allowed")
        return bytes(out)

    def decode(self, data: Bytes) -> Any:
        if len(data) > COMMAND_BYTES_MAX:
            raise CodecError(f"a {self.what} of {len(data)} bytes, at most {COMMAND_BYTES_MAX} are allowed")
        reader = Reader(data)
        version, tag = reader.unpack(_HEADER)
        if not 1 <= version <= VERSION:
            raise CodecError(
                f"a {self.what} of codec version {version}; this smq reads version {VERSION}: run the smq that wrote it"
            )
        row = self._by_header.get((version, tag))
        if row is None:
            raise CodecError(f"a {self.what} with the unknown tag {tag}")
        value = row.record.read(reader)
        reader.finish()
        return value


_COMMANDS: Final = _Table("command", COMMANDS)
_REPLIES: Final = _Table("reply", REPLIES)


def encode_command(command: Command) -> bytes:
    """The command's bytes. CodecError if a value does not fit its field: a bad request."""
    return _COMMANDS.encode(command)


def decode_command(data: Bytes) -> Command:
    """Inverse of `encode_command`; CodecError for anything else."""
    return cast(Command, _COMMANDS.decode(data))


def encode_reply(reply: Reply) -> bytes:
    """The reply's bytes, as they are forwarded and cached."""
    return _REPLIES.encode(reply)


def decode_reply(data: Bytes) -> Reply:
    """Inverse of `encode_reply`; CodecError for anything else."""
    return cast(Reply, _REPLIES.decode(data))
