"""Commands and replies survive their bytes; anything else is a CodecError and nothing worse."""

import contextlib
import dataclasses
import inspect
import pickle
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state import codec, commands
from smq.raft_state.codec import (
    CodecError,
    decode_command,
    decode_proposal,
    decode_reply,
    encode_command,
    encode_reply,
    is_boundable,
)
from smq.raft_state.commands import (
    AddPartitions,
    AdvanceHwms,
    AdvanceLogStart,
    AllocateProducerId,
    AlterTopicConfig,
    AssignMembers,
    AssignOffsets,
    Barrier,
    Command,
    CommitCoordinatedOffsets,
    CommitMemberOffsets,
    CommitOffsets,
    CreateTopic,
    DeleteGroup,
    DeleteOffsets,
    DeleteTopic,
    ElectLeader,
    ExpireOffsets,
    FenceNode,
    FormGeneration,
    GenerationFormed,
    HwmAdvance,
    HwmsAdvanced,
    InitCluster,
    RegisterNode,
    Rejected,
    RemoveMembers,
    ReplaceMember,
    Reply,
    Request,
    SetOffsetsRetention,
    UnfenceNode,
)
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import Epoch, Offset, PartitionId, ProducerEpoch, TsNs
from smq.raft_state.limits import ITEMS_MAX, TEXT_BYTES_MAX
from smq.raft_state.registry import COMMANDS, REPLIES, CommandRow, ReplyRow
from tests.unit.raft_state import strategies
from tests.unit.raft_state.support import advance, advances, pid, register, rid


@given(strategies.commands)
def test_command_survives_its_bytes(command: Command) -> None:
    data = encode_command(command)
    assert decode_command(data) == command
    assert decode_command(memoryview(bytearray(data))) == command


@given(strategies.replies)
def test_reply_survives_its_bytes(reply: Reply) -> None:
    assert decode_reply(encode_reply(reply)) == reply


@given(strategies.commands, st.data())
def test_command_cut_anywhere_is_a_codec_error(command: Command, data: st.DataObject) -> None:
    encoded = encode_command(command)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(CodecError):
        decode_command(encoded[:cut])


@given(strategies.commands, st.binary(min_size=1, max_size=5))
def test_bytes_after_a_command_are_a_codec_error(command: Command, rest: bytes) -> None:
    with pytest.raises(CodecError, match="left over"):
        decode_command(encode_command(command) + rest)


def _decodes_or_refuses(data: bytes) -> None:
    """Never another exception; and what is taken is the only encoding of its value."""
    try:
        command, not_before = decode_proposal(data)
    except CodecError:
        return
    assert encode_command(command, not_before) == data


@given(st.binary(max_size=200))
def test_random_bytes_are_a_command_or_a_codec_error(data: bytes) -> None:
    _decodes_or_refuses(data)


@given(st.integers(1, codec.VERSION), st.sampled_from(sorted(row.tag for row in COMMANDS)), st.binary(max_size=200))
def test_random_bytes_behind_a_true_head_are_a_command_or_a_codec_error(version: int, tag: int, data: bytes) -> None:
    _decodes_or_refuses(bytes((version, tag)) + data)


@given(strategies.commands, st.data())
def test_command_with_one_byte_changed_is_a_command_or_a_codec_error(command: Command, data: st.DataObject) -> None:
    encoded = bytearray(encode_command(command))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] = data.draw(st.integers(0, 255))
    _decodes_or_refuses(bytes(encoded))


@given(st.sampled_from(sorted(row.tag for row in REPLIES)), st.binary(max_size=100))
def test_random_bytes_behind_a_reply_tag_are_a_reply_or_a_codec_error(tag: int, data: bytes) -> None:
    with contextlib.suppress(CodecError):
        decode_reply(bytes((1, tag)) + data)


def test_other_version_is_refused_with_advice() -> None:
    with pytest.raises(CodecError, match=r"codec version 4.*upgrade"):
        decode_command(b"\x04" + encode_command(Barrier())[1:])


def test_unknown_tag_is_refused() -> None:
    with pytest.raises(CodecError, match="unknown tag 200"):
        decode_command(bytes((1, 200)))


@pytest.mark.parametrize("not_before", [0, 1, 2**63 - 1])
def test_the_age_of_a_request_goes_with_its_command(not_before: int) -> None:
    command = DeleteTopic(name="t", request_id=rid(1))
    encoded = encode_command(command, not_before)
    assert encoded[0] == 3
    assert decode_proposal(encoded) == (command, not_before)
    assert decode_proposal(encode_command(command)) == (command, None)
    with pytest.raises(CodecError, match="cut short"):
        decode_proposal(encoded[:9])


def test_only_a_command_with_a_request_id_has_an_age() -> None:
    """AssignOffsets has one of its own for each of its items."""
    assert is_boundable(DeleteTopic(name="t"))
    for command in (Barrier(), register(1, rack="a"), AssignOffsets(items=())):
        assert not is_boundable(command)
        with pytest.raises(CodecError, match="no tag in codec version 3"):
            encode_command(command, 1)
        with pytest.raises(CodecError, match="unknown tag"):
            decode_command(b"\x03" + encode_command(command)[1:])


def test_every_command_with_a_request_id_of_its_own_has_an_age() -> None:
    for row in COMMANDS:
        names = [name for name, _ in row.record.fields]
        assert ("request_id" in names) == (names[:1] == ["request_id"]) == issubclass(row.record.cls, Request)


