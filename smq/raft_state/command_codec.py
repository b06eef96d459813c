"""Commands and replies as bytes, for the Raft log, the messages between nodes, and the reply cache.

Owns the header: the feature level that introduced the row, then the tag. The fields of the row follow. From
the first release on, a layout never changes: a new layout is a row of a new level, and the old row stays readable. A
value is written by the newest row that the cluster's level allows, so every value has one encoding at a level. No
pickle. Anything that is not exactly what this smq writes is a CodecError, and UpgradeNeeded if a newer smq wrote it.

Owns the feature levels, too: what a cluster may use before all of its nodes know it, and what a node does not know. A
level is a number in the replicated state. It is raised once every registered node knows it, and never lowered (see
`handlers.nodes`). Each row of the command table and of a configuration table names the level that introduced it. Any
module on the node may import it.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from smq.raft_state.binary import Buffer, CodecError, Reader
from smq.raft_state.cluster_config import CLUSTER_CONFIG
from smq.raft_state.command_table import COMMANDS, REPLIES, ROW_OF, Row
from smq.raft_state.commands import Command
from smq.raft_state.config_keys import ConfigKey
from smq.raft_state.limits import COMMAND_BYTES_MAX
from smq.raft_state.replies import Reply
from smq.raft_state.topic_config import TOPIC_CONFIG

__all__ = [
    "FEATURE_LEVEL",
    "CodecError",
    "FeatureNotEnabled",
    "UpgradeNeeded",
    "check_keys",
    "decode_command",
    "decode_reply",
    "encode_command",
    "encode_reply",
]

_SETTINGS_LEVEL: Final = max(row.since for row in (*CLUSTER_CONFIG.values(), *TOPIC_CONFIG.values()))
# The highest that this smq knows.
FEATURE_LEVEL: Final = max(_SETTINGS_LEVEL, *(row.since for row in (*COMMANDS, *REPLIES)))
_HEADER: Final = struct.Struct(">BB")  # level, tag


class FeatureNotEnabled(CodecError):
    """This smq knows the command, but some node of the cluster may not: it is not proposed yet."""

    def __init__(self, what: str, *, needed: int, level: int) -> None:
        super().__init__(
            f"{what} needs feature level {needed}, and the cluster is at level {level}: it rises once every node runs "
            "an smq that knows it"
        )


class UpgradeNeeded(CodecError):
    """A newer smq wrote this, so the node cannot know what follows from it. It must stop where it is, and wait."""

    def __init__(self, what: str, *, level: int, known: int) -> None:
        super().__init__(f"{what}; this smq knows feature levels up to {known}: run a newer smq on this node")
        self.level = level  # at least


def check_keys(table: Mapping[str, ConfigKey], keys: Iterable[str], level: int) -> None:
    """FeatureNotEnabled for a key that a cluster of this level does not have yet. Unknown keys are not judged."""
    for key in keys:
        row = table.get(key)
        if row is not None and row.since > level:
            raise FeatureNotEnabled(f"the configuration {key}", needed=row.since, level=level)


class _Table:
    """The rows of one kind by class, to write, and by header, to read."""

    def __init__(self, what: str, rows: Sequence[Row]) -> None:
        self.what = what
        self._by_class: dict[type[Any], list[Row]] = {}  # the newest first
        self._by_header: dict[tuple[int, int], Row] = {}
        for row in sorted(rows, key=lambda row: -row.since):
            self._by_class.setdefault(row.record.cls, []).append(row)
            self._by_header[row.since, row.tag] = row

    def _row_of(self, value: Any, level: int) -> Row:
        rows = self._by_class.get(type(value))
        if rows is None:
            raise CodecError(f"{type(value).__name__} is no {self.what}")
        for row in rows:
            if row.since <= level:
                return row
        raise FeatureNotEnabled(type(value).__name__, needed=rows[-1].since, level=level)

    def encode(self, value: Any, level: int) -> bytes:
        row = self._row_of(value, level)
        out = bytearray((row.since, row.tag))
        try:
            row.record.write(out, value)
        except (struct.error, UnicodeEncodeError, TypeError, AttributeError, CodecError) as e:
            raise CodecError(f"{type(value).__name__} does not encode: {e}") from e
        if len(out) > COMMAND_BYTES_MAX:
            raise CodecError(f"{type(value).__name__} has {len(out)} bytes, at most {COMMAND_BYTES_MAX} are allowed")
        return bytes(out)

    def decode(self, data: Buffer, known: int) -> Any:
        if len(data) > COMMAND_BYTES_MAX:
            raise CodecError(f"a {self.what} of {len(data)} bytes, at most {COMMAND_BYTES_MAX} are allowed")
        reader = Reader(data)
        version, tag = reader.unpack(_HEADER)
        row = self._by_header.get((version, tag))
        if version > known:
            raise UpgradeNeeded(f"a {self.what} of feature level {version}", level=version, known=known)
        if row is None and version >= 1:
            raise UpgradeNeeded(f"a {self.what} with the unknown tag {tag}", level=version, known=known)
        if row is None:
            raise CodecError(f"a {self.what} of feature level {version}: there is none below 1")
        value = row.record.read(reader)
        reader.finish()
        return value


_COMMANDS: Final = _Table("command", COMMANDS)
_REPLIES: Final = _Table("reply", REPLIES)


def encode_command(command: Command, level: int = FEATURE_LEVEL) -> bytes:
    """The command's bytes in a cluster of this level. CodecError if a value does not fit its field: a bad request.
    FeatureNotEnabled if the level has no such command, or not the settings that it names."""
    row = ROW_OF.get(type(command))
    if row is not None and row.settings is not None:
        check_keys(*row.settings(command), level)
    return _COMMANDS.encode(command, level)


def decode_command(data: Buffer, known: int = FEATURE_LEVEL) -> Command:
    """Inverse of `encode_command`. UpgradeNeeded for a command above the `known` level; CodecError for anything
    else."""
    return cast(Command, _COMMANDS.decode(data, known))


def encode_reply(reply: Reply, level: int = FEATURE_LEVEL) -> bytes:
    """The reply's bytes, as they are forwarded and cached in a cluster of this level."""
    return _REPLIES.encode(reply, level)


def decode_reply(data: Buffer, known: int = FEATURE_LEVEL) -> Reply:
    """Inverse of `encode_reply`. UpgradeNeeded for a reply above the `known` level; CodecError for anything else."""
    return cast(Reply, _REPLIES.decode(data, known))
