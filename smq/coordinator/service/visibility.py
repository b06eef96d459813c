"""Which batches of a fetch a reader gets, by its isolation: never control batches, and no aborted ones if it reads
what is committed.

Owns the decision for readers that leave it to the server, which are all but Kafka's, and the names of both ways to
read. A batch belongs to one producer and one transaction, so none has to be unpacked. It must never read a log. The
gRPC services import it.
"""

import enum

from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import CONTROL_MASK, TRANSACTIONAL_MASK, parse_header
from smq.replication.api import Fetched, StoredBatch

_ATTRIBUTES_AT = 22  # the low byte, which has the flags
_FLAGS = TRANSACTIONAL_MASK | CONTROL_MASK


class Isolation(enum.IntEnum):
    """The numbers are those of smq.v1.Isolation, and Kafka's the other way round."""

    READ_COMMITTED = 0
    READ_UNCOMMITTED = 1


def is_committed_reader(isolation: int) -> bool:
    """INVALID_REQUEST for a number that is not known here."""
    try:
        return Isolation(isolation) is Isolation.READ_COMMITTED
    except ValueError:
        names = ", ".join(f"{each.name} ({each.value})" for each in Isolation)
        raise SmqError(ErrorCode.INVALID_REQUEST, f"isolation is {isolation}: it must be one of {names}") from None


def is_visible(fetched: Fetched, batch: StoredBatch) -> bool:
    """Whether the batch has records for the reader it was fetched for. Only a fetch for a reader of what is committed
    knows of aborted transactions."""
    flags = batch.data[_ATTRIBUTES_AT] & _FLAGS
    if not flags:
        return True  # the hot path
    if flags & CONTROL_MASK:
        return False
    producer_id = parse_header(batch.data).producer_id
    return not any(
        aborted.producer_id == producer_id and aborted.first <= batch.base_offset < aborted.marker
        for aborted in fetched.aborted
    )
