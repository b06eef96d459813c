"""Fixtures: the harness, with which a test runs over the simulated disk and over the real one with each of its stores,
and a host whose replica leads."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.replication.storage.support import HARNESSES, FakeHarness, Harness
from tests.unit.replication.support import Host


@pytest.fixture(params=["fake", *HARNESSES])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    h: Harness = FakeHarness() if request.param == "fake" else HARNESSES[request.param](tmp_path / "node")
    yield h
    h.close()


@pytest.fixture
def host() -> Host:
    """A host whose replica leads epoch 0 of an empty partition."""
    host = Host()
    host.create_partition()
    return host
