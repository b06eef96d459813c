"""The client's picture of the cluster: views, hints, suspicions."""

import pytest

from smq.clients.metadata import ClusterView, Metadata, PartitionView, TopicView, parse_bootstrap
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, NodeId

ADDRESSES = {NodeId(n): f"node-{n}:1" for n in (1, 2, 3)}


def view(
    *, leader: int = 1, epoch: int = 0, available: bool = True, partitions: int = 1, topic_id: bytes = b"a"
) -> ClusterView:
    partition = PartitionView(
        leader=NodeId(leader),
        leader_available=available,
        epoch=Epoch(epoch),
        replicas=(NodeId(1), NodeId(2), NodeId(3)),
    )
    topic = TopicView(topic_id=topic_id, partitions=(partition,) * partitions)
    return ClusterView(cluster_id="c", addresses=ADDRESSES, topics={"t": topic})


def metadata(**changes: int) -> Metadata:
    m = Metadata(["boot:1"])
    m.update(view(**changes))  # type: ignore[arg-type]  # fields by name
    return m


def test_leader_of_a_view_is_the_leader() -> None:
    m = metadata()
    assert m.leader_address("t", 0) == "node-1:1"
    assert m.leader_address("t", 1) is None
    assert m.leader_address("u", 0) is None


def test_unavailable_leader_has_no_address() -> None:
    m = Metadata(["boot:1"])
    m.update(view(available=False))
    assert m.leader_address("t", 0) is None


def test_older_epoch_of_a_lagging_node_changes_nothing() -> None:
    m = metadata(leader=2, epoch=5)
    m.update(view(leader=1, epoch=4))
    assert m.leader_address("t", 0) == "node-2:1"
    m.update(view(leader=3, epoch=6))
    assert m.leader_address("t", 0) == "node-3:1"
    assert m.leader_changes == 1


def test_hint_leads_until_a_newer_epoch_is_seen() -> None:
    m = metadata(epoch=1)
    m.hint("t", 0, NodeId(2), "moved:1")
    assert m.leader_address("t", 0) == "moved:1"
    m.update(view(leader=1, epoch=1))
    assert m.leader_address("t", 0) == "node-2:1", "the same old view does not refute the hint"
    m.update(view(leader=2, epoch=2))
    assert m.leader_address("t", 0) == "node-2:1"
    assert m.leader_changes == 1, "seen by the hint, confirmed by the view: one change"


def test_hint_to_a_node_without_an_address_is_useless() -> None:
    m = metadata()
    assert not m.hint("t", 0, NodeId(9), None)
    assert m.leader_address("t", 0) == "node-1:1"


def test_suspected_leader_is_trusted_again_after_a_fresh_view() -> None:
    m = metadata()
    m.suspect("t", 0)
    assert m.leader_address("t", 0) is None
    m.update(view())
    m.trust(["t"])
    assert m.leader_address("t", 0) == "node-1:1"


def test_suspicion_ends_with_the_next_epoch() -> None:
    m = metadata()
    m.suspect("t", 0)
    m.update(view(leader=2, epoch=1))
    assert m.leader_address("t", 0) == "node-2:1"


def test_dead_node_is_suspected_for_all_partitions_that_it_leads() -> None:
    m = metadata(partitions=3)
    m.hint("t", 1, NodeId(2), None)
    m.suspect_node("node-1:1")
    assert [m.leader_address("t", p) for p in range(3)] == [None, "node-2:1", None]


def test_recreated_topic_starts_from_its_own_epoch() -> None:
    m = metadata(leader=2, epoch=7)
    m.update(view(leader=3, epoch=0, topic_id=b"b"))
    assert m.leader_address("t", 0) == "node-3:1"


def test_lagging_view_removes_no_partitions() -> None:
    m = metadata(partitions=4)
    m.update(view(partitions=2))
    assert m.partition_count("t") == 4


def test_forgotten_topic_is_unknown() -> None:
    m = metadata()
    m.hint("t", 0, NodeId(2), None)
    m.forget_topic("t")
    assert m.partition_count("t") is None
    assert m.leader_address("t", 0) is None


def test_replicas_begin_with_the_leader_and_end_with_failed_nodes() -> None:
    m = metadata(leader=2)
    assert m.replica_addresses("t", 0, 0.0) == ["node-2:1", "node-1:1", "node-3:1"]
    m.node_failed("node-2:1", 0.0)
    assert m.replica_addresses("t", 0, 1.0)[-1] == "node-2:1"
    assert m.all_addresses(1.0) == ["boot:1", "node-1:1", "node-3:1", "node-2:1"]
    assert m.replica_addresses("t", 0, 1e9)[0] == "node-2:1", "for a while only"
    m.node_failed("node-2:1", 1e9)
    m.node_answered("node-2:1")
    assert m.replica_addresses("t", 0, 1e9)[0] == "node-2:1"


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("a:1", ("a:1",)),
        ("a:1, b:2,,a:1", ("a:1", "b:2")),
        (["a:1,b:2", "c:3"], ("a:1", "b:2", "c:3")),
        ("[::1]:7401", ("[::1]:7401",)),
    ],
)
def test_bootstrap_is_parsed(given: str | list[str], parsed: tuple[str, ...]) -> None:
    assert parse_bootstrap(given) == parse_bootstrap(None, given) == parsed


def test_one_of_the_two_names_of_the_addresses_is_given() -> None:
    for both in ((None, None), ("a:1", "a:1")):
        with pytest.raises(SmqError, match=r"bootstrap must be host:port|mean the same") as caught:
            parse_bootstrap(*both)
        assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("given", ["", "host", ":1", "host:", "host:port", "host:0", "host:65536", [], ["", ","]])
def test_bootstrap_without_an_address_is_refused(given: str | list[str]) -> None:
    with pytest.raises(SmqError, match="host:port") as caught:
        parse_bootstrap(given)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
