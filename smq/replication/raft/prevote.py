"""Pre-vote: a node asks whether it would be elected before it raises the term (docs/rules.md, finding 13).

Owns one round of questions. Without it a follower that was paused or cut off deposes a healthy leader with its
higher term. Nothing here changes term or vote, so nothing here needs the disk. Only the core imports it.
"""

from smq.raft_state.ids import NodeId
from smq.replication.raft.messages import PreVote, PreVoteGranted, TermNotice
from smq.replication.raft.view import RaftView


class PreVoting:
    def __init__(self, view: RaftView) -> None:
        self._view = view
        self._granted: set[NodeId] = set()
        self._term = 0  # the term that the round is about; 0: there is no round

    def begin(self) -> None:
        journal, voters = self._view.journal, self._view.voters
        self._granted = set()
        self._term = self._view.term + 1
        question = PreVote(
            term=self._term,
            last_index=journal.last_index,
            last_term=journal.last_term,
            disk=voters.own_disk,
            is_admitted=voters.is_admitted,
        )
        for peer in self._view.peers:
            self._view.send(peer, question)

    def cancel(self) -> None:
        self._term = 0

    def would_vote(self, peer: NodeId, m: PreVote, heard_at: float) -> bool:
        """The answer to another node. Also False while a leader is heard, or if this node leads."""
        view, journal = self._view, self._view.journal
        if m.term <= view.term:
            view.send(peer, TermNotice(term=view.term))
            return False
        if view.is_leader or view.now() < heard_at + view.timing.election_timeout_min_ms / 1000:
            return False
        if not view.voters.may_be_elected(peer, m.disk, is_admitted=m.is_admitted):
            return False
        return (m.last_term, m.last_index) >= (journal.last_term, journal.last_index)

    def on_granted(self, peer: NodeId, m: PreVoteGranted) -> bool:
        """True if this makes a majority, which ends the round."""
        if not self._term or m.term != self._term or self._term != self._view.term + 1:
            return False
        if not self._view.voters.counts(peer, m.disk):
            return False
        self._granted.add(peer)
        if len(self._granted) + 1 <= (len(self._view.peers) + 1) // 2:
            return False
        self.cancel()
        return True
