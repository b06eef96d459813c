"""Requests to a group's coordinator, and its answers.

Owns the shapes that the Kafka port and the simulation share with the coordinator. Group names are those of the cluster
(`kafka-cg-...`). Pure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from smq.coordinator.groups.outcomes import Outcome
from smq.raft_state.commands import GroupMember

NO_GENERATION = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """`member.member_id` is empty if the member has none yet."""

    group: str
    member: GroupMember
    protocol_type: str
    takes_id_first: bool  # KIP-394: a new member gets an id first, and joins again under it
    can_skip_assignment: bool  # KIP-814


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Only the leader gets `members`: id, instance id and metadata of the chosen protocol of every member."""

    outcome: Outcome
    member_id: str
    generation: int = NO_GENERATION
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    skip_assignment: bool = False
    members: tuple[tuple[str, str, bytes], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The sender of a request. `instance_id` is empty if the member is not static."""

    member_id: str
    instance_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """`protocol_type` and `protocol` are None if the request does not name them."""

    group: str
    who: Identity
    generation: int
    protocol_type: str | None = None
    protocol: str | None = None
    assignments: tuple[tuple[str, bytes], ...] = ()  # by member id; from the leader only


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    outcome: Outcome
    protocol_type: str = ""
    protocol: str = ""
    assignment: bytes = b""


OnJoined: TypeAlias = Callable[[Joined], None]
OnSynced: TypeAlias = Callable[[Synced], None]
OnLeft: TypeAlias = Callable[[list[Outcome]], None]
