"""Checks of a request that need no node: list lengths, names, timeouts.

Pure. Each raises INVALID_REQUEST and says what is allowed. Knows no wire format; services import it.
"""

from collections.abc import Sequence

from smq.coordinator.limits import SESSION_ID_CHARS_MAX, TIMEOUT_MS_DEFAULT, TIMEOUT_MS_MAX
from smq.raft_state.errors import ErrorCode, SmqError


def check_count(field: str, items: Sequence[object], count_max: int, *, is_empty_allowed: bool = False) -> None:
    """Refuses a list that is empty or too long."""
    if len(items) > count_max or not (items or is_empty_allowed):
        raise SmqError(
            ErrorCode.INVALID_REQUEST,
            f"{field} must have {0 if is_empty_allowed else 1} to {count_max} entries, it has {len(items)}",
        )


def check_group(group: str) -> None:
    if not group:
        raise SmqError(ErrorCode.INVALID_REQUEST, "group must not be empty")


def check_id(field: str, value: str) -> None:
    """Refuses an id that is empty or too long."""
    if not value or len(value) > SESSION_ID_CHARS_MAX:
        raise SmqError(
            ErrorCode.INVALID_REQUEST, f"{field} must have 1 to {SESSION_ID_CHARS_MAX} characters, it has {len(value)}"
        )


def timeout_of(requested_ms: int, remaining_ms: float | None = None) -> int:
    """The timeout of a request: what it asks for (0 = 30 s), but within the client's own deadline."""
    if requested_ms < 0:
        raise SmqError(ErrorCode.INVALID_REQUEST, f"timeout_ms is {requested_ms}: it must be 0 (the default) or more")
    chosen = min(requested_ms or TIMEOUT_MS_DEFAULT, TIMEOUT_MS_MAX)
    return chosen if remaining_ms is None else max(1, min(chosen, int(remaining_ms)))
