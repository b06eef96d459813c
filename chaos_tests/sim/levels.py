"""A feature level that no smq has yet: level 2, with one command and one setting more. Nodes that know it stand for a
newer smq.

Owns the command, its row, the setting, and the time for which this process knows them. All nodes of a run share the
process, so what makes a node old is `feature_level_known` in its settings: it does not know the setting when it
proposes or applies. Production code must never import it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from smq.raft_state import command_codec, machine
from smq.raft_state.binary import FLAG, INT64, TEXT, Record
from smq.raft_state.cluster_config import CLUSTER_CONFIG
from smq.raft_state.command_table import COMMANDS, ROW_OF, CommandRow
from smq.raft_state.commands import Command, Request
from smq.raft_state.config_keys import ConfigKey, ConfigType, one_of
from smq.raft_state.fields import ANY_ID
from smq.raft_state.replies import Applied, Done
from smq.raft_state.state import ClusterState
from smq.raft_state.topic_config import TOPIC_CONFIG
from smq.replication.commands.proposer import Proposer

LEVEL_TWO: Final = command_codec.FEATURE_LEVEL + 1
_TAG: Final = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Request):
    """Changes the state only by its reply, which is remembered: a node that skipped it would differ."""

    text: str


def _note(_state: ClusterState, _command: Note) -> Applied:
    return Applied(reply=Done())


_FIELDS: Final = (("request_id", ANY_ID), ("is_from_node", FLAG), ("replies_before", INT64), ("text", TEXT))
_ROW: Final = CommandRow(tag=_TAG, record=Record(Note, _FIELDS), since=LEVEL_TWO, handler=_note)


SETTING: Final = "level.two.setting"
_KEY: Final = ConfigKey("0", "0 or 1", "what level 2 has", one_of("0", "1"), ConfigType.INT, since=LEVEL_TWO)
_TABLES: Final = (CLUSTER_CONFIG, TOPIC_CONFIG)


@contextmanager
def _without_setting(known_level: int) -> Iterator[None]:
    """As an smq of this level runs: its tables have no row for the setting."""
    is_old = known_level < LEVEL_TWO and SETTING in CLUSTER_CONFIG
    for table in _TABLES if is_old else ():
        del table[SETTING]
    try:
        yield
    finally:
        for table in _TABLES if is_old else ():
            table[SETTING] = _KEY


@contextmanager
def level_two() -> Iterator[None]:
    """This process has the code of level 2."""
    before, command_codec._COMMANDS = command_codec._COMMANDS, command_codec._Table("command", (*COMMANDS, _ROW))  # type: ignore[misc]  # planted for the time of a run
    ROW_OF[Note] = _ROW
    for table in _TABLES:
        table[SETTING] = _KEY
    run, encoded = machine.Machine._run, Proposer._encoded

    def run_as_its_level(self: machine.Machine, command: Command) -> Applied:
        with _without_setting(self._known_level):
            return run(self, command)

    def encoded_as_its_level(self: Proposer, command: Command) -> bytes:
        with _without_setting(self._known_level):
            return encoded(self, command)

    machine.Machine._run = run_as_its_level  # type: ignore[method-assign]  # for the time of a run
    Proposer._encoded = encoded_as_its_level  # type: ignore[method-assign]  # for the time of a run
    try:
        yield
    finally:
        machine.Machine._run = run  # type: ignore[method-assign]  # undoes the above
        Proposer._encoded = encoded  # type: ignore[method-assign]  # undoes the above
        for table in _TABLES:
            del table[SETTING]
        command_codec._COMMANDS = before  # type: ignore[misc]  # undoes the above
        del ROW_OF[Note]
