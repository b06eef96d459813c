"""Offsets without records, from this node's callers to Raft: waiting callers share one command.

Owns the two kinds of command. Every item may be proposed again: an assignment has a request id, and a mark only grows.
It must never judge an item: the state machine does. Only the node uses it.
"""

from collections.abc import Callable
from typing import TypeVar, cast

from smq.raft_state.commands import AdvanceExternalHwms, Assignment, AssignOffsets, Command, ExternalAdvance
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Offset
from smq.raft_state.replies import ExternalHwm, OffsetsAssigned
from smq.replication.commands.coalescing import ItemResult, SharedCommand
from smq.replication.commands.proposer import Proposer
from smq.replication.host import Host

Item = TypeVar("Item")
Result = TypeVar("Result")


class ExternalOffsets:
    """Both kinds of command, each with its own callers."""

    def __init__(self, host: Host, proposer: Proposer) -> None:
        def shared(
            command_of: Callable[[tuple[Item, ...]], Command],
            result_of: Callable[[ItemResult], Result],
        ) -> SharedCommand[Item, Result]:
            return SharedCommand(host, proposer, command_of=command_of, result_of=result_of)

        self._assignments: SharedCommand[Assignment, OffsetsAssigned] = shared(
            lambda items: AssignOffsets(items=items), lambda result: cast(OffsetsAssigned, result)
        )
        self._advances: SharedCommand[ExternalAdvance, Offset] = shared(
            lambda items: AdvanceExternalHwms(items=items), lambda result: cast(ExternalHwm, result).hwm
        )
        self.assign = self._assignments.submit
        self.advance = self._advances.submit

    def close(self, error: SmqError) -> None:
        self._assignments.close(error)
        self._advances.close(error)
