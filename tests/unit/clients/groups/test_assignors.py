"""The assignors: every partition has one member, shares are even, and cooperative members keep what they can."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smq.clients.groups.assignors import ASSIGNORS, Candidate, Shares
from smq.clients.groups.protocol import Subscription
from smq.clients.types import TopicPartition

TOPICS = ("a", "b", "c", "gone")
counts_of_topics = st.fixed_dictionaries({topic: st.integers(1, 9) for topic in TOPICS[:3]})
subscriptions = st.lists(st.sets(st.sampled_from(TOPICS)), min_size=1, max_size=6)


def members_of(topics: list[set[str]]) -> list[Candidate]:
    return [
        Candidate(member_id=f"m{n}", subscription=Subscription(topics=tuple(sorted(wanted))))
        for n, wanted in enumerate(topics)
    ]


def given_out(shares: Shares) -> Counter[TopicPartition]:
    return Counter(tp for share in shares.values() for tp in share)


def owning(members: list[Candidate], shares: Shares, generation: int) -> list[Candidate]:
    """The members as they join again, with what they have."""
    return [
        replace(m, subscription=replace(m.subscription, owned=frozenset(shares[m.member_id]), generation=generation))
        for m in members
    ]


@pytest.mark.parametrize("name", ASSIGNORS)
@given(counts=counts_of_topics, topics=subscriptions)
def test_each_partition_of_a_subscribed_topic_has_one_member(
    name: str, counts: dict[str, int], topics: list[set[str]]
) -> None:
    members = members_of(topics)
    shares = ASSIGNORS[name].assign(counts, members)
    wanted = set().union(*topics) & counts.keys()
    assert given_out(shares) == Counter((topic, p) for topic in wanted for p in range(counts[topic]))
    assert shares.keys() == {m.member_id for m in members}
    for member in members:
        assert {tp[0] for tp in shares[member.member_id]} <= set(member.subscription.topics)
    assert ASSIGNORS[name].assign(counts, members[::-1]) == shares  # the order of their joining means nothing


@pytest.mark.parametrize("name", ["roundrobin", "cooperative-sticky"])
@given(counts=counts_of_topics, size=st.integers(1, 7))
def test_shares_of_equal_subscribers_differ_by_one_at_most(name: str, counts: dict[str, int], size: int) -> None:
    shares = ASSIGNORS[name].assign(counts, members_of([set(counts)] * size))
    sizes = [len(share) for share in shares.values()]
    assert max(sizes) - min(sizes) <= 1


def test_ranges_are_neighbours_and_the_first_members_get_more() -> None:
    members = members_of([{"a"}, {"a", "b"}, {"a"}])
    assert ASSIGNORS["range"].assign({"a": 5, "b": 2}, members) == {
        "m0": [("a", 0), ("a", 1)],
        "m1": [("a", 2), ("a", 3), ("b", 0), ("b", 1)],
        "m2": [("a", 4)],
    }


def test_static_members_keep_their_places_under_new_ids() -> None:
    first = [
        Candidate(member_id=member_id, instance_id=instance_id, subscription=Subscription(topics=("a",)))
        for member_id, instance_id in (("x", "one"), ("y", "two"))
    ]
    again = [replace(first[0], member_id="z"), first[1]]
    for name in ("range", "roundrobin"):
        before = ASSIGNORS[name].assign({"a": 4}, first)
        assert ASSIGNORS[name].assign({"a": 4}, again) == {"z": before["x"], "y": before["y"]}


@example(  # what was given up once found other places than planned, and took another partition away
    counts={"a": 2, "b": 5, "c": 1}, before=[{"b"}, {"b", "a"}], joining=[{"b", "a"}, {"c", "a"}], leaving=0
)
@given(counts=counts_of_topics, before=subscriptions, joining=subscriptions, leaving=st.integers(0, 5))
def test_cooperative_members_never_get_what_another_still_owns(
    counts: dict[str, int], before: list[set[str]], joining: list[set[str]], leaving: int
) -> None:
    assign = ASSIGNORS["cooperative-sticky"].assign
    members = members_of(before)
    members = owning(members, assign(counts, members), 1)
    newcomers = [replace(m, member_id=f"n{m.member_id}") for m in members_of(joining)]
    members = [*members[min(leaving, len(members) - 1) :], *newcomers]
    first = assign(counts, members)
    for member in members:
        for other in members:
            if other is not member:
                assert not set(first[member.member_id]) & other.subscription.owned
    second = assign(counts, owning(members, first, 2))  # those that gave something up have joined again
    wanted = {topic for m in members for topic in m.subscription.topics} & counts.keys()
    assert given_out(second) == Counter((topic, p) for topic in wanted for p in range(counts[topic]))
    for member_id, share in first.items():
        assert set(share) <= set(second[member_id])  # and no member gives anything up twice
    assert assign(counts, owning(members, second, 3)) == second


def test_sticky_moves_no_more_than_an_even_share_takes() -> None:
    assign = ASSIGNORS["cooperative-sticky"].assign
    two = members_of([{"a"}] * 2)
    had = assign({"a": 9}, two)
    three = [*owning(two, had, 1), *members_of([{"a"}] * 3)[2:]]
    now = assign({"a": 9}, three)
    assert [len(set(had[m.member_id]) - set(now[m.member_id])) for m in two] in ([2, 1], [1, 2])
    assert now["m2"] == []  # until the others have given up its share
    assert len(assign({"a": 9}, owning(three, now, 2))["m2"]) == 3


def test_evenness_may_take_a_move_through_a_third_member() -> None:
    """m0 is full of what only m1 could take, and m1's other topic only m2."""
    members = [
        Candidate(
            member_id="m0", subscription=Subscription(topics=("a",), owned=frozenset({("a", n) for n in range(4)}))
        ),
        Candidate(member_id="m1", subscription=Subscription(topics=("a", "b"), owned=frozenset({("b", 0), ("b", 1)}))),
        Candidate(member_id="m2", subscription=Subscription(topics=("b",))),
    ]
    shares = ASSIGNORS["cooperative-sticky"].assign({"a": 4, "b": 2}, members)
    shares = ASSIGNORS["cooperative-sticky"].assign({"a": 4, "b": 2}, owning(members, shares, 1))
    assert sorted(len(share) for share in shares.values()) == [2, 2, 2]


def test_of_two_that_claim_a_partition_the_newer_generation_is_right_and_both_give_it_up_first() -> None:
    stale, right = (
        Candidate(
            member_id=member_id,
            subscription=Subscription(topics=("a",), owned=frozenset({("a", 0)}), generation=generation),
        )
        for member_id, generation in (("stale", 3), ("right", 4))
    )
    shares = ASSIGNORS["cooperative-sticky"].assign({"a": 1}, [stale, right])
    assert shares == {"stale": [], "right": []}
