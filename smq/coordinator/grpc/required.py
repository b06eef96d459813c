"""Fields of requests that must be set, because 0 would mean something: partition 0, offset 0, "not drained".

Owns that table and its check. A client of another language that forgets a field gets an error, and not a change of
partition 0. It must never know a default: a field with one is not here. Services import it.
"""

from collections.abc import Iterable
from typing import Final

from google.protobuf.message import Message

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.groups.member_requests import Identity
from smq.coordinator.service.start_positions import OffsetType
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Generation

_PRODUCER: Final = ("producer_id", "producer_epoch")
REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    "AddToTransactionRequest": _PRODUCER,
    "Advance": ("partition", "offset"),
    "Assignment": ("partition",),
    "CommitBatchRequest": ("batch_id",),
    "DeleteRecordsRequest": ("partition", "before_offset"),
    "EndTransactionRequest": (*_PRODUCER, "commit"),
    "Fingerprint": ("rows",),
    "FetchPartition": ("partition", "offset"),
    "GetPartitionRangeInfoRequest": ("partition",),
    "GroupMember": ("generation",),
    "ListOffsetsPartition": ("partition",),
    "PartitionOffset": ("partition", "offset"),
    "PublishRecordRequest": ("partition",),
    "SearchRecordsRequest": ("partition",),
    "SetNodeDrainedRequest": ("node", "drained"),
    "StageOffsetsRequest": _PRODUCER,
    "StagedTransaction": _PRODUCER,
    "SubscribeAck": ("next_offset",),
    "SubscribeInit": ("partition",),
    "SubscribeSeek": ("offset",),
    "TopicPartition": ("partition",),
}
_WITH_VALUE: Final = frozenset({OffsetType.EXACT_OFFSET, OffsetType.RESET_TO_OFFSET, OffsetType.EXACT_TS_NS})
_LISTS: Final = {
    "AddToTransactionRequest": "partitions",
    "CommitBatchRequest": "transactions",
    "FetchRequest": "partitions",
    "ListOffsetsRequest": "partitions",
    "CommitOffsetsRequest": "offsets",
    "DeleteOffsetsRequest": "partitions",
    "FetchOffsetsRequest": "partitions",
    "MeasureBacklogsRequest": "offsets",
    "StageOffsetsRequest": "offsets",
}


def check_required(message: Message) -> None:
    """INVALID_REQUEST, with the field's name, if the message or a part of its list lacks a required field."""
    kind = message.DESCRIPTOR.name
    check_fields(message, REQUIRED.get(kind, ()))
    for part in getattr(message, _LISTS[kind]) if kind in _LISTS else ():
        check_fields(part, REQUIRED.get(part.DESCRIPTOR.name, ()))


def check_offset_value(message: pb.ListOffsetsPartition | pb.SubscribeInit, kind: OffsetType) -> None:
    """INVALID_REQUEST if the offset type needs a value and has none."""
    if kind in _WITH_VALUE:
        check_fields(message, ("offset_value",))


def member_of(member: pb.GroupMember) -> tuple[Identity, Generation]:
    """Who sends a request, and the generation that it says it is in. INVALID_REQUEST if that is not said,
    or no generation's number."""
    check_fields(member, REQUIRED["GroupMember"])
    if member.generation < 0:
        raise SmqError(ErrorCode.INVALID_REQUEST, f"generation {member.generation} is not from JoinGroup")
    return Identity(member_id=member.member_id, instance_id=member.instance_id), Generation(member.generation)


def check_fields(message: Message, names: Iterable[str]) -> None:
    for name in names:
        if not message.HasField(name):
            kind = message.DESCRIPTOR.name
            raise SmqError(ErrorCode.INVALID_REQUEST, f"{kind} has no {name}: set it, even if it is zero or false")
