"""Errors that are told to the user in one sentence, without a traceback, with the process's exit code.

Light on purpose: every command imports it.
"""

from typing import ClassVar, Final

EXIT_FAILED: Final = 1  # the request could not be carried out
EXIT_USAGE: Final = 2  # what was asked for makes no sense; as click's own usage errors
EXIT_FATAL: Final = 70  # a failed commit or a broken invariant ended the node
EXIT_PORT_TAKEN: Final = 98  # EADDRINUSE: who chose the port may choose another


class UserError(Exception):
    """The message says what was wrong and what to do."""

    code: ClassVar[int] = EXIT_FAILED


class ConfigError(UserError):
    """Settings cannot be used."""

    code: ClassVar[int] = EXIT_USAGE


class StartError(UserError):
    """A node cannot start."""


class PortTaken(StartError):
    """One of a node's ports cannot be had."""

    code: ClassVar[int] = EXIT_PORT_TAKEN
