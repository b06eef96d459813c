"""The file that keeps the committed offsets of a group, as `smq group export` writes it.

Owns its format. `cli.groups.offsets` imports it.
"""

import json
from typing import Any, Final

from smq.clients.types import CommittedOffset, GroupDescription, TopicPartition
from smq.coordinator.user_errors import UserError

FILE_BYTES_MAX: Final = 64 << 20  # half a million offsets with their metadata
EXAMPLE: Final = '{"group": "g", "offsets": [{"topic": "t", "partition": 0, "offset": 7, "metadata": ""}]}'


def file_text(found: GroupDescription) -> str:
    """The committed offsets as one JSON document."""
    offsets = [
        {"topic": p.topic, "partition": p.partition, "offset": p.offset, "metadata": p.metadata}
        for p in found.positions
        if p.offset is not None
    ]
    return json.dumps({"group": found.summary.name, "offsets": offsets}, indent=2)


def parse_file(text: str) -> dict[TopicPartition, CommittedOffset]:
    """UserError, with the place, for anything but what `file_text` writes."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UserError(f"the file is no JSON ({e}): it looks like {EXAMPLE}") from e
    rows = document.get("offsets") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise UserError(f'the file has no list "offsets": it looks like {EXAMPLE}')
    found: dict[TopicPartition, CommittedOffset] = {}
    for number, row in enumerate(rows, 1):
        place, committed = _row(number, row)
        if place in found:
            raise UserError(f"offset {number} of the file repeats {place[0]}/{place[1]}")
        found[place] = committed
    return found


def _row(number: int, row: Any) -> tuple[TopicPartition, CommittedOffset]:
    fields = row if isinstance(row, dict) else {}
    topic, metadata = fields.get("topic"), fields.get("metadata", "")
    numbers = [fields.get(name) for name in ("partition", "offset")]
    are_numbers = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
    if not isinstance(topic, str) or not isinstance(metadata, str) or not are_numbers:
        raise UserError(f"offset {number} of the file is none: the file looks like {EXAMPLE}")
    partition, offset = numbers
    return (topic, int(partition or 0)), CommittedOffset(offset=int(offset or 0), metadata=metadata)
