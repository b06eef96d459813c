"""Faults of our own, as the error that a client gets.

Owns the one log event for a bug in a handler. Knows no wire format; services import it.
"""

import structlog

from smq.raft_state.errors import ErrorCode, SmqError

log = structlog.get_logger(__name__)


def internal(where: str, error: BaseException) -> SmqError:
    """Logs the fault with its traceback; the client gets one line."""
    log.error("internal_error", where=where, error=repr(error), exc_info=error)
    return SmqError(ErrorCode.INTERNAL, f"{where} failed: {type(error).__name__}: {error}")
