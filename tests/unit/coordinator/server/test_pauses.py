"""Which objects of a long-lived heap a full pass of the collector scans."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from smq.coordinator.server import pauses as heap
from smq.coordinator.server.pauses import HeapKeeper


class Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeapKeeper]:
    """Every full pass counts as a long one, and every second one counts the frozen objects."""
    monkeypatch.setattr(heap, "LONG_NS", 0)
    monkeypatch.setattr(heap, "FREEZES_MAX", 2)
    thresholds = gc.get_threshold()
    made = HeapKeeper()
    made.start()
    yield made
    made.stop()
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("keeper")
def test_objects_that_survived_a_complete_scan_are_not_scanned_again() -> None:
    gc.collect()
    kept = [Cycle() for _ in range(10_000)]
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, Cycle)], "what is frozen is in no generation"
    assert len(gc.get_objects(generation=2)) < len(kept)


@pytest.mark.usefixtures("keeper")
def test_a_state_that_changes_but_does_not_grow_is_never_scanned_completely() -> None:
    kept = [Cycle() for _ in range(1_000)]
    for _ in range(20):
        gc.collect()
        assert gc.get_freeze_count()
        kept[0] = Cycle()


def test_unused_cycles_are_found_once_they_are_as_many_as_all_other_objects(
    keeper: HeapKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_frozen", 0)  # as though little had been there at first
    monkeypatch.setattr(heap, "FROZEN_MIN", 0)
    lost = [Cycle() for _ in range(10_000)]
    places = [weakref.ref(cycle) for cycle in lost]
    gc.collect()
    del lost
    assert all(place() is not None for place in places), "frozen, so no ordinary pass sees them"
    for _ in range(3):  # one counts, the next scans all, and the survivors are frozen
        gc.collect()
    assert all(place() is None for place in places)
