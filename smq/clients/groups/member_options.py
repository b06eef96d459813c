"""The options of a consumer that is a member of a group, and their checks.

Owns the defaults, which are those of Kafka's clients. Pure; `consumer` and `groups` import it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypedDict

from smq.clients.arguments import Duration, check_choice, check_name, invalid, milliseconds, names
from smq.clients.groups.assignors import ASSIGNORS, Assignor


class MemberOptions(TypedDict, total=False):
    """`assignors`: in order of preference. `group_instance_id`: a static member, which comes back within its session
    without a rebalance. `auto_commit_interval_ms`: None commits only by commit()."""

    assignors: Iterable[str]
    group_instance_id: str | None
    session_timeout_ms: Duration
    heartbeat_interval_ms: Duration
    max_poll_interval_ms: Duration
    auto_commit_interval_ms: Duration | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSettings:
    assignors: tuple[Assignor, ...]
    instance_id: str
    session_timeout_ms: int
    heartbeat_interval_ms: float
    max_poll_interval_ms: int
    auto_commit_interval_ms: float | None

    @property
    def is_cooperative(self) -> bool:
        """Members keep what they own while they join, if every assignor that may be chosen knows of that."""
        return all(assignor.is_cooperative for assignor in self.assignors)


def member_settings(options: MemberOptions) -> MemberSettings:
    """INVALID_REQUEST names the option that is wrong; TypeError for one that does not exist, as for any argument."""
    for name in options.keys() - MemberOptions.__annotations__.keys():
        raise TypeError(f"Consumer() got an unexpected keyword argument {name!r}")
    chosen = names("assignors", options.get("assignors", ("range", "roundrobin")))
    if not chosen or len(set(chosen)) != len(chosen):
        raise invalid(f"assignors must name at least one of {', '.join(ASSIGNORS)}, each once")
    for name in chosen:
        check_choice("assignors", name, ASSIGNORS)
    instance_id = options.get("group_instance_id")
    if instance_id is not None:
        check_name("group_instance_id", instance_id)
    session_ms = milliseconds("session_timeout_ms", options.get("session_timeout_ms", 45_000))
    beat: Duration = options.get("heartbeat_interval_ms", min(3_000.0, session_ms / 3))
    heartbeat_ms = milliseconds("heartbeat_interval_ms", beat)
    if heartbeat_ms >= session_ms:
        raise invalid(f"heartbeat_interval_ms must be less than session_timeout_ms ({session_ms:g})")
    commit_ms = options.get("auto_commit_interval_ms")
    return MemberSettings(
        assignors=tuple(ASSIGNORS[name] for name in chosen),
        instance_id=instance_id or "",
        session_timeout_ms=int(session_ms),
        heartbeat_interval_ms=heartbeat_ms,
        max_poll_interval_ms=int(milliseconds("max_poll_interval_ms", options.get("max_poll_interval_ms", 300_000))),
        auto_commit_interval_ms=None if commit_ms is None else milliseconds("auto_commit_interval_ms", commit_ms),
    )
