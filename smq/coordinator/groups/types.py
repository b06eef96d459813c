"""What is asked of a group's coordinator and what it answers.

Owns the shapes that the Kafka port and the simulation share with the coordinator. Group names are those of the cluster
(`kafka-cg-...`). Pure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from smq.coordinator.kafka.errors import KafkaError
from smq.raft_state.commands import GroupMember

NO_GENERATION = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """`member.member_id` is empty where the member has none yet."""

    group: str
    member: GroupMember
    protocol_type: str
    takes_id_first: bool  # KIP-394: a new member is told its id, and joins again under it
    can_skip_assignment: bool  # KIP-814


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """`members` is for the leader alone: id, instance id and metadata of the chosen protocol of everybody."""

    code: KafkaError
    member_id: str
    generation: int = NO_GENERATION
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    skip_assignment: bool = False
    members: tuple[tuple[str, str, bytes], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who speaks. `instance_id` is empty where the member is not static."""

    member_id: str
    instance_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """`protocol_type` and `protocol` are None where the request does not name them."""

    group: str
    who: Identity
    generation: int
    protocol_type: str | None = None
    protocol: str | None = None
    assignments: tuple[tuple[str, bytes], ...] = ()  # of the leader


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    code: KafkaError
    protocol_type: str = ""
    protocol: str = ""
    assignment: bytes = b""


OnJoined: TypeAlias = Callable[[Joined], None]
OnSynced: TypeAlias = Callable[[Synced], None]
OnLeft: TypeAlias = Callable[[list[KafkaError]], None]
