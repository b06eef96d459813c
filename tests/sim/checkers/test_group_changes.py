"""Changes of a group's offsets that come back after a later one, in hand-made histories."""

from collections.abc import Callable

import pytest

from tests.sim.checkers.test_judge import Story, anomalies


def delete(s: Story, kind: str = "ok") -> None:
    s.recorder.add(s.begin("gdelete", g="g"), kind, "gdelete", {})


def abandoned_commit_after_a_newer_one(s: Story) -> None:
    s.commit("lost", 7, kind="info")
    s.commit("a", 1)
    s.fetch("a", 1)
    s.fetch("lost", 7)


def abandoned_commit_that_undoes_a_deletion(s: Story) -> None:
    s.commit("lost", 7, kind="info")
    delete(s)
    s.fetch("", -1)
    s.fetch("lost", 7)


def acknowledged_commit_that_undoes_a_deletion(s: Story) -> None:
    s.commit("a", 7)
    delete(s)
    s.fetch("a", 7)


def abandoned_deletion_of_a_newer_commit(s: Story) -> None:
    s.commit("a", 1)
    delete(s, kind="info")
    s.commit("b", 2)
    s.fetch("b", 2)
    s.fetch("", -1)


def unknown_commit_that_took_effect_after_its_client_gave_up(s: Story) -> None:
    process = s.begin("commit", g="g", k="t/0", o=1, tag="a")
    s.commit("lost", 7, kind="info")
    s.fetch("", -1)
    s.fetch("lost", 7)
    s.recorder.ok(process, "commit")  # it began before the client of the other gave up
    s.fetch("a", 1)


def deletion_that_overlaps_a_commit(s: Story) -> None:
    s.commit("a", 1)
    deletion = s.begin("gdelete", g="g")
    s.commit("b", 2)
    s.fetch("b", 2)
    s.recorder.ok(deletion, "gdelete")
    s.fetch("", -1)
    s.commit("c", 3)
    delete(s, kind="info")
    s.fetch("c", 3)
    s.fetch("", -1)


def begin(s: Story, off: int) -> int:
    """A transaction that has staged this offset. Returns its process."""
    process = s.begin("txn", id="tx", v={"l/0": [off]}, off=off)
    s.recorder.ok(s.begin("stage", g="g", k="t/0", o=off, tag=str(off)), "stage")
    return process


def transaction_that_replaces_a_newer_commit(s: Story) -> None:
    process = begin(s, 100)
    s.commit("a", 200)
    s.recorder.ok(process, "txn", out="commit")
    s.fetch("100", 100)


def transaction_that_replaces_a_newer_transaction_s(s: Story) -> None:
    older, newer = begin(s, 100), begin(s, 200)
    s.recorder.ok(newer, "txn", out="commit")
    s.recorder.ok(older, "txn", out="commit")
    s.fetch("100", 100)


def transaction_that_undoes_a_deletion(s: Story) -> None:
    process = begin(s, 100)
    delete(s)
    s.recorder.ok(process, "txn", out="commit")
    s.fetch("100", 100)


def committed_transaction_without_its_offset(s: Story) -> None:
    s.commit("a", 1)
    s.recorder.ok(begin(s, 100), "txn", out="commit")
    s.fetch("a", 1)


def transactions_and_commits_in_order(s: Story) -> None:
    older, process = begin(s, 100), begin(s, 150)
    s.fetch("", -1)
    s.commit("a", 200)
    s.recorder.ok(older, "txn", out="commit")
    s.fetch("a", 200)
    newer = begin(s, 300)
    s.fetch("a", 200)
    s.recorder.ok(newer, "txn", out="commit")
    s.fetch("300", 300)
    s.recorder.info(process, "txn")
    s.recorder.ok(begin(s, 400), "txn", out="abort")
    s.fetch("300", 300)
    s.recorder.info(begin(s, 500), "txn")  # it was committed
    s.fetch("500", 500)


@pytest.mark.parametrize(
    "tell",
    [
        transaction_that_replaces_a_newer_commit,
        transaction_that_replaces_a_newer_transaction_s,
        transaction_that_undoes_a_deletion,
        committed_transaction_without_its_offset,
        abandoned_commit_after_a_newer_one,
        abandoned_commit_that_undoes_a_deletion,
        acknowledged_commit_that_undoes_a_deletion,
        abandoned_deletion_of_a_newer_commit,
    ],
)
def test_change_that_comes_back_is_reported(tell: Callable[[Story], None]) -> None:
    assert "commit-regression" in anomalies(tell)


@pytest.mark.parametrize(
    "tell",
    [
        unknown_commit_that_took_effect_after_its_client_gave_up,
        deletion_that_overlaps_a_commit,
        transactions_and_commits_in_order,
    ],
)
def test_change_that_overlaps_another_may_come_after_it(tell: Callable[[Story], None]) -> None:
    assert anomalies(tell) == set()
