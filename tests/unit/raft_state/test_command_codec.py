"""Commands and replies survive their bytes; anything else is a CodecError and nothing worse."""

import contextlib
import dataclasses
import inspect
import pickle
import sys
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state.command_codec import (
    FEATURE_LEVEL,
    CodecError,
    UpgradeNeeded,
    decode_command,
    decode_reply,
    encode_command,
    encode_reply,
)
from smq.raft_state.command_table import COMMANDS, REPLIES, Row
from smq.raft_state.commands import (
    UNKNOWN_AGE,
    AdvanceHwms,
    AllocateProducerId,
    Barrier,
    Command,
    DeleteTopic,
    HwmAdvance,
    Request,
)
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import Epoch, Offset, PartitionId, ProducerEpoch, TsNs
from smq.raft_state.limits import ITEMS_MAX, TEXT_BYTES_MAX
from smq.raft_state.replies import Done, HwmsAdvanced, Rejected, Reply
from tests.unit.raft_state import strategies
from tests.unit.raft_state.life import bytes_of, transcript
from tests.unit.raft_state.support import advance, advances, aged, commit, pid, rid


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
    """Never another exception; and accepted bytes are the only encoding of their value."""
    try:
        command = decode_command(data)
    except CodecError:
        return
    assert encode_command(command) == data


@given(st.binary(max_size=200))
def test_random_bytes_are_a_command_or_a_codec_error(data: bytes) -> None:
    _decodes_or_refuses(data)


@given(st.sampled_from(sorted(row.tag for row in COMMANDS)), st.binary(max_size=200))
def test_random_bytes_after_a_valid_header_are_a_command_or_a_codec_error(tag: int, data: bytes) -> None:
    _decodes_or_refuses(bytes((FEATURE_LEVEL, tag)) + data)


@given(strategies.commands, st.data())
def test_command_with_one_byte_changed_is_a_command_or_a_codec_error(command: Command, data: st.DataObject) -> None:
    encoded = bytearray(encode_command(command))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] = data.draw(st.integers(0, 255))
    _decodes_or_refuses(bytes(encoded))


@given(st.sampled_from(sorted(row.tag for row in REPLIES)), st.binary(max_size=100))
def test_random_bytes_after_a_reply_tag_are_a_reply_or_a_codec_error(tag: int, data: bytes) -> None:
    with contextlib.suppress(CodecError):
        decode_reply(bytes((1, tag)) + data)


@pytest.mark.parametrize("level", [FEATURE_LEVEL + 1, 255])
def test_what_a_newer_smq_wrote_says_that_an_upgrade_is_needed(level: int) -> None:
    with pytest.raises(UpgradeNeeded, match=rf"command of feature level {level}; .*up to 1: run a newer smq") as e:
        decode_command(bytes((level,)) + encode_command(Barrier())[1:])
    assert e.value.level == level
    with pytest.raises(UpgradeNeeded, match=rf"reply of feature level {level}; .*up to 1: run a newer smq"):
        decode_reply(bytes((level,)) + encode_reply(Done())[1:])


def test_there_is_no_level_below_1() -> None:
    with pytest.raises(CodecError, match="there is none below 1") as e:
        decode_command(b"\0" + encode_command(Barrier())[1:])
    assert not isinstance(e.value, UpgradeNeeded)


def test_an_unknown_tag_was_written_by_a_newer_smq() -> None:
    with pytest.raises(UpgradeNeeded, match="unknown tag 200"):
        decode_command(bytes((FEATURE_LEVEL, 200)))


@pytest.mark.parametrize("replies_before", [UNKNOWN_AGE, 0, 1, 2**63 - 1])
def test_the_age_of_a_request_goes_with_its_command(replies_before: int) -> None:
    command = aged(replies_before, DeleteTopic(name="t", request_id=rid(1)))
    decoded = decode_command(encode_command(command))
    assert decoded == command
    assert isinstance(decoded, Request)
    assert decoded.replies_before == replies_before


def test_every_command_with_a_request_id_of_its_own_has_an_age() -> None:
    for row in COMMANDS:
        names = [name for name, _ in row.record.fields]
        assert issubclass(row.record.cls, Request) == ("request_id" in names)
        assert (names[:3] == ["request_id", "is_from_node", "replies_before"]) == ("request_id" in names)


def test_pickle_is_refused() -> None:
    with pytest.raises(CodecError):
        decode_command(pickle.dumps(Barrier()))


def test_false_count_is_refused_before_anything_is_allocated() -> None:
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
        replace(commit("g"), items=(None,)),  # type: ignore[arg-type]  # as above
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
    """The subclasses of `base` that have no subclasses themselves."""
    found: set[type] = set()
    below: list[type] = base.__subclasses__()
    for cls in below:
        if getattr(sys.modules[cls.__module__], cls.__name__) is cls and not cls.__module__.startswith(
            "chaos_tests."
        ):  # a slotted dataclass is made twice: the first one stays registered
            found |= leaves(cls) or {cls}
    return found


@pytest.mark.parametrize(("rows", "base"), [(COMMANDS, Command), (REPLIES, Reply)], ids=["commands", "replies"])
def test_every_class_has_one_row_with_a_tag_and_all_its_fields(rows: tuple[Row, ...], base: type) -> None:
    assert {row.record.cls for row in rows} == leaves(base)
    assert len({row.tag for row in rows}) == len(rows) == len(leaves(base))
    for row in rows:
        assert [name for name, _ in row.record.fields] == [field.name for field in dataclasses.fields(row.record.cls)]


def test_every_handler_takes_the_command_of_its_row() -> None:
    for row in COMMANDS:
        _, command = inspect.signature(row.handler, eval_str=True).parameters.values()
        assert row.record.cls in (get_args(command.annotation) or (command.annotation,))


@pytest.mark.parametrize(("rows", "base"), [(COMMANDS, Command), (REPLIES, Reply)], ids=["commands", "replies"])
def test_the_transcript_has_the_bytes_of_every_class_in_the_order_of_the_tags(
    rows: tuple[Row, ...], base: type
) -> None:
    """`test_transcripts` compares the bytes."""
    encoded = [data for value, data in bytes_of(transcript("level_1")) if isinstance(value, base)]
    assert list(dict.fromkeys((data[0], data[1]) for data in encoded)) == sorted((row.since, row.tag) for row in rows)


def test_hwm_advance_costs_48_bytes() -> None:
    one = HwmAdvance(partition=pid(1), epoch=Epoch(1), hwm=Offset(2), next_offset=Offset(3), ts_ns=TsNs(4))
    assert len(encode_command(advances(one, one))) - len(encode_command(advances(one))) == 48


def test_rule_28_the_tag_of_the_retired_command_is_given_to_no_other() -> None:
    assert 32 not in {row.tag for row in COMMANDS}
    with pytest.raises(CodecError, match="unknown tag 32"):
        decode_command(b"\x01\x20" + bytes(45))
