"""Moving the log start of a partition whose mark follows its commit point (rule 14).

A log start may reach the commit point, which clients know, and Raft's high water mark is a little behind it. Owns the
wait for the mark, at whichever node was asked. It must never judge: after the wait, apply decides. `requests` uses it.
"""

from typing import Final

from smq.raft_state.commands import AdvanceLogStart
from smq.raft_state.replies import Reply
from smq.replication.api import DoneFn
from smq.replication.host import Host

STEP_MS: Final = 20
WAIT_MS_MAX: Final = 1_000  # ten times the pace of the marks; then the offset is beyond what is committed


def propose_log_start(host: Host, command: AdvanceLogStart, timeout_ms: int, done: DoneFn[Reply]) -> None:
    """`timeout_ms` is the caller's."""
    now_ms = host.clock.monotonic_ns() // 1_000_000
    until_ms, wait_until_ms = now_ms + timeout_ms, now_ms + min(WAIT_MS_MAX, timeout_ms // 2)

    def attempt() -> None:
        now_ms = host.clock.monotonic_ns() // 1_000_000
        part = host.state.partition(command.partition)
        if part is None or part.two_round or command.offset <= part.hwm or now_ms >= wait_until_ms:
            host.propose(command, max(1, until_ms - now_ms), done)
        else:
            host.clock.call_later(STEP_MS, attempt)

    attempt()
