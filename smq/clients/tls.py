"""A client's TLS: the CA that it trusts, and its own certificate.

Owns the three files, their environment variables, and the gRPC credentials made of them. The files are read when a
client is made, so a client made later uses renewed ones. Users, every client and the Spark connector import it.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from smq.raft_state.errors import ErrorCode, SmqError

CA_VARIABLE: Final = "SMQ_TLS_CA"
CERTIFICATE_VARIABLE: Final = "SMQ_TLS_CERTIFICATE"
KEY_VARIABLE: Final = "SMQ_TLS_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files: `ca` signs the nodes' certificates; `certificate` and `key` are the client's own, for nodes that ask
    for one (the default). INVALID_REQUEST if only one of the two is given."""

    ca: str | Path
    certificate: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise SmqError(ErrorCode.INVALID_REQUEST, "TLS: give a client's certificate and its key together")

    def credentials(self) -> grpc.ChannelCredentials:
        """INVALID_REQUEST if a file cannot be read, or is not what it should be."""
        ca = _pem(self.ca, "a CA's certificate", b"CERTIFICATE-----")
        certificate = None if self.certificate is None else _pem(self.certificate, "a certificate", b"CERTIFICATE-----")
        key = None if self.key is None else _pem(self.key, "a private key", b"PRIVATE KEY-----")
        made: grpc.ChannelCredentials = grpc.ssl_channel_credentials(ca, key, certificate)
        return made


def tls_from_environment() -> Tls | None:
    """The files named by SMQ_TLS_CA, SMQ_TLS_CERTIFICATE and SMQ_TLS_KEY: the default of a client without TLS
    settings, as PGSSLROOTCERT is in PostgreSQL. None without SMQ_TLS_CA."""
    ca = os.environ.get(CA_VARIABLE)
    if not ca:
        return None
    certificate, key = os.environ.get(CERTIFICATE_VARIABLE), os.environ.get(KEY_VARIABLE)
    return Tls(ca=ca, certificate=certificate or None, key=key or None)


def _pem(path: str | Path, what: str, label: bytes) -> bytes:
    """gRPC itself would say nothing of a file of another kind, and no connection would be made."""
    try:
        read = Path(path).read_bytes()
    except OSError as e:
        raise SmqError(ErrorCode.INVALID_REQUEST, f"TLS: cannot read {path}: {e.strerror or e}") from e
    if b"-----BEGIN " not in read or label not in read:
        raise SmqError(ErrorCode.INVALID_REQUEST, f"TLS: {path} does not hold {what} in PEM")
    return read
