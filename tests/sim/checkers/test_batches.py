"""The judge of batches finds each anomaly in the shortest story of it, and accepts what may happen."""

from typing import Any, Self

import pytest

from tests.sim.checkers.support import anomaly_of
from tests.sim.checkers.test_transactions import Transactions


class Batches(Transactions):
    """Of an app that writes to one partition."""

    def attempt(self, values: list[int], kind: str = "ok", *, number: int = 0, replay: bool = False) -> Self:
        reply: dict[str, Any] = {"replay": replay} if kind == "ok" else {"err": "NOT_COMMITTED"}
        return self.op("batch", {"app": "app", "id": number, "v": values}, kind, **reply)

    def shows(self, *values: int) -> Self:
        """The final read of three replicas."""
        for node in (1, 2, 3):
            self.read("l/0", 0, 99, *enumerate(values), node=node, final=True)
        return self


FOUND = {
    "torn-batch: half of it": Batches().attempt([1, 2]).shows(1),
    "repeated-batch: visible twice": Batches().attempt([1, 2]).attempt([1, 2], replay=True).shows(1, 2, 1, 2),
    "repeated-batch: new twice": Batches().attempt([1, 2]).attempt([1, 2]),
    "repeated-batch: two plans": Batches().attempt([1, 2], "info").attempt([3, 4]).shows(1, 2, 3, 4),
    "lost-batch: gone": Batches().attempt([1, 2], replay=True).shows(),
    "lost-batch: other values answered as done": Batches().attempt([1, 2]).attempt([3, 4], replay=True).shows(1, 2),
    "aborted-read: never committed": Batches().attempt([1, 2], "fail").shows(1, 2),
}


@pytest.mark.parametrize("name", FOUND)
def test_anomaly_of_batches_is_found(name: str) -> None:
    assert anomaly_of(name) in FOUND[name].anomalies()


def test_what_may_happen_is_accepted() -> None:
    story = Batches().attempt([1, 2], "fail").attempt([1, 2], "info").attempt([1, 2], replay=True)
    story.attempt([3], "info", number=1)  # it was committed
    story.attempt([4], "info", number=2)  # it was not
    story.attempt([5, 6], "fail", number=2).attempt([7], number=3)
    story.attempt([8, 9], "fail", number=3)  # it is refused: the checkpoint had lost what the batch was
    assert story.shows(1, 3, 2, 7).anomalies() == set()
