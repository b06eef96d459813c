"""A small certificate authority in a directory: its own certificate, those of nodes, and those of clients.

Owns the content of certificates, and writes the files that `tls.certificate_files` names. The authority's key is stored
unencrypted in D/ca: it is meant for development, and for small clusters whose operator keeps that directory offline.
`commands.cert` and `commands.cluster` import it.
"""

import ipaddress
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from smq.coordinator.config.node_toml import ServerConfig, TlsConfig, check_cluster_id
from smq.coordinator.tls.certificate_files import OPERATOR, Identity, authority, client_identity, node_identity, tls_dir
from smq.coordinator.user_errors import UserError
from smq.raft_state.ids import NodeId
from smq.replication.net.peer_tls import node_uri

CA_DAYS: Final = 3650
DAYS: Final = 365
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_BACKDATE: Final = timedelta(minutes=5)  # the clocks of two machines differ a little
_COMMON_NAME_CHARS_MAX: Final = 64  # X.520's bound


def make_authority(directory: Path, name: str, *, days: int = CA_DAYS) -> None:
    """A new authority in D/ca. UserError if there is one: everything it signed would become invalid."""
    home = authority(directory)
    if home.key.exists():
        raise UserError(f"{home.directory} already holds an authority: choose another directory, or move that one away")
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_common_name(name), days).issuer_name(_common_name(name)).public_key(key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(is_ca=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    _write(home, home.ca, builder.sign(key, hashes.SHA256()), key)


def make_node(directory: Path, *, cluster_id: str, node_id: NodeId, hosts: Iterable[str], days: int = DAYS) -> Identity:
    """A certificate and a new key for one node, which is a server to clients, and both server and client to other
    nodes. `hosts` are the names and addresses by which clients reach it; loopback is always included."""
    check_cluster_id(cluster_id)
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(node_uri(cluster_id, node_id))]
    names += [_host(host) for host in dict.fromkeys((*hosts, *LOOPBACK))]
    identity = node_identity(directory, node_id)
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    _issue(directory, identity, f"node-{node_id}", names, purposes, days)
    return identity


def make_client(directory: Path, name: str, *, days: int = DAYS) -> Identity:
    """A certificate for a client. It names no node: ports between nodes refuse it."""
    if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
        raise UserError(f"{name!r} cannot name a client: use letters, digits, '-', '_' and '.'")
    identity = client_identity(directory, name)
    _issue(directory, identity, name, [], [ExtendedKeyUsageOID.CLIENT_AUTH], days)
    return identity


def secure_cluster(directory: Path, configs: Sequence[ServerConfig]) -> list[ServerConfig]:
    """The same nodes with TLS, for `prepare_cluster`: an authority of the cluster's own, a certificate for each node
    without one, and one for the operator. Existing files stay."""
    home = tls_dir(directory)
    if not authority(home).key.exists():
        make_authority(home, f"development CA of {configs[0].cluster_id}")
    if not client_identity(home).certificate.exists():
        make_client(home, OPERATOR)
    secured = []
    for c in configs:
        if c.tls is None:
            made = make_node(home, cluster_id=c.cluster_id, node_id=c.node_id, hosts=())
            c = replace(c, tls=TlsConfig(ca=made.ca, certificate=made.certificate, key=made.key))
        secured.append(c)
    return secured


def read_end(certificate: Path) -> datetime:
    """When the first certificate of a PEM file expires."""
    return _read_certificate(certificate).not_valid_after_utc


# ----------------------------------------------------------------------------------------------------- issuing
def _issue(
    directory: Path,
    identity: Identity,
    name: str,
    names: Sequence[x509.GeneralName],
    purposes: list[x509.ObjectIdentifier],
    days: int,
) -> None:
    home = authority(directory)
    ca, signer = _read_certificate(home.ca), _read_key(home.key)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_common_name(name), days, ca.not_valid_after_utc).issuer_name(ca.subject)
    builder = builder.public_key(key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(is_ca=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(signed_by, critical=False)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    _write(identity, identity.certificate, builder.sign(signer, hashes.SHA256()), key)
    _replace(identity.ca, home.ca.read_bytes(), 0o644)


def _builder(subject: x509.Name, days: int, not_after: datetime | None = None) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    end = now + timedelta(days=days)
    begin = min(now, end) - _BACKDATE
    builder = x509.CertificateBuilder().subject_name(subject).serial_number(x509.random_serial_number())
    return builder.not_valid_before(begin).not_valid_after(min(end, not_after) if not_after is not None else end)


def _usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:_COMMON_NAME_CHARS_MAX])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass  # so it is a name
    try:
        return x509.DNSName(host)
    except ValueError as e:
        raise UserError(f"{host!r} is neither an address nor a host name: {e}") from e


# ------------------------------------------------------------------------------------------------------- files
def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as e:
        raise UserError(f"cannot use the certificate {path}: {e}; make an authority with `smq cert init`") from e


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as e:
        raise UserError(f"cannot use the authority's key {path}: {e}") from e
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"the authority's key {path} is not an elliptic curve key: `smq cert` uses only its own")
    return key


def _write(identity: Identity, path: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    identity.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _replace(identity.key, secret, 0o600)
    _replace(path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Atomic, and never readable by others, not even for a moment."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    temporary.replace(path)
