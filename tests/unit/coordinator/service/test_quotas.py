"""Which quota is whose, and how long a client waits, by Kafka's rules."""

from typing import Any

import pytest

from smq.coordinator.limits import QUOTA_METERS_MAX
from smq.coordinator.service.quotas import Quotas
from smq.raft_state.handlers.quotas import Key
from smq.raft_state.state import ClusterState
from tests.unit.raft_state.support import quota

BYTES = Key.PRODUCED


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


class Fixture:
    def __init__(self, *quotas: Any) -> None:
        self.state, self.clock = ClusterState(), Clock()
        self.set(*quotas)
        self.quotas = Quotas(lambda: self.state, self.clock)

    def set(self, *quotas: Any) -> None:
        self.state.quotas = tuple(sorted(quotas))


LEVELS = (
    {"user": "alice", "client_id": "job"},
    {"user": "alice", "client_id": ""},
    {"user": "alice"},
    {"user": "", "client_id": "job"},
    {"user": "", "client_id": ""},
    {"user": ""},
    {"client_id": "job"},
    {"client_id": ""},
)


def test_the_most_exact_quota_applies_and_a_change_is_in_force_at_once() -> None:
    all_of_them = [quota(BYTES, 1000 * (place + 1), **entity) for place, entity in enumerate(LEVELS)]
    others = [quota(BYTES, 1, user="bob"), quota(BYTES, 1, client_id="other"), quota(Key.CONSUMED, 1, user="alice")]
    fixture = Fixture()
    for first in range(len(LEVELS)):
        fixture.set(*all_of_them[first:], *others)
        allowance = fixture.quotas.of(BYTES, "alice", "job")
        assert allowance is not None
        assert allowance.rate == first + 1
    fixture.set(*others)
    assert fixture.quotas.of(BYTES, "alice", "job") is None


@pytest.mark.parametrize(
    ("entity", "sharing", "apart"),
    [
        ({"user": "alice"}, ("alice", "other"), ("bob", "job")),
        ({"user": ""}, ("alice", "other"), ("bob", "job")),
        ({"client_id": "job"}, ("bob", "job"), ("alice", "other")),
        ({"client_id": ""}, ("bob", "job"), ("alice", "other")),
        ({"user": "", "client_id": ""}, ("alice", "job"), ("alice", "other")),
    ],
)
def test_a_default_gives_each_its_own_and_a_name_is_shared(
    entity: dict[str, str], sharing: tuple[str, str], apart: tuple[str, str]
) -> None:
    fixture = Fixture(quota(BYTES, 1_000_000, **entity))
    assert fixture.quotas.use(BYTES, "alice", "job", 30_000) == 20.0
    assert fixture.quotas.use(BYTES, *sharing, 0) == 20.0
    assert fixture.quotas.use(BYTES, *apart, 0) == 0.0


def test_ten_seconds_are_taken_at_once_and_then_the_rate_is_kept() -> None:
    fixture = Fixture(quota(BYTES, 1_000_000, user="alice"))
    sent = 0.0
    began = fixture.clock.s
    while fixture.clock.s < began + 100:
        fixture.clock.s += fixture.quotas.use(BYTES, "alice", "", 700) or 0.01
        sent += 700
    assert 100_000 <= sent <= 111_000  # what fits in 100 s, and at most one window more
    fixture.clock.s += 11
    assert fixture.quotas.use(BYTES, "alice", "", 10_000) == 0.0


def test_a_quota_that_rises_frees_its_client() -> None:
    fixture = Fixture(quota(BYTES, 1_000_000, user="alice"))
    assert fixture.quotas.use(BYTES, "alice", "", 20_000) == 10.0
    fixture.set(quota(BYTES, 2_000_000, user="alice"))
    assert fixture.quotas.use(BYTES, "alice", "", 0) == 0.0


def test_request_time_waits_a_second_at_most_and_mutations_are_a_bucket() -> None:
    fixture = Fixture(quota(Key.REQUESTS, 10_000, user="alice"), quota(Key.MUTATIONS, 2_000, user="alice"))
    assert fixture.quotas.use(Key.REQUESTS, "alice", "", 1e6) == 1.0
    assert fixture.quotas.use(Key.MUTATIONS, "alice", "", 0) == 0.0
    assert fixture.quotas.use(Key.MUTATIONS, "alice", "", 30) == 4.0  # 22 are there, 8 too many
    fixture.clock.s += 3
    assert fixture.quotas.use(Key.MUTATIONS, "alice", "", 0) == 1.0
    fixture.clock.s += 1
    assert fixture.quotas.use(Key.MUTATIONS, "alice", "", 0) == 0.0
    fixture.clock.s += 3600  # no more is saved than the bucket holds
    assert fixture.quotas.use(Key.MUTATIONS, "alice", "", 24) == 1.0


def test_a_connection_too_many_is_not_counted() -> None:
    fixture = Fixture(quota(Key.CONNECTIONS, 1_000, ip=""), quota(Key.CONNECTIONS, 2_000, ip="10.0.0.2"))
    for address, allowed in (("10.0.0.1", 10), ("10.0.0.2", 20), ("::1", 10)):
        waits = [fixture.quotas.connection_wait_s(address) for _ in range(allowed + 2)]
        assert [wait > 0 for wait in waits] == [False] * allowed + [True] * 2
    fixture.clock.s += 11
    assert fixture.quotas.connection_wait_s("10.0.0.1") == 0.0


def test_ever_new_names_take_a_bounded_room_and_no_allowance_of_others() -> None:
    fixture = Fixture(quota(BYTES, 1_000_000, client_id=""))
    for number in range(QUOTA_METERS_MAX + 10):
        if number == QUOTA_METERS_MAX - 1:
            fixture.clock.s += 11
            assert fixture.quotas.use(BYTES, "alice", "job", 30_000) == 20.0
        fixture.quotas.use(BYTES, "alice", f"{number}", 1)
    assert len(fixture.quotas._meters) < 100
    assert fixture.quotas.use(BYTES, "alice", "job", 0) == 20.0
    assert fixture.quotas.use(BYTES, "alice", "x" * 20_000, 1) == 0.0
    assert max(len(client_id) for _, _, client_id in fixture.quotas._found) < 1_000
