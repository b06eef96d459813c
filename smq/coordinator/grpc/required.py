"""Fields of requests that must be set, because 0 would mean something: partition 0, offset 0, "not drained".

Owns the check, and the table of exceptions: a number or flag that is `optional` in the .proto file must be set, unless
it is named here. A client of another language that forgets one gets an error, and not a change of partition 0. It must
never know a default: a field with one is not `optional`. Services import it.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.groups.member_requests import Identity
from smq.coordinator.service.start_positions import OffsetType
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Generation

# The others that are `optional` in the .proto file: an absent one means something of its own.
_MAY_BE_ABSENT: Final[dict[str, tuple[str, ...]]] = {
    "AbortTransactionRequest": ("producer_id", "producer_epoch"),
    "Assignment": ("not_before",),
    "ListOffsetsPartition": ("offset_value", "timestamp_ms", "max_bytes"),
    "NewRecord": ("timestamp_ms",),
    "PublishRecordRequest": ("base_sequence",),
    "RecordFilter": ("from_ms", "until_ms"),
    "SearchRecordsRequest": ("offset", "end_offset"),
    "StartProducerRequest": ("producer_id", "producer_epoch"),
    "StartPublishSessionRequest": ("producer_id", "producer_epoch"),
    "SubscribeInit": ("offset_value",),
}


def requests() -> Iterator[Descriptor]:
    """Every message that a client sends, and what such messages consist of."""
    seen: dict[str, Descriptor] = {}
    waiting = [m.input_type for s in pb.DESCRIPTOR.services_by_name.values() for m in s.methods]
    while waiting:
        kind = waiting.pop()
        if kind.name not in seen:
            seen[kind.name] = kind
            waiting += [f.message_type for f in kind.fields if f.message_type is not None]
    yield from (kind for name, kind in seen.items() if not name.endswith("Entry"))


def is_number(field: FieldDescriptor) -> bool:
    """Or a flag."""
    return field.cpp_type not in (field.CPPTYPE_STRING, field.CPPTYPE_MESSAGE)


def _required_of(kind: Descriptor) -> tuple[str, ...]:
    optional = (field.name for field in kind.fields if field.has_presence and is_number(field))
    return tuple(name for name in optional if name not in _MAY_BE_ABSENT.get(kind.name, ()))


REQUIRED: Final = {kind.name: required for kind in requests() if (required := _required_of(kind))}
_WITH_VALUE: Final = frozenset({OffsetType.EXACT_OFFSET, OffsetType.RESET_TO_OFFSET, OffsetType.EXACT_TS_NS})
_LISTS: Final = {
    "AddToTransactionRequest": "partitions",
    "AlterQuotasRequest": "quotas",
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
