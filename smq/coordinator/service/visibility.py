"""Which batches of a fetch a reader of committed records returns: all but control batches and aborted ones.

Owns the decision for readers that leave it to the server, which are all but Kafka's. A batch belongs to one producer
and one transaction, so none has to be unpacked. It must never read a log. The gRPC services import it.
"""

from smq.records import CONTROL_MASK, TRANSACTIONAL_MASK, parse_header
from smq.replication.api import Fetched, StoredBatch

_ATTRIBUTES_AT = 22  # the low byte, which has the flags
_FLAGS = TRANSACTIONAL_MASK | CONTROL_MASK


def is_visible(fetched: Fetched, batch: StoredBatch) -> bool:
    """Whether the batch, one of those fetched for a committed reader, has records for it."""
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
