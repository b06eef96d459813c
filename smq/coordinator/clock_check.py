"""How far this machine's clock is from those of the other nodes, as their hellos show.

Owns the bound at which a start is refused, and the warnings below it. Nothing in smq needs clocks that agree: times of
records and expiry follow the replicated state. But a clock that is days off is a machine that has lost it, and it would
date its records wrongly for ever. Only the composition root makes one.
"""

import time
from collections.abc import Callable
from typing import Final

from smq.raft_state.ids import NodeId

FAR_MS: Final = 24 * 3_600_000  # more than any time zone that was taken for UTC
WARN_MS: Final = 10_000  # a machine that asks a time server is off by milliseconds
_START_S: Final = 60.0  # a running node is not ended by a clock that is set


class ClockCheck:
    """`on_far` ends the process. A majority must agree that it is this clock that is wrong."""

    def __init__(self, nodes: int, on_far: Callable[[str], None], now_s: Callable[[], float] = time.monotonic) -> None:
        self._quorum: Final = nodes // 2 + 1
        self._on_far = on_far
        self._now_s = now_s
        self._began_s = now_s()
        self._ahead_ms: dict[NodeId, int] = {}  # by peer, of this clock

    def note(self, peer: NodeId, ahead_ms: int) -> None:
        """A peer's hello has come: its clock is that far ahead of this one."""
        self._ahead_ms[peer] = ahead_ms
        agreed = sorted(p for p, a in self._ahead_ms.items() if abs(a) > FAR_MS and abs(a - ahead_ms) < FAR_MS)
        if len(agreed) >= self._quorum and self._now_s() - self._began_s < _START_S:
            way = "behind" if ahead_ms > 0 else "ahead of"
            nodes = " and ".join(map(str, agreed))
            self._on_far(
                f"this machine's clock is {_days(ahead_ms)} {way} those of nodes {nodes}: set it, and let it follow a "
                "time server (chrony, systemd-timesyncd)"
            )

    def warnings(self) -> list[str]:
        return [
            f"the clock of node {peer} is {_seconds(ahead)} this node's: let both follow a time server"
            for peer, ahead in sorted(self._ahead_ms.items())
            if abs(ahead) > WARN_MS
        ]


def _seconds(ahead_ms: int) -> str:
    return f"{abs(ahead_ms) / 1000:,.0f} s {'ahead of' if ahead_ms > 0 else 'behind'}"


def _days(ms: int) -> str:
    return f"{abs(ms) / 86_400_000:,.1f} days"
