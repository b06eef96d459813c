"""The list of all planted bugs of whole clusters.

Owns their order. The rows are in the other modules of this room: for each bug the rule that it breaks, the fault that
takes a production function's place, the scenario that must find it, and the anomalies that reveal it. Bugs of Raft
alone are in `chaos_tests/sim/raft/planted.py`, those of one partition alone in `chaos_tests/sim/partition/planted.py`.
"""

from chaos_tests.sim.planted.groups import GROUP_BUGS
from chaos_tests.sim.planted.logs import LOG_BUGS
from chaos_tests.sim.planted.partitions import PARTITION_BUGS
from chaos_tests.sim.planted.state import STATE_BUGS
from chaos_tests.sim.planted.transactions import TRANSACTION_BUGS
from chaos_tests.sim.replacement import PlantedBug

BUGS: tuple[PlantedBug, ...] = (*PARTITION_BUGS, *LOG_BUGS, *TRANSACTION_BUGS, *STATE_BUGS, *GROUP_BUGS)


def find(name: str) -> PlantedBug:
    for bug in BUGS:
        if bug.name == name:
            return bug
    raise KeyError(f"no planted bug {name!r}; known: {', '.join(bug.name for bug in BUGS)}")
