"""The permissions of files with secrets, and of files that decide who may come in.

Owns the rule: no account but the owner and its group may read a secret, or write what a node trusts. It reads nothing.
The parts of a node that load such files ask it first.
"""

import stat
from pathlib import Path
from typing import Final

_OTHERS: Final = {"read": stat.S_IROTH, "write": stat.S_IWOTH}


def refuse_exposed(path: Path, *, is_secret: bool = True) -> None:
    """PermissionError if any account of the machine may read the secret, or write the file; OSError without a file."""
    mode = path.stat().st_mode
    for what, bit in _OTHERS.items():
        if mode & bit and (is_secret or what == "write"):
            advice = f"run `chmod o= {path}`{', and replace the secret' if is_secret else ''}"
            raise PermissionError(f"any account of this machine may {what} {path} ({stat.filemode(mode)}): {advice}")
