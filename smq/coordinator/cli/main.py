"""The console script `smq`: what happens before a command's modules are imported, and after it has ended.

Owns the end of the process: Ctrl-C and a closed pipe end it without a traceback, whatever runs at the time, and output
that cannot be written is an error. Light on purpose: it imports nothing until it can catch a Ctrl-C.
"""

import gc
import os
import sys


def main() -> None:
    """The console script."""
    try:
        code = _run()
        sys.stdout.flush()  # here, and not at the interpreter's exit, where an error would be a traceback
    except KeyboardInterrupt:
        code = 130  # 128 + SIGINT, as shells report it
    except BrokenPipeError:
        code = 0  # the reader has what it wanted
    except OSError as e:
        sys.stderr.write(f"smq: the output cannot be written: {e.strerror or e}\n")
        code = 1
    _discard_output()
    sys.exit(code)


def _run() -> int:
    gc.disable()  # while modules load, which stay: passes over them took a tenth of a start. `root` enables it again
    from smq.coordinator.cli.root import cli

    try:
        cli(prog_name="smq")
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 0 if e.code is None else _said(str(e.code))
    return 0


def _said(message: str) -> int:
    sys.stderr.write(f"{message}\n")
    return 1


def _discard_output() -> None:
    """What could not be written is not tried again when the interpreter flushes its streams."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
