"""What a forked process may do with clients: nothing with the parent's, and make new ones only if gRPC permits.

Owns the mark that a fork leaves. gRPC has threads that no child inherits: once a process has opened a channel, every
call in its children would wait for ever, whatever its timeout, or end the child. (gRPC's own support for forks covers
neither its asyncio interface nor a fork during a call; `smq.clients` turns it off, as it crashed children that used no
client at all.) It must never touch gRPC itself. Only `smq.clients` imports it.
"""

import os

from smq.raft_state.errors import ErrorCode, SmqError

_has_opened = False  # in this process
_is_spoilt = False  # this process was forked after that


def channel_opened() -> None:
    """FORKED in a process in which gRPC does not work."""
    global _has_opened
    if _is_spoilt:
        message = "the parent process had used an smq client when it forked this one, and gRPC does not survive that"
        raise SmqError(ErrorCode.FORKED, message)
    _has_opened = True


def check_owner(pid: int) -> None:
    """FORKED in another process than `pid`, in which the client was made."""
    if pid != os.getpid():
        raise SmqError(ErrorCode.FORKED, "this client was made before the process forked")


def _after_fork() -> None:
    global _is_spoilt
    _is_spoilt = _is_spoilt or _has_opened


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
