"""When a leader gives its partition to another replica because of its own disk: damaged, full or hung.

Owns the conditions and the choice of the successor. Each condition compares this disk with what followers have reported
of theirs, so a leader goes on if no follower would do better. It must never elect: it hands over, or resigns and leaves
the choice to the controller. Only the replica uses it.
"""

from collections.abc import Collection
from typing import Protocol

from smq.raft_state.ids import Epoch, NodeId, Offset
from smq.replication.partition.streams import FollowerStream
from smq.replication.storage.hang import HangGuard


class Leading(Protocol):
    """What this sees of its replica."""

    leading: Epoch | None

    def known_commit_point(self) -> Offset: ...

    @property
    def durable_verified_end(self) -> Offset: ...

    def transfer(self, target: NodeId) -> bool: ...

    def resign(self) -> None: ...


def step_aside(
    replica: Leading, streams: Collection[FollowerStream], *, is_full: bool, hang: HangGuard, is_refusing: bool
) -> None:
    """`is_full` and `hang` are of this node's own disk. `is_refusing`: too much waits for it to take batches of this
    partition, and another replica is on a node that could lead. To be called periodically while the replica leads."""
    reported = [(s.acked_end, s) for s in streams if s.acked_end is not None]
    if any(s.is_unreadable for s in streams) and any(end >= replica.known_commit_point() for end, _ in reported):
        replica.resign()  # a follower needs bytes that are damaged here: one that has them should lead
    if replica.leading is not None and is_full:
        any(replica.transfer(s.peer) for _, s in reported if not s.is_full)  # to the first that is close enough
    if replica.leading is not None and hang.hangs:
        _leave_hung_disk(replica, reported, hang, is_refusing=is_refusing)


def _leave_hung_disk(
    replica: Leading, reported: list[tuple[Offset, FollowerStream]], hang: HangGuard, *, is_refusing: bool
) -> None:
    """A follower that stored more than this disk did is the proof that its own disk writes. A handover loses no record;
    if none succeeds in time, the controller elects one of the followers that reach the high water mark. If batches of
    other partitions fill the room, no follower can store more than this disk did: then another node's word that its
    disk writes is enough, and the controller elects."""
    ahead = [(end, s) for end, s in reported if end > replica.durable_verified_end]
    ahead.sort(key=lambda follower: follower[0], reverse=True)
    if hang.hangs_on and (is_refusing or any(end >= replica.known_commit_point() for end, _ in ahead)):
        replica.resign()
    else:
        any(replica.transfer(s.peer) for _, s in ahead if not s.is_full)
