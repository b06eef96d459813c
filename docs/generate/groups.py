"""docs/groups.md from the table of a group's life, so that the two cannot differ."""

from docs.generate import table
from smq.coordinator.groups.member_requests import Outcome
from smq.coordinator.groups.transitions import TABLE, Action, Event, Phase
from smq.coordinator.grpc.groups_service import OUTCOME_ERRORS
from smq.coordinator.kafka.errors import OUTCOME_CODES

_HEAD = """\
# The life of a consumer group

Generated from `smq/coordinator/groups/transitions.py` by `make docs`; do not edit.

One node coordinates each group. Its coordinator runs a group of Kafka's classic protocol by the table below: an event
meets the phase that the group is in, and the table names the action. The phase follows from the replicated state, the
open round and the command under way; the coordinator stores none. A cell without a name means that nothing is done.
That file says of each event when it comes, and of each action what it does and to which phases it may lead. The groups
of KIP-848 have no rounds, and so no phases: `smq/coordinator/groups/consumers.py` runs them.

"""

_PHASES = "\n## Phases\n\n"
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
    phases = table(("phase", "meaning"), ((f"`{phase.name}`", phase.value) for phase in Phase))
    return f"{_HEAD}{diagram()}{_PHASES}{phases}{_OUTCOMES}{table(('outcome', 'meaning', 'Kafka', 'gRPC'), outcomes)}"


def diagram() -> str:
    """The table in columns, as a block of text."""
    rows = [["", *(phase.name for phase in Phase)]]
    for event in Event:
        actions = (TABLE[phase, event] for phase in Phase)
        rows.append([event.name, *("" if action is Action.NOTHING else action.name for action in actions)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(["```text\n", *(f"{line}\n" for line in lines), "```\n"])
