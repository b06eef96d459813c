"""How a command takes a password: from a terminal without showing it, from a file, or from standard input.

It must never take one from the command line or the environment, which other processes can read. `smq user` and
`smq login` import it.
"""

import sys
from typing import Final, TextIO

import click

_PASSWORD_CHARS_MAX: Final = 4_096  # of a line: a file that is no password is not read through
new_password_file = click.option(
    "--password-from",
    type=click.File("r"),
    help="Take the password from the first line of this file, or of standard input (-), and do not ask.",
)


def password_of(name: str, file: TextIO | None, *, is_new: bool = True) -> str:
    """UsageError for none."""
    if file is None and sys.stdin.isatty():  # whatever happens to the rest of the output, nothing may show it
        answer: str = click.prompt(f"password of {name}", hide_input=True, confirmation_prompt=is_new, err=True)
        return answer
    try:
        line = (file or sys.stdin).readline(_PASSWORD_CHARS_MAX)
    except UnicodeDecodeError as e:
        raise click.UsageError(f"the password is not UTF-8: {e.reason}") from e
    password = line.rstrip("\r\n")
    if not password:
        raise click.UsageError("the password is empty: give it as the first line of standard input or of a file")
    if len(line) >= _PASSWORD_CHARS_MAX:
        raise click.UsageError(f"the password is longer than {_PASSWORD_CHARS_MAX} characters")
    return password
