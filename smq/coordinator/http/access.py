"""Which callers get an answer on the HTTP port, by the rule under [http].

Owns the judgement of a request, and the token of /metrics. The token's file is read again for each request that shows
one, so that a new token needs no restart. It never logs a token. `http.endpoints` asks it; the composition root makes
one.
"""

import asyncio
import hmac
import ipaddress
import ssl
from pathlib import Path
from typing import Final

from aiohttp import web

from smq.coordinator.config.addresses import is_loopback
from smq.coordinator.config.certificate_users import CertificateUsers, NoUser, certificate_of
from smq.coordinator.config.node_toml import HttpConfig, ServerConfig
from smq.coordinator.config.secret_files import refuse_exposed
from smq.coordinator.http.people import Handler, People
from smq.coordinator.user_errors import StartError
from smq.replication.net.listening import plain_host

_TOKEN_BYTES_MIN: Final = 16  # a shorter one could be guessed
_TOKEN_BYTES_MAX: Final = 4096
_SCHEME: Final = "Bearer "
_BY_TOKEN = "show the token, as `Authorization: Bearer TOKEN`, or a client's certificate"
_BY_CERTIFICATE = "show a client's certificate"
_FROM_HERE = (
    "come from the node's machine, or let the node ask for certificates: [tls] with client_certificates = true\n"
)


