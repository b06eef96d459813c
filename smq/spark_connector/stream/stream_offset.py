"""A stream's position as Spark stores it: one JSON text, always written the same way.

Owns the format of the checkpoint. Spark compares positions as text, so keys are sorted, and a position that has not
moved must be returned unchanged. Does no I/O.

`{"fresh":true,"ids":{"t":"5f.."},"o":{"t":{"0":40}},"v":1}` is the start of a new query. Spark asks for it again when
it replays the first micro-batch, and "latest" may have moved by then. Therefore the next position repeats the start:
`{"from":{"t":{"0":40}},"ids":{..},"o":{"t":{"0":120}},"v":1}`. "from" also holds the start of partitions that are new
or have lost their first records; "o" is the next offset of each partition; "ids" are the topics' ids, which reveal a
topic that was deleted and created again.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from smq.spark_connector.errors import CheckpointError
from smq.spark_connector.read_bounds import PartitionKey

VERSION: Final = 1
_DIGITS: Final = re.compile("[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOffset:
    """`next_offsets` by partition; `starts` only if they differ from the previous position."""

    next_offsets: Mapping[PartitionKey, int]
    topic_ids: Mapping[str, str]
    starts: Mapping[PartitionKey, int] = field(default_factory=dict)
    is_fresh: bool = False

    def to_json(self) -> dict[str, Any]:
        """Keys in the order in which they are to be written."""
        topics = {topic for topic, _ in self.next_offsets}
        out: dict[str, Any] = {}
        if self.is_fresh:
            out["fresh"] = True
        if self.starts:
            out["from"] = _nested(self.starts)
        out["ids"] = {topic: id_ for topic, id_ in sorted(self.topic_ids.items()) if topic in topics}
        out["o"] = _nested(self.next_offsets)
        out["v"] = VERSION
        return out

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> "StreamOffset":
        """CheckpointError for JSON that no known version of smq has written."""
        if value.get("v") != VERSION:
            raise CheckpointError(f"the position {str(value)[:200]} is not of version {VERSION} of format('smq')")
        try:
            return cls(
                next_offsets=_flat(value["o"]),
                topic_ids={str(topic): str(id_) for topic, id_ in value["ids"].items()},
                starts=_flat(value.get("from", {})),
                is_fresh=value.get("fresh") is True,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"the position {str(value)[:200]} is damaged ({e!r})") from e


def _nested(offsets: Mapping[PartitionKey, int]) -> dict[str, dict[str, int]]:
    out: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        out.setdefault(topic, {})[str(partition)] = offset
    return out


def _flat(nested: Mapping[str, Mapping[str, int]]) -> dict[PartitionKey, int]:
    flat: dict[PartitionKey, int] = {}
    for topic, offsets in nested.items():
        for partition, offset in offsets.items():
            if not _DIGITS.fullmatch(partition) or type(offset) is not int or offset < 0:
                raise ValueError(f"{topic}-{partition}: {offset!r}")
            flat[topic, int(partition)] = offset
    return flat
