"""The harness fixture: every test that asks for it runs over the simulated disk and over the real one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.replication.storage.support import FakeHarness, Harness, LmdbHarness


@pytest.fixture(params=["fake", "lmdb"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    h: Harness = FakeHarness() if request.param == "fake" else LmdbHarness(tmp_path / "node")
    yield h
    h.close()
