"""Random commands and replies: any value that fits its field, valid or not. Derived from `command_table`."""

from typing import Any

from hypothesis import strategies as st

from smq.raft_state.binary import INT16, INT32, INT64, Blob, Fixed, Flag, Group, Kind, Many, Number, Record, Text
from smq.raft_state.command_table import COMMANDS, REPLIES
from smq.raft_state.commands import Assignment, Command, HwmAdvance
from smq.raft_state.errors import ErrorCode
from smq.raft_state.fields import Code, HwmAdvances, ItemResults, OffsetRequests, PartitionLists
from smq.raft_state.limits import PARTITION_ID_BYTES, REQUEST_ID_BYTES, TOPIC_ID_BYTES
from smq.raft_state.replies import Reply

Any_ = st.SearchStrategy[Any]

_BITS = {INT16: 16, INT32: 32, INT64: 64}


def _integers(kind: Number) -> Any_:
    half = 1 << (_BITS[kind] - 1)
    return st.integers(-half, half - 1)


def _record(record: Record) -> Any_:
    fields = {name: strategy_of(kind) for name, kind in record.fields}
    return st.builds(record.cls, **fields) if fields else st.just(record.cls())


def _many(strategy: Any_) -> Any_:
    return st.lists(strategy, max_size=4).map(tuple)


_HWM_ADVANCE = Record(
    HwmAdvance,
    (
        ("partition", Fixed(PARTITION_ID_BYTES)),
        ("epoch", INT32),
        ("hwm", INT64),
        ("next_offset", INT64),
        ("ts_ns", INT64),
    ),
)
_ASSIGNMENT = Record(
    Assignment,
    (
        ("request_id", Fixed(REQUEST_ID_BYTES)),
        ("partition", Fixed(PARTITION_ID_BYTES)),
        ("count", INT64),
        ("not_before", INT64),
    ),
)


def strategy_of(kind: Kind) -> Any_:
    """Values that one kind of field can hold."""
    match kind:
        case Number():
            return _integers(kind)
        case Text():
            return st.text(max_size=20)
        case Flag():
            return st.booleans()
        case Fixed(size):
            return st.binary(min_size=size, max_size=size)
        case Blob():
            return st.binary(max_size=20)
        case Group(kinds):
            return st.tuples(*map(strategy_of, kinds))
        case Many(item):
            return _many(strategy_of(item))
        case Record():
            return _record(kind)
        case ItemResults(records):
            return _many(st.one_of(*map(_record, records.values())))
        case HwmAdvances():
            return _many(_record(_HWM_ADVANCE))
        case OffsetRequests():
            return _many(_record(_ASSIGNMENT))
        case PartitionLists():
            indexes = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple)
            return _many(st.tuples(st.binary(min_size=TOPIC_ID_BYTES, max_size=TOPIC_ID_BYTES), indexes))
        case Code():
            return st.sampled_from(ErrorCode)
    raise AssertionError(f"no random values for {kind}")


commands: st.SearchStrategy[Command] = st.one_of(*(_record(row.record) for row in COMMANDS))
replies: st.SearchStrategy[Reply] = st.one_of(*(_record(row.record) for row in REPLIES))
