"""TLS contexts from the files of one [tls].

Owns what every context of a node has in common. It keeps nothing and must never write a file. Light on purpose: a
command that only asks a node over HTTP imports it, and loads no server.
"""

import ssl

from smq.coordinator.config.node_toml import TlsConfig
from smq.coordinator.config.secret_files import refuse_exposed


class TlsError(ValueError):
    """The files are unusable; says why and what to do."""


def load_context(
    config: TlsConfig, protocol: int, need: ssl.VerifyMode, *, is_host_checked: bool = False
) -> ssl.SSLContext:
    """Between nodes the URI is checked instead of the host name: see smq.replication.net.peer_tls."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = is_host_checked
    context.verify_mode = need
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a resumed session would outlive its certificate
    try:
        refuse_exposed(config.key)
    except PermissionError as e:
        raise TlsError(str(e)) from e
    except OSError:
        pass  # what follows says which file is missing
    try:
        context.load_cert_chain(config.certificate, config.key, password=_no_password)
    except (OSError, ValueError) as e:
        raise TlsError(f"{config.certificate} and {config.key} are not a certificate and its key: {e}") from e
    try:
        context.load_verify_locations(config.ca)
    except OSError as e:
        raise TlsError(f"{config.ca} holds no certificates: {e}") from e
    return context


def client_context(config: TlsConfig, *, is_host_checked: bool = True) -> ssl.SSLContext:
    """For a client that asks a node over HTTP, with the node's own certificate and trusted authorities."""
    return load_context(config, ssl.PROTOCOL_TLS_CLIENT, ssl.CERT_REQUIRED, is_host_checked=is_host_checked)


def _no_password() -> str:
    raise ValueError("the key is encrypted, and a server cannot ask for a password: decrypt it, and keep the file 0600")
