"""The engine with one repair taken out at a time: proof that the simulation would notice.

Owns BUGS, each a context manager that breaks production code for as long as it is entered.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Final
from unittest.mock import patch

from smq.raft_state.ids import DiskId, NodeId
from smq.replication.ports import Delete
from smq.replication.raft import engine_pysyncobj
from smq.replication.raft.applier import Applier
from smq.replication.raft.core import Core
from smq.replication.raft.engine_pysyncobj import PySyncObjEngine
from smq.replication.raft.follower import Follower
from smq.replication.raft.journal import Changes, Snapshot
from smq.replication.raft.leader import Leader, Progress
from smq.replication.raft.messages import Append, AppendReply, SnapshotChunk, Vote
from smq.replication.raft.outbox import Outbox
from smq.replication.raft.ready import AppliedEntry, Needs
from smq.replication.raft.voters import Voters
from smq.replication.raft.writer import JournalWriter

Bug = Callable[[], AbstractContextManager[None]]
_Library = engine_pysyncobj._Library


def _replaced(owner: type, name: str, new: object) -> Bug:
    @contextmanager
    def bug() -> Iterator[None]:
        with patch.object(owner, name, new):
            yield

    return bug


def _nothing_is_waited_for(outbox: Outbox, needs: Needs) -> int:
    return 0


def _only_votes_are_waited_for(outbox: Outbox, needs: Needs) -> int:
    return outbox._vote_seq


def _own_last_index(lead: Leader) -> int:
    return lead._view.journal.last_index


def _count_older_terms(lead: Leader) -> None:
    lead._view.commit_to(lead.committable_index())


_on_append = Follower.on_append


def _truncate_behind_every_append(follower: Follower, peer: NodeId, m: Append) -> None:
    """As pysyncobj does (finding 3): whatever lies behind the message's last entry is dropped."""
    journal, view = follower._view.journal, follower._view
    end = m.prev_index + len(m.entries)
    if m.term == view.term and m.prev_index and max(end, view.commit_index) < journal.last_index:
        journal.truncate_from(max(end, view.commit_index) + 1)
    _on_append(follower, peer, m)


def _trust_the_tail(follower: Follower, index: int, term: int) -> bool:
    """As pysyncobj does (finding 4): a long log is taken for the leader's log."""
    return index <= follower._view.journal.last_index


def _any_checksum(snapshot: Snapshot) -> int:
    return 0


def _every_vote_counts(library: _Library, peer: NodeId, m: Vote) -> bool:
    return m.term == library.term


def _stand_at_once(core: Core) -> None:
    core._stand_for_election()


_on_reply = Leader.on_reply


def _rewind_on_success(lead: Leader, peer: NodeId, m: AppendReply) -> None:
    """As pysyncobj does (finding 3): what is underway behind the acknowledged entry is sent again."""
    _on_reply(lead, peer, m)
    if m.success and m.next_index > 1:
        lead._progress[peer].next_index = m.next_index


@contextmanager
def _truncating_pair() -> Iterator[None]:
    with (
        patch.object(Follower, "on_append", _truncate_behind_every_append),
        patch.object(Leader, "on_reply", _rewind_on_success),
    ):
        yield


def _forget_the_vote(core: Core) -> None:
    core.adopt_term(core.term)


_write = JournalWriter.write


def _write_an_install_in_two_submissions(writer: JournalWriter, changes: Changes) -> int:
    """The snapshot and the emptied journal first, then its first entry and the bounds."""
    emptied = [at for at, op in enumerate(changes.ops, 1) if isinstance(op, Delete) and op.stop > b"\xff" * 8]
    if emptied:
        writer._disk.submit(changes.ops[: emptied[0]])
        changes = replace(changes, ops=changes.ops[emptied[0] :])
    return _write(writer, changes)


def _every_disk_counts(voters: Voters, node: NodeId, disk: DiskId) -> bool:
    """A node is its number, whatever it has forgotten (rule 18)."""
    return True


def _every_disk_acknowledges(lead: Leader, peer: NodeId, progress: Progress) -> bool:
    """Only votes are looked at."""
    return True


def _every_message_is_answered(lead: Leader) -> float:
    """A leader answers reads because it believes that it leads (finding 12)."""
    return float("inf")


_settle = Applier._settle


def _apply_without_settling(applier: Applier, settled: list[AppliedEntry]) -> bool:
    with patch.object(applier._machine, "settle", lambda: True):
        return _settle(applier, settled)


def _drop_snapshot_chunks_silently(follower: Follower, peer: NodeId, m: SnapshotChunk) -> None:
    """The follower never installs anything."""


BUGS: Final[dict[str, Bug]] = {
    "no-barrier": _replaced(Outbox, "barrier_seq", _nothing_is_waited_for),
    "ack-before-durable": _replaced(Outbox, "barrier_seq", _only_votes_are_waited_for),
    "self-count-before-durable": _replaced(Leader, "own_durable_index", _own_last_index),
    "commit-older-terms": _replaced(Leader, "advance_commit", _count_older_terms),
    "truncate-without-conflict": _truncating_pair,
    "no-snapshot-clamp": _replaced(Follower, "_holds", _trust_the_tail),
    "duplicate-votes": _replaced(_Library, "_counts_vote", _every_vote_counts),
    "no-pre-vote": _replaced(Core, "_ask_for_election", _stand_at_once),
    "forgotten-vote": _replaced(Core, "_step_down", _forget_the_vote),
    "install-not-atomic": _replaced(JournalWriter, "write", _write_an_install_in_two_submissions),
    "vote-of-a-replaced-disk": _replaced(Voters, "counts", _every_disk_counts),
    "ack-of-a-replaced-disk": _replaced(Leader, "_counts", _every_disk_acknowledges),
    "unconfirmed-read": _replaced(Leader, "confirmed_by_majority", _every_message_is_answered),
    "next-entry-too-early": _replaced(Applier, "_settle", _apply_without_settling),
    "no-snapshots": _replaced(Follower, "on_chunk", _drop_snapshot_chunks_silently),
}

__all__ = ["BUGS", "PySyncObjEngine"]
