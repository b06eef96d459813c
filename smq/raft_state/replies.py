"""The replies of the replicated state machine.

Owns their shapes only; `command_table` lists their bytes. Replies are cached and replicated, so they hold nothing that
differs between nodes. It must never do I/O. Any module on the node may import it.
"""

from dataclasses import dataclass, field

from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import Epoch, Generation, Offset, PartitionId, ProducerEpoch, ProducerId, TopicId


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The outcome of one command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Reply):
    """The command took effect and returns nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected(Reply):
    """The command changed nothing. `lo`/`hi` are -1 if they do not apply."""

    code: ErrorCode
    message: str
    lo: Offset = Offset(-1)
    hi: Offset = Offset(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicCreated(Reply):
    topic_id: TopicId


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderElected(Reply):
    epoch: Epoch
    start: Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class HwmsAdvanced(Reply):
    accepted: tuple[bool, ...]  # one per item; False if the epoch has moved on


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerIdAllocated(Reply):
    producer_id: ProducerId
    producer_epoch: ProducerEpoch


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetsAssigned(Reply):
    """[base, last] belong to the caller alone, forever."""

    base: Offset
    last: Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalHwm(Reply):
    hwm: Offset  # the current mark, which may be above the requested one


@dataclass(frozen=True, slots=True, kw_only=True)
class Results(Reply):
    """One reply per item of a command that carries the requests of several callers."""

    items: tuple[Done | OffsetsAssigned | ExternalHwm | Rejected, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFormed(Reply):
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCommitted(Reply):
    is_replay: bool  # an earlier entry has committed this batch, or a later one: what was staged for it is dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The result of one apply: the reply, and the partitions that may have changed (created and deleted ones too)."""

    reply: Reply
    touched: tuple[PartitionId, ...] = field(default=())
