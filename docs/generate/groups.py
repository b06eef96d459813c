"""docs/groups.md from the table of a group's life, so that the two cannot differ."""

import enum
from collections.abc import Iterable

from docs.generate import table
from smq.coordinator.groups.member_requests import Outcome
from smq.coordinator.groups.transitions import LEADS_TO, TABLE, Action, Event, Phase
from smq.coordinator.grpc.groups_service import OUTCOME_ERRORS
from smq.coordinator.kafka.errors import OUTCOME_CODES

_HEAD = """\
# The life of a consumer group

Generated from `smq/coordinator/groups/transitions.py` by `make docs`; do not edit.

One node coordinates each group. Its coordinator runs the group by the table below: an event meets the phase that the
group is in, and the table names the action. The phase follows from the replicated state, the open round and the command
under way; the coordinator stores none. A cell without a name means that nothing is done.

"""

_PHASES = "\n## Phases\n\n"
_EVENTS = "\n## Events\n\n"
_ACTIONS = """
## Actions

The last column names the phases in which an action may leave the group, besides the one before it.

"""
_OUTCOMES = """
## Outcomes

The coordinator answers every request with one of these. Clients get the code beside it.

"""


def _grpc(outcome: Outcome) -> str:
    code = OUTCOME_ERRORS.get(outcome)
    return "" if code is None else f"`{code.name}`"


def render() -> str:
    outcomes = (
        (f"`{outcome.name}`", outcome.value, f"{code.value} `{code.name}`", _grpc(outcome))
        for outcome, code in OUTCOME_CODES.items()
    )
    actions = (
        (f"`{action.name}`", action.value, _names(p for p in Phase if p in LEADS_TO.get(action, ())))
        for action in Action
        if action is not Action.NOTHING
    )
    return (
        f"{_HEAD}{diagram()}{_PHASES}{_described(Phase)}{_EVENTS}{_described(Event)}"
        f"{_ACTIONS}{table(('action', 'what it does', 'leads to'), actions)}"
        f"{_OUTCOMES}{table(('outcome', 'meaning', 'Kafka', 'gRPC'), outcomes)}"
    )


def diagram() -> str:
    """The table in columns, as a block of text."""
    rows = [["", *(phase.name for phase in Phase)]]
    for event in Event:
        actions = (TABLE[phase, event] for phase in Phase)
        rows.append([event.name, *("" if action is Action.NOTHING else action.name for action in actions)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(["```text\n", *(f"{line}\n" for line in lines), "```\n"])


def _described(members: type[enum.Enum]) -> str:
    rows = ((f"`{member.name}`", member.value) for member in members)
    return table((members.__name__.lower(), "meaning"), rows)


def _names(phases: Iterable[Phase]) -> str:
    return ", ".join(f"`{phase.name}`" for phase in phases)