class HttpAccess:
    """StartError if the token's file is unusable."""

    def __init__(self, config: ServerConfig, people: People | None = None) -> None:
        self._people: Final = people if config.http.users else None
        self._config: Final = config
        self._rule: Final[HttpConfig] = config.http
        self._is_local: Final = is_loopback(config.http_address[0])
        tls = config.http_tls
        self._is_plain: Final = tls is None
        self._is_insecure: Final = config.insecure
        self._is_for_certificates: Final = config.tls is not None and config.tls.client_certificates
        self._asks_certificates: Final = tls is not None and tls.client_certificates
        rules = config.tls.certificate_users if config.tls is not None else ()
        self._users: Final = CertificateUsers(rules) if rules else None
        self._super_users: Final = config.super_users
        if self._rule.token_file is not None:
            try:
                read_token(self._rule.token_file)
            except (OSError, ValueError) as e:
                raise StartError(f"http.token_file {self._rule.token_file}: {e}") from e

    @property
    def verify_mode(self) -> ssl.VerifyMode:
        """What the TLS handshake asks of a client. If some may come without a certificate, paths are judged later."""
        if not self._asks_certificates:
            return ssl.CERT_NONE
        is_open = self._people is not None or self._rule.probes == "anyone" or self._rule.metrics != "clients"
        return ssl.CERT_OPTIONAL if is_open else ssl.CERT_REQUIRED

    def refuse_probe(self, request: web.Request) -> None:
        """Raises the refusal, if there is one. Where users log in, strangers learn yes or no."""
        if self._people is None and self._rule.probes == "clients" and not self._is_client(request):
            raise web.HTTPForbidden(text=f'{_BY_CERTIFICATE}, or set probes = "anyone" under [http]\n')

    async def console(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The handler's answer, or the refusal."""
        await self.refuse_console(request)
        if self._people is None or _has_certificate(request):
            return await handler(request)
        return await self._people.while_allowed(request, handler)

    async def refuse_console(self, request: web.Request) -> None:
        """Raises the refusal, if there is one. The console shows records: where the node's other ports ask clients for
        certificates, it does, too, and whatever [http] lets in without one. Where they ask for none, they are for this
        machine, or for users. With `users` those log in."""
        if self._people is not None and not _has_certificate(request):
            await self._people.require_console(request)
            return
        if self._is_for_certificates and not self._is_operator(request):
            if _has_certificate(request):
                raise web.HTTPForbidden(text="the console is for super users\n")
            plain = ", over TLS: set tls = true under [http]" if self._is_plain else ""
            raise web.HTTPForbidden(text=f"{_BY_CERTIFICATE}{plain}\n")
        if not self._is_for_certificates and not self._is_insecure and not _is_from_here(request):
            raise web.HTTPForbidden(text=_FROM_HERE)

    def may_see_details(self, request: web.Request) -> bool:
        """Whether a probe's answer may say more than yes or no."""
        if self._is_foreign(request):
            return False
        is_for_clients = self._people is None and self._users is None and self._rule.probes == "clients"
        if self._is_operator(request) or is_for_clients:
            return True
        return self._is_plain and _is_from_here(request)

    async def refuse_metrics(self, request: web.Request) -> None:
        """Raises the refusal, if there is one."""
        rule = self._rule
        if self._is_foreign(request):
            raise web.HTTPMisdirectedRequest(text="this port answers to its address, or to localhost\n")
        if self._people is not None and rule.metrics != "anyone" and not _has_certificate(request):
            if rule.metrics != "token" or not await self._has_token(request):
                await self._people.require_all(request)
            return
        if rule.metrics == "clients" and self._asks_certificates and not self._is_operator(request):
            raise web.HTTPForbidden(text=f"{_BY_CERTIFICATE}{', of a super user' if self._users else ''}\n")
        if rule.metrics == "token" and not self._is_operator(request) and not await self._has_token(request):
            raise web.HTTPUnauthorized(text=f"{_BY_TOKEN}\n", headers={"WWW-Authenticate": "Bearer"})

    def _is_foreign(self, request: web.Request) -> bool:
        """Whether a port for this machine is called by the name of another: so a stranger's page reaches it, through a
        browser here and a name that it controls."""
        return self._is_local and not names_this_node(self._config, request.host)

    def _is_client(self, request: web.Request) -> bool:
        return not self._asks_certificates or _has_certificate(request)

    def _is_operator(self, request: web.Request) -> bool:
        """By its certificate: any client's, or if certificates name users, a super user's. What HTTP shows is of all
        topics."""
        transport = request.transport
        if self._users is None or transport is None:
            return _has_certificate(request)
        try:
            return self._users.user_of(certificate_of(transport)) in self._super_users
        except NoUser:
            return False

    async def _has_token(self, request: web.Request) -> bool:
        shown = request.headers.get("Authorization", "")
        if self._rule.token_file is None or not shown.startswith(_SCHEME):
            return False
        try:
            expected = await asyncio.to_thread(read_token, self._rule.token_file)
        except (OSError, ValueError):
            return False  # the file is being replaced, or has been damaged: no token is accepted
        return hmac.compare_digest(shown.removeprefix(_SCHEME).encode("utf-8", "surrogateescape"), expected)


def names_this_node(config: ServerConfig, host: str) -> bool:
    """Browsers may call the node by any address, by localhost, and by the name that `config` has as the HTTP address.
    With TLS by any name: a stranger's name has no certificate of ours."""
    name = host.rsplit(":", 1)[0] if host.count(":") == 1 or (host.startswith("[") and "]:" in host) else host
    if config.http_tls is not None or name.lower() in ("localhost", config.http_address[0].lower()):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def read_token(path: Path) -> bytes:
    """OSError, or ValueError for a content that is no token."""
    refuse_exposed(path)
    with path.open("rb") as file:
        token = file.read(_TOKEN_BYTES_MAX + 1).strip()
    if not _TOKEN_BYTES_MIN <= len(token) <= _TOKEN_BYTES_MAX:
        raise ValueError(
            f"the token has {len(token)} bytes: it must have {_TOKEN_BYTES_MIN} to {_TOKEN_BYTES_MAX}. Make one, for "
            "example with `openssl rand -hex 32`"
        )
    return token


def _is_from_here(request: web.Request) -> bool:
    """Whether the caller is on this machine."""
    return is_loopback(plain_host(request.remote or ""))


def _has_certificate(request: web.Request) -> bool:
    """Whether the client showed a certificate, which the handshake has then verified."""
    transport = request.transport
    return transport is not None and bool(transport.get_extra_info("peercert"))
