"""How long a group waits for a silent member before evicting it.

Owns the ends of sessions, the ids that are reserved, and the wait for members to ask for their assignment. It changes
no group: `live` acts on what it finds.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from smq.raft_state.state import MemberState

NEVER_NS: Final = 1 << 62
NS_PER_MS: Final = 1_000_000
NO_MEMBERS: Final[dict[str, MemberState]] = {}


def sessions_of(members: Mapping[str, MemberState], before: Mapping[str, int], now_ns: int) -> dict[str, int]:
    """When each session ends. A member that is new to this coordinator gets a full one: no member is evicted for the
    heartbeats that a former coordinator missed."""
    return {name: before.get(name, now_ns + m.member.session_timeout_ms * NS_PER_MS) for name, m in members.items()}


def silent_members(
    ends_ns: Mapping[str, int], *, late: Collection[str], waiting: Collection[str], now_ns: int
) -> list[str]:
    """Members whose session is over, or that are late to ask for their assignment. A waiting request is a sign of
    life."""
    return [name for name, until_ns in ends_ns.items() if (until_ns <= now_ns or name in late) and name not in waiting]


class Sessions:
    """`members` are those of the replicated state as `follow` has last seen it."""

    def __init__(self) -> None:
        self.members: dict[str, MemberState] = NO_MEMBERS
        self.reserved_ids: dict[str, int] = {}  # of members that have not joined under them yet, and until when
        self.due_ns = NEVER_NS  # nothing runs out before this
        self._ends_ns: dict[str, int] = {}
        self._unsynced: set[str] = set()  # members of this generation that have not asked for their assignment
        self._sync_until_ns = NEVER_NS

    def follow(self, members: dict[str, MemberState], now_ns: int) -> None:
        self.members = members
        self._ends_ns = sessions_of(members, self._ends_ns, now_ns)
        self._unsynced &= members.keys()
        self.wake_at(min(self._ends_ns.values(), default=NEVER_NS))

    def wake_at(self, at_ns: int) -> None:
        self.due_ns = min(self.due_ns, at_ns)

    def restart(self, member_id: str, now_ns: int) -> None:
        until_ns = now_ns + self.members[member_id].member.session_timeout_ms * NS_PER_MS
        self._ends_ns[member_id] = until_ns
        self.wake_at(until_ns)

    def reserve_id(self, member_id: str, until_ns: int) -> None:
        self.reserved_ids[member_id] = until_ns
        self.wake_at(until_ns)

    def expire_ids(self, now_ns: int) -> None:
        for member_id in [m for m, until_ns in self.reserved_ids.items() if until_ns <= now_ns]:
            del self.reserved_ids[member_id]

    # ------------------------------------------------------------------------------------------------ assignments
    def await_syncs(self, member_ids: Iterable[str], until_ns: int) -> None:
        """A member that joins and never asks for its assignment would keep its partitions from the others."""
        self._unsynced = set(member_ids)
        self._sync_until_ns = until_ns
        self.wake_at(until_ns)

    def extend_syncs(self, until_ns: int) -> None:
        if self._unsynced:
            self._sync_until_ns = until_ns

    def on_sync(self, member_id: str) -> None:
        self._unsynced.discard(member_id)

    def stop_awaiting_syncs(self) -> None:
        self._unsynced.clear()
        self._sync_until_ns = NEVER_NS

    # -------------------------------------------------------------------------------------------------- the clock
    def silent(self, waiting: Collection[str], now_ns: int) -> list[str]:
        late = self._unsynced if now_ns >= self._sync_until_ns else ()
        return silent_members(self._ends_ns, late=late, waiting=waiting, now_ns=now_ns)

    def compute_due(self, waiting: Collection[str], round_until_ns: int) -> None:
        """Sets `due_ns`. A waiting request holds its member's session open; the round, or the syncs, have an end."""
        ends_ns = [at for name, at in self._ends_ns.items() if name not in waiting]
        ends_ns += self.reserved_ids.values()
        ends_ns.append(round_until_ns)
        if self._unsynced:
            ends_ns.append(self._sync_until_ns)
        self.due_ns = min(ends_ns)
