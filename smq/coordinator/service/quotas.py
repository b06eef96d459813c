"""How much of a node each client uses, and how long it has to wait when that is more than its quota.

Owns which quota is a client's, by Kafka's order, what each has used in the last seconds, and the wait. Every node
measures for itself, as Kafka's brokers do. It must never know a protocol, nor wait itself: the ports say what a client
has used, tell it how long to wait, and read nothing more from it until then.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import Final, NamedTuple

from smq.coordinator.limits import QUOTA_METERS_MAX
from smq.raft_state.commands import Quota
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.handlers.quotas import CLIENT_ID, DEFAULT, IP, THOUSAND, USER, Key
from smq.raft_state.limits import QUOTA_NAME_BYTES_MAX
from smq.raft_state.state import ClusterState

ANONYMOUS: Final = "ANONYMOUS"  # Kafka's user of a client that has proven none
SAMPLE_S: Final = 1.0
SAMPLES: Final = 11  # Kafka's defaults: what was used longer ago than 11 s is forgotten
WINDOW_S: Final = (SAMPLES - 1) * SAMPLE_S
_BOUNDED: Final = (Key.REQUESTS, Key.CONNECTIONS)
_WAIT_S_MAX: Final = SAMPLE_S  # Kafka's, for these two

_Entity = tuple[tuple[str, str], ...]


class Meter:
    """What one user, client id or address has used of one quota, in samples of a second."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[list[float]] = deque()  # when it began, and how much; the newest last

    def use(self, amount: float, rate: float, now: float) -> float:
        """The seconds until what was used is no more than the rate allows for the time since the oldest sample."""
        self._forget(now)
        samples = self._samples
        if not samples or now - samples[-1][0] >= SAMPLE_S:
            samples.append([now, 0.0])
        samples[-1][1] += amount
        window_s = max(now - samples[0][0], WINDOW_S)
        return max(0.0, sum(used for _, used in samples) / rate - window_s)

    def is_idle(self, now: float) -> bool:
        self._forget(now)
        return not self._samples

    def _forget(self, now: float) -> None:
        while self._samples and now - self._samples[0][0] >= SAMPLES * SAMPLE_S:
            self._samples.popleft()


class Bucket:
    """A token bucket, for bursts (KIP-599): a client for which any is left may overdraw it once."""

    __slots__ = ("_at", "_taken")

    def __init__(self) -> None:
        self._taken = 0.0  # of what the bucket holds: SAMPLES seconds of the rate
        self._at = 0.0

    def use(self, amount: float, rate: float, now: float) -> float:
        """The seconds until the bucket is not overdrawn any more."""
        self._taken = max(0.0, self._taken - rate * (now - self._at)) + amount
        self._at = now
        return max(0.0, self._taken / rate - SAMPLES * SAMPLE_S)

    def is_idle(self, now: float) -> bool:
        return now - self._at >= SAMPLES * SAMPLE_S  # it may be overdrawn yet: only asked if there is no more room


class Allowance(NamedTuple):
    """A client's quota, and what all have used of it that share it."""

    rate: float  # per second
    meter: Meter | Bucket


class Quotas:
    """`state` gives the node's present state."""

    def __init__(self, state: Callable[[], ClusterState], now: Callable[[], float] = time.monotonic) -> None:
        self.state = state
        self._now = now
        self._quotas: tuple[Quota, ...] = ()
        self._rates: dict[tuple[str, _Entity], float] = {}
        self._found: dict[tuple[Key, str, str], Allowance | None] = {}
        self._meters: dict[tuple[Key, _Entity], Meter | Bucket] = {}

    def use(self, key: Key, user: str, client_id: str, amount: float) -> float:
        """Counts what the client has used. The seconds that it has to wait for that: 0 within its quota, or without
        one."""
        allowance = self.of(key, user, client_id)
        if allowance is None:
            return 0.0
        wait_s = allowance.meter.use(amount, allowance.rate, self._now())
        return min(wait_s, _WAIT_S_MAX) if key in _BOUNDED else wait_s

    def connection_wait_s(self, address: str) -> float:
        """Counts a connection of this address. Above 0: it is one too many, and not counted."""
        wait_s = self.use(Key.CONNECTIONS, address, "", 1)
        if wait_s:
            self.use(Key.CONNECTIONS, address, "", -1)
        return wait_s

    def of(self, key: Key, user: str, client_id: str) -> Allowance | None:
        """The user is an address for the key CONNECTIONS."""
        quotas = self.state().quotas
        if quotas is not self._quotas:
            self._quotas, self._found = quotas, {}
            self._rates = {(quota.key, quota.entity): quota.thousandths / THOUSAND for quota in quotas}
        if not quotas:
            return None
        asked = key, user, client_id[: QUOTA_NAME_BYTES_MAX + 1]  # a longer one is none that a quota names
        try:
            return self._found[asked]
        except KeyError:
            if len(self._found) >= QUOTA_METERS_MAX:
                self._found.clear()
            self._found[asked] = allowance = self._find(*asked)
            return allowance

    def _find(self, key: Key, user: str, client_id: str) -> Allowance | None:
        for entity, sharing in _entities(key, user, client_id):
            rate = self._rates.get((key, entity))
            if rate is not None:
                return Allowance(rate, self._meter(key, sharing))
        return None

    def _meter(self, key: Key, sharing: _Entity) -> Meter | Bucket:
        meter = self._meters.get((key, sharing))
        if meter is None:
            self._make_room()
            meter = self._meters[key, sharing] = Bucket() if key is Key.MUTATIONS else Meter()
        return meter

    def _make_room(self) -> None:
        """A tenth at a time, so that strangers with ever new names cost little."""
        if len(self._meters) < QUOTA_METERS_MAX:
            return
        now = self._now()
        kept = [(place, meter) for place, meter in self._meters.items() if not meter.is_idle(now)]
        self._meters = dict(kept[max(0, len(kept) - QUOTA_METERS_MAX * 9 // 10) :])
        self._found.clear()


def _entities(key: Key, user: str, client_id: str) -> Iterator[tuple[_Entity, _Entity]]:
    """From the one that beats all others on: the entity that a quota may name, and the one that has the use of it."""
    if key is Key.CONNECTIONS:
        for name in (user, DEFAULT):
            yield ((IP, name),), ((IP, user),)
        return
    users, clients = ((USER, user), (USER, DEFAULT)), ((CLIENT_ID, client_id), (CLIENT_ID, DEFAULT))
    for each in users:
        for client in clients:
            yield (client, each), (clients[0], users[0])
        yield (each,), (users[0],)
    for client in clients:
        yield (client,), (clients[0],)


def quota_of(entity: dict[str, str], key: str, value: float) -> Quota:
    """A quota as clients write it; INVALID_REQUEST for what the state cannot keep, which has no fractions of that size
    and no addresses."""
    named = dict(entity)
    if named.get(IP):
        try:
            address = ip_address(named[IP])
        except ValueError:
            reason = f"an entity of kind {IP} is an IP address, or the default, not {named[IP][:80]!r}"
            raise SmqError(ErrorCode.INVALID_REQUEST, reason) from None
        named[IP] = str(getattr(address, "ipv4_mapped", None) or address)
    thousandths = round(value * THOUSAND) if math.isfinite(value) else -1
    if math.isfinite(value) and abs(value * THOUSAND - thousandths) > abs(thousandths) * 1e-9:
        raise SmqError(ErrorCode.INVALID_REQUEST, f"{key} has at most three decimals, not {value!r}")
    return Quota(entity=tuple(sorted(named.items())), key=key, thousandths=thousandths)
