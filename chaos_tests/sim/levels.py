"""A feature level that no smq has yet: level 2, with one command more. Nodes that know it stand for a newer smq.

Owns the command, its row, and the time for which this process knows them. All nodes of a run share the process, so what
makes a node old is `feature_level_known` in its settings. Production code must never import it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from smq.raft_state import codec, machine
from smq.raft_state.binary import FLAG, INT64, TEXT, Record
from smq.raft_state.command_table import COMMANDS, CommandRow
from smq.raft_state.commands import Request
from smq.raft_state.fields import ANY_ID
from smq.raft_state.replies import Applied, Done
from smq.raft_state.state import ClusterState

LEVEL_TWO: Final = codec.FEATURE_LEVEL + 1
_TAG: Final = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Request):
    """Changes the state only by its reply, which is remembered: a node that skipped it would differ."""

    text: str


def _note(_state: ClusterState, _command: Note) -> Applied:
    return Applied(reply=Done())


_FIELDS: Final = (("request_id", ANY_ID), ("is_from_node", FLAG), ("replies_before", INT64), ("text", TEXT))
_ROW: Final = CommandRow(tag=_TAG, record=Record(Note, _FIELDS), since=LEVEL_TWO, handler=_note)


@contextmanager
def level_two() -> Iterator[None]:
    """This process has the code of level 2."""
    before, codec._COMMANDS = codec._COMMANDS, codec._Table("command", (*COMMANDS, _ROW))  # type: ignore[misc]  # planted for the time of a run
    machine._HANDLERS[Note] = _note
    try:
        yield
    finally:
        codec._COMMANDS = before  # type: ignore[misc]  # undoes the above
        del machine._HANDLERS[Note]
