"""The replicated state machine: `apply` is the only way in.

Owns the dispatch of commands, the memory of replies by request id, and the rule that nothing happens before
InitCluster. A pure function of the commands: no clock, randomness, I/O, logging, floats or hash order here or in
the handlers. A bad request is answered Rejected; a broken invariant raises InvariantBroken, and the process ends.
The node applies and reads; no other module changes the state.
"""

from collections.abc import Iterator
from hashlib import sha256

from smq.raft_state.command_codec import FEATURE_LEVEL, UpgradeNeeded, decode_reply, encode_reply
from smq.raft_state.command_table import ROW_OF, cache_of
from smq.raft_state.commands import Command, Coordinated, Request
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers.fencing import FENCED, check_fence, count_change
from smq.raft_state.ids import NO_REQUEST, LogIndex, RequestId
from smq.raft_state.invariants import InvariantBroken, check_steps
from smq.raft_state.limits import REQUEST_ID_BYTES
from smq.raft_state.refusal import Refused
from smq.raft_state.replies import Applied, Rejected, Reply
from smq.raft_state.snapshot import (
    Buffer,
    Steps,
    decode_steps,
    encode_state,
    run_through,
    state_pieces,
)
from smq.raft_state.state import ClusterState, ReplyCache

__all__ = ["InvariantBroken", "Machine"]


class Machine:
    """One node's copy of the replicated state."""

    __slots__ = ("_applied_index", "_known_level", "state")

    def __init__(self, state: ClusterState | None = None, known_level: int = FEATURE_LEVEL) -> None:
        """`known_level`: the highest feature level that the node knows."""
        self.state = state if state is not None else ClusterState()
        self._known_level = known_level
        self._applied_index = LogIndex(-1)  # a guard only, not part of the state

    def apply(self, index: LogIndex, command: Command) -> Applied:
        """Applies the committed command at `index`. Indexes ascend (gaps are fine): InvariantBroken otherwise.
        UpgradeNeeded if the cluster's level passes the known one: then nothing more may be applied here."""
        if index <= self._applied_index:
            raise InvariantBroken(f"index {index} is applied after {self._applied_index}")
        self._applied_index = index
        if isinstance(command, Request) and command.request_id != NO_REQUEST:
            return self._run_once(command)
        applied = self._run(command)
        if self.state.feature_level > self._known_level:
            level = self.state.feature_level
            raise UpgradeNeeded(f"the cluster is at feature level {level}", level=level, known=self._known_level)
        return applied

    def snapshot(self) -> bytes:
        """The whole state as bytes; equal states have equal bytes."""
        return encode_state(self.state)

    def snapshot_pieces(self) -> Iterator[bytes]:
        """The same bytes in pieces, one millisecond of work each. Nothing may be applied before the last piece."""
        return state_pieces(self.state)

    @classmethod
    def restore(cls, snapshot: Buffer) -> "Machine":
        """A machine in the state of a snapshot. CodecError or InvariantBroken if the snapshot is not valid."""
        return run_through(cls.restoring(snapshot, FEATURE_LEVEL))

    @classmethod
    def restoring(cls, snapshot: Buffer, known_level: int) -> "Steps[Machine]":
        """As `restore`, with one millisecond of work between two yields. UpgradeNeeded above the known level."""
        state = yield from decode_steps(snapshot, known_level)
        yield from check_steps(state)
        return cls(state, known_level)

    def digest(self) -> str:
        """SHA-256 of the snapshot, in hex: the same on all nodes that have applied the same index."""
        return sha256(self.snapshot()).hexdigest()

    def _run_once(self, command: Request) -> Applied:
        """A known request id gets its first reply again, a rejection too, and nothing changes. An unknown one is new if
        every reply since the request was accepted is still known. Otherwise it may have run already, and it is refused
        rather than run twice: a node that was cut off may repeat a deletion after the topic was created again."""
        request_id, before, cache = command.request_id, command.replies_before, cache_of(self.state, command)
        if len(request_id) != REQUEST_ID_BYTES:
            message = f"request_id must have {REQUEST_ID_BYTES} bytes or none, not {len(request_id)}"
            return Applied(reply=Rejected(code=ErrorCode.INVALID_REQUEST, message=message))
        if not self.state.cluster_id:
            return self._run(command)
        known = cache.replies.get(request_id)
        if known is not None:
            return Applied(reply=decode_reply(known, self._known_level))
        if before >= 0 and cache.counted - before > self.state.replies_max:
            message = "too many requests came after this one to know whether it has taken effect"
            return Applied(reply=Rejected(code=ErrorCode.REQUEST_EXPIRED, message=message))
        applied = self._run(command)
        if not (isinstance(applied.reply, Rejected) and applied.reply.code is FENCED):
            # The fence refuses a coordinator's command, not the caller's request: another attempt may still run it.
            self._remember(cache, request_id, applied.reply)
        return applied

    def _run(self, command: Command) -> Applied:
        row = ROW_OF.get(type(command))
        if row is None:
            raise InvariantBroken(f"no handler for {type(command).__name__}")
        if not self.state.cluster_id and not row.is_before_init:
            message = "the cluster has not been initialised"
            return Applied(reply=Rejected(code=ErrorCode.NODE_NOT_READY, message=message))
        try:
            if not isinstance(command, Coordinated):
                return row.handler(self.state, command)
            check_fence(self.state, command)
            applied = row.handler(self.state, command)
        except Refused as refused:
            return Applied(reply=refused.rejected)
        count_change(self.state, command)
        return applied

    def _remember(self, cache: ReplyCache, request_id: RequestId, reply: Reply) -> None:
        replies = cache.replies
        replies[request_id] = encode_reply(reply, self.state.feature_level)
        cache.counted += 1
        while len(replies) > self.state.replies_max:
            del replies[next(iter(replies))]
