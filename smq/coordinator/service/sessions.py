"""The tokens of users that have logged in, at one port of a node.

Owns how long a token serves: for a time, while its user has the credential by which it came, and while there is room.
It must never log a token. The ports that give tokens import it.
"""

import asyncio
import secrets
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Final

from smq.coordinator.limits import LOGIN_TOKENS_MAX, LOGIN_TOKENS_PER_USER_MAX
from smq.coordinator.service.users import Identity, Users

_TOKEN_BYTES: Final = 32


@dataclass(slots=True)
class Session:
    user: str
    identity: Identity | None  # None for the user of a certificate
    ends_s: float
    marker: object  # of the users among which the identity was last found


class Sessions:
    def __init__(self, users: Users, lifetime_ms: int) -> None:
        self._users = users
        self.lifetime_ms: Final = lifetime_ms
        self._checked: object = None  # the users when all sessions were last looked at
        self._sessions: dict[str, Session] = {}  # by token, oldest first
        self._tokens_of: dict[str, deque[str]] = defaultdict(deque)  # by user, oldest first

    def open(self, identity: Identity) -> str:
        """A new token."""
        own = self._tokens_of[identity.user]
        if len(own) >= LOGIN_TOKENS_PER_USER_MAX:
            self._forget(own[0])
        if len(self._sessions) >= LOGIN_TOKENS_MAX:
            self._forget(next(iter(self._sessions)))
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        ends_s = asyncio.get_running_loop().time() + self.lifetime_ms / 1000
        self._sessions[token] = Session(identity.user, identity, ends_s, None)
        self._tokens_of[identity.user].append(token)
        return token

    def find(self, token: str) -> Session | None:
        session = self._sessions.get(token)
        if session is None or asyncio.get_running_loop().time() >= session.ends_s or not self.is_held(session):
            return None
        return session

    def is_held(self, session: Session) -> bool:
        """Whether the user still has the credential by which it came."""
        if session.identity is None:
            return True
        marker = self._users.marker()
        if marker is not session.marker:
            if not self._users.holds(session.identity):
                return False
            session.marker = marker
        return True

    def drop_ended(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._sessions and next(iter(self._sessions.values())).ends_s <= now:
            self._forget(next(iter(self._sessions)))

    def drop_revoked(self) -> None:
        if self._users.marker() is self._checked:
            return
        self._checked = self._users.marker()
        for token in [token for token, session in self._sessions.items() if not self.is_held(session)]:
            self._forget(token)

    def _forget(self, token: str) -> None:
        user = self._sessions.pop(token).user
        self._tokens_of[user].remove(token)
        if not self._tokens_of[user]:
            del self._tokens_of[user]
