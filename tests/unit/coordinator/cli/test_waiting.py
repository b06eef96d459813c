"""When a command says what it waits for: within a second, again after a while, and never while there is progress."""

from smq.coordinator.cli.waiting import AGAIN_S, Waiting

LOOK_S = 0.1  # between two looks


class Said:
    """The lines so far, with the time at which each was said."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.lines: list[tuple[float, str]] = []
        self.waiting = Waiting(lambda line: self.lines.append((round(self.now_s - 100.0, 1), line)))

    def look(self, what: str | None, done: int, seconds: float) -> None:
        for _ in range(round(seconds / LOOK_S)):
            self.waiting.look(what, done, self.now_s)
            self.now_s += LOOK_S


def test_a_wait_is_named_within_a_second_then_seldom_and_its_end_is_said() -> None:
    said = Said()
    said.look("a leader of t/0", 0, 12)
    said.look("a leader of t/0", 1, 1)
    assert [line for _, line in said.lines] == [
        "waiting for a leader of t/0",
        "waiting for a leader of t/0, for 6 s so far",
        "waiting for a leader of t/0, for 11 s so far",
        "going on after 12.0 s",
        "waiting for a leader of t/0",  # the next record has no leader either
    ]
    first, second, third = (at for at, _ in said.lines[:3])
    assert first < 1
    assert abs(second - first - AGAIN_S) <= 2 * LOOK_S
    assert abs(third - second - AGAIN_S) <= 2 * LOOK_S


def test_nothing_is_said_while_there_is_progress_or_nothing_to_wait_for() -> None:
    said = Said()
    for done in range(20):
        said.look("the node at h:1 to acknowledge records of t/0", done, 0.6)
    said.look(None, 20, 60)
    said.look("the node at h:1 to acknowledge records of t/0", 20, 0.6)
    assert said.lines == []


def test_the_newest_reason_is_the_one_that_is_said() -> None:
    said = Said()
    said.look("a leader of t/0", 0, 1)
    said.look("the node at h:1 to acknowledge records of t/0", 0, 6)
    assert [line for _, line in said.lines] == [
        "waiting for a leader of t/0",
        "waiting for the node at h:1 to acknowledge records of t/0, for 6 s so far",
    ]
