"""The events of several nodes as one line: by time, and each thing once although all nodes have seen it.

Owns the merging. The console and `smq top` import it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

SAME_MS: Final = 5_000  # nodes look once per second, and their clocks differ


@dataclass(frozen=True, slots=True)
class Seen:
    at_ms: int  # by that node's clock
    node: int
    kind: str
    text: str


def merged(events: Iterable[Seen]) -> list[Seen]:
    """The newest last. Of what several nodes report alike within SAME_MS, the first."""
    found: list[Seen] = []
    last: dict[tuple[str, str], Seen] = {}
    for event in sorted(events, key=lambda e: (e.at_ms, e.node)):
        known = last.get((event.kind, event.text))
        if known is not None and known.node != event.node and event.at_ms - known.at_ms <= SAME_MS:
            continue
        last[event.kind, event.text] = event
        found.append(event)
    return found
