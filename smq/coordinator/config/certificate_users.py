"""Which user a client's certificate names: by rules as Kafka's ssl.principal.mapping.rules.

Owns the rules' format, and their application to a certificate's distinguished name (RFC 4514, the name's last part
first, as Java writes it). The first rule that matches the whole name gives the user. It must never judge whether a
certificate is valid: the handshake has. `node_toml` checks rules by it, and the ports ask it.
"""

import re
from asyncio import BaseTransport
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from smq.coordinator.user_errors import ConfigError
from smq.raft_state.handlers.users import name_fault

_PART: Final = r"((?:\\.|[^\\/])*)"
_RULE: Final = re.compile(rf"RULE:{_PART}/{_PART}/([LU]?)")
_GROUP: Final = re.compile(r"\$(\d)")
_DEFAULT: Final = "DEFAULT"  # the whole name
_KNOWN_MAX: Final = 4_096  # certificates whose users are remembered: a kilobyte each


class NoUser(Exception):
    """The certificate names no user. The message is for the log."""


@dataclass(frozen=True, slots=True)
class _Rule:
    pattern: re.Pattern[str]
    replacement: str
    case: str

    def apply(self, name: str) -> str | None:
        found = self.pattern.fullmatch(name)
        if found is None:
            return None
        user = _GROUP.sub(lambda group: found[int(group[1])] or "", self.replacement)
        return {"L": user.lower(), "U": user.upper()}.get(self.case, user)


class CertificateUsers:
    """ConfigError for a rule that is none."""

    def __init__(self, rules: Sequence[str]) -> None:
        self._rules = [_parse(rule) for rule in rules]
        self.user_of = lru_cache(_KNOWN_MAX)(self._user_of)

    def user_named(self, name: str) -> str:
        """The user of a distinguished name. NoUser."""
        user = next((user for rule in self._rules if (user := rule.apply(name)) is not None), None)
        if user is None:
            raise NoUser(f"no rule of tls.certificate_users matches the certificate's name {name[:200]!r}")
        if (fault := name_fault(user)) is not None:
            raise NoUser(f"of the certificate's name {name[:200]!r} the rules make a name that is not allowed: {fault}")
        return user

    def _user_of(self, der: bytes) -> str:
        """The user of a verified certificate. NoUser."""
        from cryptography import x509  # slow to import, and a node without rules needs none of it

        try:
            name = x509.load_der_x509_certificate(der).subject.rfc4514_string()
        except ValueError as e:
            raise NoUser(f"the certificate's name cannot be read: {e}") from e
        return self.user_named(name)


def certificate_of(transport: BaseTransport) -> bytes:
    """The client's, in DER. NoUser."""
    tls = transport.get_extra_info("ssl_object")
    found: bytes | None = tls.getpeercert(binary_form=True) if tls is not None else None
    if not found:
        raise NoUser("the client has no certificate")
    return found


def _parse(text: str) -> _Rule:
    if text == _DEFAULT:
        return _Rule(re.compile("(.*)", re.DOTALL), "$1", "")
    found = _RULE.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r} is no rule: write RULE:PATTERN/USER/, with L or U at the end, or {_DEFAULT}")
    try:
        pattern = re.compile(found[1].replace(r"\/", "/"))
    except re.error as e:
        raise ConfigError(f"the pattern of {text!r} is wrong: {e}") from e
    replacement = found[2].replace(r"\/", "/")
    if any(int(group) > pattern.groups for group in _GROUP.findall(replacement)):
        raise ConfigError(f"{text!r} names a group that its pattern does not have")
    return _Rule(pattern, replacement, found[3])
