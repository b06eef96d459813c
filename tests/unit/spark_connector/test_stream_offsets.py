"""A stream's position as text: canonical, exact, and refused if it is not ours."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.spark_connector.errors import CheckpointError
from smq.spark_connector.stream.stream_offset import StreamOffset

KEYS = st.tuples(st.sampled_from(["a", "b", "ü.topic"]), st.integers(0, 12))
OFFSETS = st.dictionaries(KEYS, st.integers(0, 2**63 - 1), max_size=6)


def text(offset: StreamOffset) -> str:
    return json.dumps(offset.to_json())


def test_format_is_the_documented_one() -> None:
    fresh = StreamOffset(next_offsets={("t", 0): 40}, topic_ids={"t": "5f"}, is_fresh=True)
    assert text(fresh) == '{"fresh": true, "ids": {"t": "5f"}, "o": {"t": {"0": 40}}, "v": 1}'
    first = StreamOffset(next_offsets={("t", 0): 120}, topic_ids={"t": "5f"}, starts={("t", 0): 40})
    assert text(first) == '{"from": {"t": {"0": 40}}, "ids": {"t": "5f"}, "o": {"t": {"0": 120}}, "v": 1}'


@given(OFFSETS, OFFSETS, st.booleans(), st.randoms())
def test_trap_equal_positions_are_equal_texts_whatever_order_they_were_made_in(
    ends: dict[tuple[str, int], int], starts: dict[tuple[str, int], int], is_fresh: bool, random: object
) -> None:
    """Trap: Spark compares positions as JSON text; keys in another order ran endless empty micro-batches."""
    ids = {"a": "1", "b": "2", "ü.topic": "3"}
    offset = StreamOffset(next_offsets=ends, topic_ids=ids, starts=starts, is_fresh=is_fresh)
    shuffled = StreamOffset(
        next_offsets=dict(reversed(ends.items())),
        topic_ids=dict(reversed(ids.items())),
        starts=dict(reversed(starts.items())),
        is_fresh=is_fresh,
    )
    assert text(offset) == text(shuffled)
    again = StreamOffset.of_json(json.loads(text(offset)))
    assert text(again) == text(offset)
    assert (dict(again.next_offsets), dict(again.starts), again.is_fresh) == (ends, starts, is_fresh)


@pytest.mark.parametrize(
    "given_",
    [
        {"t": {"0": 7}},  # the Kafka connector's
        {"v": 2, "o": {}, "ids": {}},
        {"v": 1, "ids": {}},
        {"v": 1, "o": {"t": {"0": "7"}}, "ids": {}},
        {"v": 1, "o": {"t": {"0": True}}, "ids": {}},
        {"v": 1, "o": {"t": {"0": -1}}, "ids": {}},
        {"v": 1, "o": {"t": {"x": 1}}, "ids": {}},
        {"v": 1, "o": [1], "ids": {}},
    ],
)
def test_foreign_position_is_refused_with_advice(given_: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="start with a new checkpointLocation"):
        StreamOffset.of_json(given_)
