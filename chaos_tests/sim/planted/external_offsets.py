"""Planted bugs of offsets without records: of single callers, and of callers that share a command.

Owns these rows only. `catalogue` alone imports it.
"""

from typing import Final

from chaos_tests.sim.mutation import Mutation, PlantedBug
from chaos_tests.sim.planted.replication import BROKEN

_HANDLER: Final = "smq.raft_state.handlers.external_offsets:"
_SHARED: Final = "smq.replication.partition.external_offsets:SharedCommand."
_TAKEN_TWICE: Final = frozenset({"offset-gap", "nonmonotonic-assign", "offset-reuse"}) | BROKEN

EXTERNAL_OFFSET_BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        name="retry-assigned-anew",
        rule="a request for offsets takes effect once, however often it is repeated",
        mutations=(
            Mutation(
                _HANDLER + "_assign",
                "known = state.assigned.get(item.request_id)",
                "known = None",
            ),
        ),
        scenario="handover",
        anomalies=frozenset({"offset-gap", "nonmonotonic-assign", "offset-reuse"}) | BROKEN,
        seeds=6,
    ),
    PlantedBug(
        name="refused-request-refuses-its-neighbours",
        rule="callers that share a command have an answer each: one that is refused costs the others nothing",
        mutations=(
            Mutation(
                _HANDLER + "assign_offsets",
                "results.append(refused.rejected)",
                "results = [refused.rejected] * len(command.items); break",
            ),
        ),
        scenario="handover",
        anomalies=BROKEN,
        seeds=6,
    ),
    PlantedBug(
        name="answers-of-a-shared-command-are-mixed-up",
        rule="callers that share a command have an answer each, their own",
        mutations=(Mutation(_SHARED + "_on_reply", "zip(batch, reply.items,", "zip(batch, reversed(reply.items),"),),
        scenario="handover",
        anomalies=_TAKEN_TWICE,
        seeds=6,
    ),
    PlantedBug(
        name="shared-command-outlives-a-caller",
        rule="nothing is proposed after its caller's deadline, nor with others whose deadline is later",
        mutations=(Mutation(_SHARED + "_launch", "send_until_ns=first_ns", "send_until_ns=1 << 62"),),
        scenario="handover",
        anomalies=frozenset({"late-proposal"}),
        seeds=160,
    ),
)
