"""The list of all planted bugs of whole clusters.

Owns their order. The rows are in the other modules of this room: for each bug the rule that it breaks, the scenario
that must find it, and the anomalies that reveal it. Bugs that Raft alone must notice are in
`chaos_tests/sim/raft/planted.py`.
"""

from chaos_tests.sim.mutation import PlantedBug
from chaos_tests.sim.planted.administration import ADMINISTRATION_BUGS
from chaos_tests.sim.planted.agreement import AGREEMENT_BUGS
from chaos_tests.sim.planted.batches import BATCH_BUGS
from chaos_tests.sim.planted.compaction import COMPACTION_BUGS
from chaos_tests.sim.planted.disks import DISK_BUGS
from chaos_tests.sim.planted.ends import END_BUGS
from chaos_tests.sim.planted.external_offsets import EXTERNAL_OFFSET_BUGS
from chaos_tests.sim.planted.groups import GROUP_BUGS
from chaos_tests.sim.planted.lag import LAG_BUGS
from chaos_tests.sim.planted.one_round import ONE_ROUND_BUGS
from chaos_tests.sim.planted.overload import OVERLOAD_BUGS
from chaos_tests.sim.planted.producers import PRODUCER_BUGS
from chaos_tests.sim.planted.replication import REPLICATION_BUGS
from chaos_tests.sim.planted.retention import RETENTION_BUGS
from chaos_tests.sim.planted.topic_settings import TOPIC_SETTING_BUGS
from chaos_tests.sim.planted.transactions import TRANSACTION_BUGS
from chaos_tests.sim.planted.watch import WATCH_BUGS

BUGS: tuple[PlantedBug, ...] = (
    *REPLICATION_BUGS,
    *END_BUGS,
    *EXTERNAL_OFFSET_BUGS,
    *ONE_ROUND_BUGS,
    *PRODUCER_BUGS,
    *OVERLOAD_BUGS,
    *DISK_BUGS,
    *RETENTION_BUGS,
    *COMPACTION_BUGS,
    *TRANSACTION_BUGS,
    *BATCH_BUGS,
    *TOPIC_SETTING_BUGS,
    *AGREEMENT_BUGS,
    *GROUP_BUGS,
    *LAG_BUGS,
    *ADMINISTRATION_BUGS,
    *WATCH_BUGS,
)


def find(name: str) -> PlantedBug:
    for bug in BUGS:
        if bug.name == name:
            return bug
    raise KeyError(f"no planted bug {name!r}; known: {', '.join(bug.name for bug in BUGS)}")