def test_version_2_is_a_registration_with_a_rack_and_nothing_else() -> None:
    """Whoever names no rack is understood by an older smq: nothing of his is of version 2."""
    named, nameless = register(1, rack="a"), register(1)
    assert encode_command(named)[0] == 2
    assert encode_command(nameless)[0] == 1
    assert decode_command(encode_command(named)) == named
    with pytest.raises(CodecError, match="without a rack is of codec version 1"):
        decode_command(b"\x02" + encode_command(nameless)[1:] + b"\0\0")
    with pytest.raises(CodecError, match="left over"):
        decode_command(b"\x01" + encode_command(named)[1:])
    with pytest.raises(CodecError, match="unknown tag"):
        decode_command(b"\x02" + encode_command(Barrier())[1:])
    with pytest.raises(CodecError, match="reply of codec version 2"):
        decode_reply(b"\x02" + encode_reply(HwmsAdvanced(accepted=()))[1:])


def test_pickle_is_refused() -> None:
    with pytest.raises(CodecError):
        decode_command(pickle.dumps(Barrier()))


def test_lying_count_is_refused_before_anything_is_allocated() -> None:
    data = encode_command(AdvanceHwms(items=()))[:2]
    with pytest.raises(CodecError, match="cut short"):
        decode_command(data + ITEMS_MAX.to_bytes(4, "big"))
    with pytest.raises(CodecError, match="at most"):
        decode_command(data + (ITEMS_MAX + 1).to_bytes(4, "big"))


@pytest.mark.parametrize(
    "command",
    [
        DeleteTopic(name="x" * (TEXT_BYTES_MAX + 1)),
        DeleteTopic(name="\ud800"),
        DeleteTopic(name=b"bytes"),  # type: ignore[arg-type]  # what a careless caller may pass
        AllocateProducerId(producer_epoch=ProducerEpoch(2**15)),
        advances(advance(pid(1), 0, hwm=2**63)),
        advances(advance(PartitionId(b"short"), 0, hwm=1)),
        CommitOffsets(group="g", items=(None,), committed_ms=1),  # type: ignore[arg-type]  # as above
    ],
)
def test_value_that_does_not_fit_its_field_is_a_codec_error_when_encoded(command: Command) -> None:
    with pytest.raises(CodecError, match="does not encode"):
        encode_command(command)


def test_unknown_error_number_reads_as_internal() -> None:
    """A newer node's rejection is still a rejection, and INTERNAL claims nothing definite."""
    data = bytearray(encode_reply(Rejected(code=ErrorCode.TIMED_OUT, message="m")))
    data[2:4] = b"\xff\xff"
    reply = decode_reply(data)
    assert isinstance(reply, Rejected)
    assert reply.code is ErrorCode.INTERNAL


def test_flag_other_than_0_and_1_is_refused() -> None:
    data = encode_reply(HwmsAdvanced(accepted=(True,)))
    with pytest.raises(CodecError, match="a flag is 0 or 1"):
        decode_reply(data[:-1] + b"\x02")


def leaves(base: type) -> set[type]:
    """The classes below `base` that have none below themselves."""
    found: set[type] = set()
    below: list[type] = base.__subclasses__()
    for cls in below:
        if getattr(commands, cls.__name__) is cls:  # a slotted dataclass is made twice: the first one stays registered
            found |= leaves(cls) or {cls}
    return found


@pytest.mark.parametrize(("rows", "base"), [(COMMANDS, Command), (REPLIES, Reply)], ids=["commands", "replies"])
def test_every_class_has_one_row_with_a_tag_and_all_its_fields(
    rows: tuple[CommandRow | ReplyRow, ...], base: type
) -> None:
    assert {row.record.cls for row in rows} == leaves(base)
    assert len({row.tag for row in rows}) == len(rows) == len(leaves(base))
    for row in rows:
        assert [name for name, _ in row.record.fields] == [field.name for field in dataclasses.fields(row.record.cls)]


def test_every_handler_takes_the_command_of_its_row() -> None:
    for row in COMMANDS:
        _, command = inspect.signature(row.handler, eval_str=True).parameters.values()
        assert row.record.cls in (get_args(command.annotation) or (command.annotation,))


# For ever: a tag that moves here makes old logs unreadable.
_GROUP_TAGS = {
    20: CommitMemberOffsets,
    21: FormGeneration,
    22: AssignMembers,
    23: RemoveMembers,
    24: ReplaceMember,
    25: DeleteGroup,
    26: DeleteOffsets,
    27: ExpireOffsets,
    28: SetOffsetsRetention,
    29: CommitCoordinatedOffsets,
}
_TAGS = [
    InitCluster,
    RegisterNode,
    FenceNode,
    UnfenceNode,
    CreateTopic,
    DeleteTopic,
    AddPartitions,
    AlterTopicConfig,
    ElectLeader,
    AdvanceHwms,
    AdvanceLogStart,
    AllocateProducerId,
    CommitOffsets,
    Barrier,
]


def test_tags_are_never_renumbered() -> None:
    cls_of = {row.tag: row.record.cls for row in COMMANDS}
    assert [cls_of[tag] for tag in range(1, len(_TAGS) + 1)] == _TAGS
    assert {tag: cls_of[tag] for tag in _GROUP_TAGS} == _GROUP_TAGS
    assert GenerationFormed in [row.record.cls for row in REPLIES if row.tag == 20]


def test_hwm_advance_costs_48_bytes() -> None:
    one = HwmAdvance(partition=pid(1), epoch=Epoch(1), hwm=Offset(2), next_offset=Offset(3), ts_ns=TsNs(4))
    assert len(encode_command(advances(one, one))) - len(encode_command(advances(one))) == 48
