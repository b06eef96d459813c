"""What every handler of a Kafka request gets: node, groups, the listener's settings, bytes in flight, fetch sessions.

Owns what all Kafka connections of a node share. `kafka.listener` makes one gateway per way in.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Final

from smq.coordinator.groups.coordinator import GroupCoordinator
from smq.coordinator.kafka.fetch_sessions import FetchSessions
from smq.coordinator.service.audience import OWN
from smq.coordinator.service.audit import OFF, Audit
from smq.coordinator.service.byte_budget import InflightBytes
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.group_members import Memberships
from smq.coordinator.service.quotas import Quotas
from smq.coordinator.service.settings import Settings
from smq.coordinator.service.transactions import Transactions
from smq.raft_state.state import ClusterState
from smq.replication.monitoring.measures import Histogram, ProcessMeasures

TURNS_PER_SAMPLE: Final = 7  # a prime number, as producing's


def _no_quotas() -> Quotas:
    state = ClusterState()
    return Quotas(lambda: state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    calls: NodeCalls
    groups: GroupCoordinator
    settings: Settings
    request_bytes_max: int
    response_bytes_max: int
    data_dir: str  # absolute
    inflight: InflightBytes
    super_users: tuple[str, ...] = ()
    fetch_sessions: FetchSessions = field(default_factory=lambda: FetchSessions(InflightBytes()))
    quotas: Quotas = field(default_factory=_no_quotas)
    # Counts partitions that a request makes or deletes; KafkaRefusal if its client may make and delete no more now.
    mutate: Callable[[int], None] = lambda _partitions: None
    audit: Audit = OFF
    listener: str = OWN  # that its clients came through
    request_times: Histogram = field(default_factory=lambda: ProcessMeasures().kafka_request)
    # Of each turn in which requests are read, whether those of Produce are timed. Shared: a connection may have few.
    timed_turns: Iterator[bool] = field(default_factory=lambda: cycle([True] + [False] * (TURNS_PER_SAMPLE - 1)))

    @property
    def state(self) -> ClusterState:
        return self.calls.node.state

    @property
    def memberships(self) -> Memberships:
        return Memberships(self.calls, self.groups)

    @property
    def transactions(self) -> Transactions:
        return Transactions(self.calls, self.groups)
