"""`smq login` and `smq logout`: the user that commands are from.

Owns what they print. A password is kept only once a node has let it in. `cli.root` loads it when it is used.
"""

import os
from typing import TextIO

import click

from smq.clients.login import USER_VARIABLE, Login
from smq.clients.sync import SyncAdmin
from smq.clients.tls import CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE, tls_from_environment
from smq.coordinator.cli.common import done, json_option
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.passwords import new_password_file, password_of
from smq.coordinator.cli.profile import BOOTSTRAP_VARIABLE, profile_path, write_profile
from smq.coordinator.user_errors import UserError


@click.command()
@click.argument("name")
@new_password_file
@json_option
@bootstrap_option
def login(name: str, password_from: TextIO | None, as_json: bool, bootstrap: str) -> None:
    """Logs in as the user NAME, and keeps that for later commands, in a file of this account alone. Asks for the
    password.

    Example: smq login alice --bootstrap a.example.org:7401 --tls-ca ca.crt
    """
    tls = tls_from_environment()
    if tls is None:
        raise click.UsageError("a login needs TLS: name the CA of the nodes' certificates with --tls-ca")
    password = password_of(name, password_from, is_new=False)
    with SyncAdmin(bootstrap, tls=tls, login=Login(user=name, password=password)):
        pass  # it has asked a node for the cluster
    files = {variable: os.environ.get(variable) for variable in (CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE)}
    paths = {variable: os.path.abspath(value) for variable, value in files.items() if value}
    path = profile_path()
    try:
        write_profile(path, password, {BOOTSTRAP_VARIABLE: bootstrap, USER_VARIABLE: name, **paths})
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror or e}; name another file with SMQ_PROFILE") from e
    done(f"logged in as {name}; {path} has the password: smq logout removes it", as_json=as_json, user=name)


@click.command()
@json_option
def logout(as_json: bool) -> None:
    """Removes what the last login has kept.

    Example: smq logout
    """
    path = profile_path()
    was_there = path.exists()
    path.unlink(missing_ok=True)
    done(f"removed {path}" if was_there else "there was no login", as_json=as_json, removed=was_there)
