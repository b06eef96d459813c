"""The profile that `smq login` keeps: how to reach a cluster, as which user.

Owns the file, which is the account's own (0600): the password in its first line, as in any password file, and then
variables of the environment, which it stands in for. It must never print the password. `cli.connect` and `smq login`
import it.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from smq.clients.login import PASSWORD_FILE_VARIABLE, USER_VARIABLE, read_password
from smq.clients.tls import CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE

PROFILE_VARIABLE: Final = "SMQ_PROFILE"
BOOTSTRAP_VARIABLE: Final = "SMQ_BOOTSTRAP"
_KEPT: Final = (BOOTSTRAP_VARIABLE, CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE, USER_VARIABLE)
_BYTES_MAX: Final = 64 << 10


def profile_path() -> Path:
    """The file of SMQ_PROFILE, or the account's own."""
    named = os.environ.get(PROFILE_VARIABLE)
    if named:
        return Path(named)
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "smq" / "profile"


def write_profile(path: Path, password: str, values: Mapping[str, str]) -> None:
    """Atomic, and never readable by others. OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("\n".join([password, *(f"{name}={value}" for name, value in values.items())]) + "\n")
    temporary.replace(path)


def use_profile() -> None:
    """If there is one, and the environment says nothing of a cluster. INVALID_REQUEST if others may read it."""
    path = profile_path()
    if any(name in os.environ for name in (*_KEPT, PASSWORD_FILE_VARIABLE)) or not path.exists():
        return
    read_password(path)
    with path.open() as file:
        lines = file.read(_BYTES_MAX).splitlines()[1:]
    found = dict(line.partition("=")[::2] for line in lines)
    os.environ.update({name: found[name] for name in _KEPT if name in found})
    os.environ[PASSWORD_FILE_VARIABLE] = str(path.absolute())
