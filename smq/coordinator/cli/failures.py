"""How a command that fails says so: one sentence, or with --json one line of JSON, on standard error.

Owns the shape of that JSON and the exit codes. Light on purpose: every command imports it.
"""

import json
import sys

import click

from smq.coordinator.user_errors import EXIT_FAILED, UserError
from smq.raft_state.errors import SmqError


def report_failure(failure: Exception, *, as_json: bool) -> int:
    """Reports the failure and returns the exit code."""
    if as_json:
        sys.stderr.write(json.dumps({"error": error_json(failure)}, ensure_ascii=False) + "\n")
    elif isinstance(failure, click.ClickException):
        failure.show()
    else:
        sys.stderr.write(f"smq: {failure}\n")
    if isinstance(failure, click.ClickException):
        return failure.exit_code
    return failure.code if isinstance(failure, UserError) else EXIT_FAILED


def error_json(failure: Exception) -> dict[str, object]:
    """{"code", "message", "advice", "definite", "retriable"}: those of an error of smq; "USAGE" for a command line that
    makes no sense, "UNREACHABLE" if no node answers, "FAILED" for everything else, with a null advice."""
    if isinstance(failure, SmqError):
        code = failure.code
        return {
            "code": code.name,
            "message": failure.message,
            "advice": code.advice,
            "definite": code.is_definite,
            "retriable": code.is_retriable,
        }
    kind = failure.name if isinstance(failure, UserError) else "FAILED"
    kind = "USAGE" if isinstance(failure, click.UsageError) else kind
    message = failure.format_message() if isinstance(failure, click.ClickException) else str(failure)
    return {
        "code": kind,
        "message": message,
        "advice": None,
        "definite": True,
        "retriable": False,
    }
