"""The harness fixture: every test that asks for it runs over the simulated disk and over the real one, with each of its
stores."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.replication.storage.support import HARNESSES, FakeHarness, Harness


@pytest.fixture(params=["fake", *HARNESSES])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    h: Harness = FakeHarness() if request.param == "fake" else HARNESSES[request.param](tmp_path / "node")
    yield h
    h.close()
