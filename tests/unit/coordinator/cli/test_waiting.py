"""When a command says what it waits for: within a second, again after a while, and never while there is progress."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from click.testing import Result

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.cli import common
from smq.coordinator.cli.commands.produce import AGAIN_S, Waiting
from smq.records import NewRecord
from smq.testing.fake.cluster import FakeCluster

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


# --------------------------------------------------------------------------- the notice of all other commands
SILENT_S = 1.0  # in place of the 3 s that a person waits


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person reads standard error."""
    monkeypatch.setattr(common, "is_watched", lambda: True)
    monkeypatch.setattr(common, "NOTICE_S", SILENT_S)


def test_a_person_learns_that_the_cluster_does_not_answer_and_a_script_does_not(
    person: None, cluster: FakeCluster, smq: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.nodes[1].hook = lambda name, request: asyncio.sleep(1.5 * SILENT_S)
    listed = smq("topic", "list")
    assert (listed.exit_code, listed.stderr.count("waiting for an answer: the cluster may lack a leader")) == (0, 1)
    monkeypatch.setattr(common, "is_watched", lambda: False)
    assert smq("topic", "list").stderr == ""


def test_nothing_is_said_of_the_cluster_while_a_command_waits_for_records_or_for_its_next_look(
    person: None, cluster: FakeCluster, smq: Callable[..., Result]
) -> None:
    """`consume -f` of a quiet topic used to say, after three seconds, that the cluster may lack a leader."""
    late = threading.Timer(2 * SILENT_S, cluster.append, ("t", 0, [NewRecord(b"k", b"late", 1)]))
    late.start()
    followed = smq("consume", "t", "-f", "-n", 1, "-g", "readers")
    late.join()
    assert (followed.stdout, followed.stderr) == ("late\n", "")
    cluster.groups["readers"] = pb.DescribeGroupResponse(group=pb.GroupSummary(group="readers", state="Empty"))
    watched = smq("group", "watch", "readers", "--interval", 1.5 * SILENT_S, "--count", 2)
    assert (watched.exit_code, len(watched.stdout.splitlines()), watched.stderr) == (0, 2, "")
