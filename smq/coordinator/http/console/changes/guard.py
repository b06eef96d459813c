"""Whether a change that a browser sends is one that this console has shown to a person.

Owns the tokens of confirmation pages, and the check of a request's origin. A token is for one change exactly, works
once, and for ten minutes: a stranger's page can neither read one nor make one. `changes.pages` imports it.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from smq.coordinator.http.console.refusals import Forbidden

VALID_S: Final = 600  # for a person to read what would change
USED_MAX: Final = 10_000  # made within that time; beyond it a change has to wait


class Tokens:
    """Of this process: a restart makes all of them invalid."""

    def __init__(self, now_s: Callable[[], float] = time.time) -> None:
        self._key = secrets.token_bytes(32)
        self._now_s = now_s
        self._used: dict[str, int] = {}  # with the second in which it is no longer valid

    def issue(self, change: str) -> str:
        until = int(self._now_s()) + VALID_S
        return f"{until}.{self._sign(until, change)}"

    def take(self, token: str, change: str) -> None:
        """Forbidden for any token but one that was issued for this change, and not taken yet."""
        written, _, signature = token.partition(".")
        until = int(written) if written.isascii() and written.isdigit() and len(written) < 12 else 0
        if not hmac.compare_digest(signature.encode(), self._sign(until, change).encode()):
            raise Forbidden("This is not a change that this console has shown, or the node has restarted since then")
        now = self._now_s()
        if until < now:
            raise Forbidden(f"The change was shown more than {VALID_S // 60} minutes ago")
        self._used = {used: end for used, end in self._used.items() if end >= now}
        if token in self._used:
            raise Forbidden("This has been sent already: the events show its outcome")
        if len(self._used) >= USED_MAX:
            raise Forbidden("There have been too many changes within ten minutes: wait, or use the command line")
        self._used[token] = until

    def _sign(self, until: int, change: str) -> str:
        return hmac.new(self._key, f"{until}\n{change}".encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def refuse_foreign(request: web.Request) -> None:
    """Forbidden unless the request comes from a page of this console: browsers name the page's origin."""
    origin = request.headers.get("Origin", "")
    if not origin or urlsplit(origin).netloc.lower() != request.host.lower():
        shown = origin or "nowhere that it names"
        raise Forbidden(f"A change must come from a page of this console. This one comes from {shown}")
