"""Errors that the user sees as one sentence without a traceback, and the process's exit codes.

Light on purpose: every command imports it.
"""

from typing import ClassVar, Final

EXIT_FAILED: Final = 1  # the request could not be carried out
EXIT_USAGE: Final = 2  # the request makes no sense; as click's own usage errors
EXIT_INTERRUPTED: Final = 130  # by Ctrl-C: 128 + SIGINT, as shells report it
EXIT_FATAL: Final = 70  # a failed commit or a broken invariant ended the node
EXIT_PORT_TAKEN: Final = 98  # EADDRINUSE: whatever chose the port may choose another


class UserError(Exception):
    """The message says what is wrong and what to do."""

    code: ClassVar[int] = EXIT_FAILED
    name: ClassVar[str] = "FAILED"  # its code in JSON


class ConfigError(UserError):
    """The settings are invalid."""

    code: ClassVar[int] = EXIT_USAGE
    name: ClassVar[str] = "USAGE"


class NoAnswer(UserError):
    """No node can be reached."""

    name: ClassVar[str] = "UNREACHABLE"


class Interrupted(UserError):
    """Ended by Ctrl-C; the message says how far it got."""

    code: ClassVar[int] = EXIT_INTERRUPTED
    name: ClassVar[str] = "INTERRUPTED"


class StartError(UserError):
    """A node cannot start."""


class PortTaken(StartError):
    """One of a node's ports is not available."""

    code: ClassVar[int] = EXIT_PORT_TAKEN
