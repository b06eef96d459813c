"""`smq consume` with a filter: the nodes search, and only what they find comes over the wire and is written."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.cli.consume_runs import SEARCHES_TOGETHER_MAX
from smq.coordinator.cli.root import cli
from smq.records import NewRecord
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_in_thread

Smq = Callable[..., Result]
HOUR_MS = 3_600_000
EVERY_PARTITION = (0, 1, 2)


def fill(cluster: FakeCluster, count: int = 6, *, partitions: tuple[int, ...] = (0,)) -> None:
    """Keys user-0, user-1 and other in turn; a value is partition/offset; the last record is an hour old, the one
    before two. A batch for each."""
    now_ms = time.time_ns() // 1_000_000
    for partition in partitions:
        base = cluster.topics["t"][partition].end
        for offset in range(base, base + count):
            key = (b"user-0", b"user-1", b"other")[offset % 3]
            created_ms = now_ms - (base + count - offset) * HOUR_MS
            cluster.append("t", partition, [NewRecord(key, b"%d/%d" % (partition, offset), created_ms)])


def written(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def searches(cluster: FakeCluster) -> list[pb.SearchRecordsRequest]:
    """The requests from now on."""
    seen: list[pb.SearchRecordsRequest] = []
    cluster.nodes[1].hook = lambda name, request: seen.append(request) if name == "SearchRecords" else None
    return seen


def sent(cluster: FakeCluster) -> list[str]:
    """The values of all records that have come over the wire."""
    node = cluster.nodes[1]
    assert node.fetches == []
    return sorted(record.value.decode() for page in node.pages for record in page.records)


def test_records_that_do_not_pass_are_not_sent(cluster: FakeCluster, smq: Smq) -> None:
    fill(cluster, 300, partitions=EVERY_PARTITION)
    found = written(smq("consume", "t", "--key", "other"))
    assert sorted(found) == sent(cluster) == sorted(f"{p}/{n}" for p in EVERY_PARTITION for n in range(2, 300, 3))
    for partition in EVERY_PARTITION:
        of_one = [line for line in found if line.startswith(f"{partition}/")]
        assert of_one == [f"{partition}/{n}" for n in range(2, 300, 3)], "in the order of the log"


def test_without_a_filter_it_fetches(cluster: FakeCluster, smq: Smq) -> None:
    fill(cluster)
    assert len(written(smq("consume", "t"))) == 6
    assert (cluster.nodes[1].pages, bool(cluster.nodes[1].fetches)) == ([], True)


@pytest.mark.parametrize(
    ("options", "offsets"),
    [
        (("--key-prefix", "user-"), [0, 1, 3, 4]),
        (("--key-prefix", ""), [0, 1, 2, 3, 4, 5]),
        (("--key", ""), []),
        (("--key-prefix", "user-", "-o", 1), [1, 3, 4]),
        (("--key-prefix", "user-", "-o", -2), [4]),
        (("--key-prefix", "user-", "-o", "latest"), []),
        (("--key-prefix", "user-", "--since", "210m"), [3, 4]),
        (("--key-prefix", "user-", "--until", "150m"), [0, 1, 3]),
        (("--key-prefix", "user-", "--until", "9h"), []),
        (("--key-prefix", "user-", "--until-offset", 4), [0, 1, 3]),
        (("--key-prefix", "user-", "--until-offset", 99), [0, 1, 3, 4]),
        (("--key-prefix", "user-", "-o", 3, "--until-offset", 3), []),
        (("--key-prefix", "user-", "-n", 3), [0, 1, 3]),
    ],
    ids=str,
)
def test_it_starts_and_ends_where_it_is_told(
    cluster: FakeCluster, smq: Smq, options: tuple[Any, ...], offsets: list[int]
) -> None:
    fill(cluster)
    assert written(smq("consume", "t", "-p", 0, *options)) == [f"0/{n}" for n in offsets]
    assert sent(cluster) == [f"0/{n}" for n in offsets]


def test_a_header_that_is_named_twice_must_be_there_with_both_values(cluster: FakeCluster, smq: Smq) -> None:
    both, one = [("a", b"1"), ("a", b"2")], [("a", b"2")]
    cluster.append("t", 0, [NewRecord(None, b"both", 1, both), NewRecord(None, b"one", 2, one)])
    assert written(smq("consume", "t", "--header", "a=1", "--header", "a=2")) == ["both"]
    assert written(smq("consume", "t", "--header", "a=2", "--header", "a")) == ["both", "one"]


def test_everything_that_was_searched_is_committed(cluster: FakeCluster, smq: Smq) -> None:
    fill(cluster, partitions=(0, 2))
    group = ("-g", "g", "--commit")
    assert sorted(written(smq("consume", "t", "--key", "user-1", *group))) == ["0/1", "0/4", "2/1", "2/4"]
    assert {place[2]: offset for place, (offset, _) in cluster.commits.items()} == {0: 6, 1: 0, 2: 6}
    fill(cluster)
    assert written(smq("consume", "t", "--key", "user-1", *group)) == ["0/7", "0/10"]
    assert cluster.commits["g", "t", 0][0] == 12


def test_only_what_was_written_of_a_page_is_committed(cluster: FakeCluster, smq: Smq) -> None:
    """Each partition's page has two records, and three may be written."""
    fill(cluster, partitions=(0, 1))
    assert len(written(smq("consume", "t", "--key", "user-1", "-n", 3, "-g", "g", "--commit"))) == 3
    assert sorted(offset for offset, _ in cluster.commits.values()) == [0, 2, 6]
    rest = smq("consume", "t", "--key", "user-1", "-g", "g", "--commit")
    assert written(rest) in (["0/4"], ["1/4"])


def test_it_follows_all_partitions_side_by_side(cluster: FakeCluster, smq: Smq) -> None:
    fill(cluster, 1)
    asked = searches(cluster)
    note = cluster.nodes[1].hook
    all_wait = threading.Event()

    def waited(name: str, request: Any) -> None:
        note(name, request)
        if {r.partition for r in asked if r.max_wait_ms} == set(EVERY_PARTITION):
            all_wait.set()

    def fill_then() -> None:
        all_wait.wait()
        fill(cluster, 3, partitions=EVERY_PARTITION)

    cluster.nodes[1].hook = waited
    threading.Thread(target=fill_then, daemon=True).start()
    assert sorted(written(smq("consume", "t", "-f", "--key", "user-0", "-n", 4))) == ["0/0", "0/3", "1/0", "2/0"]
    assert sent(cluster) == ["0/0", "0/3", "1/0", "2/0"]


def test_few_searches_run_together(cluster: FakeCluster, smq: Smq) -> None:
    cluster.create("wide", 12)
    for partition in range(12):
        cluster.append("wide", partition, [NewRecord(b"k", b"%d" % partition, 1)])
    running, peak = 0, 0

    async def count() -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.02)
        running -= 1

    cluster.nodes[1].hook = lambda name, request: count() if name == "SearchRecords" else None
    assert sorted(map(int, written(smq("consume", "wide", "--key", "k")))) == list(range(12))
    assert 1 < peak <= SEARCHES_TOGETHER_MAX


@pytest.mark.parametrize(
    "options",
    [
        ("nowhere",),
        ("t", "-p", 9),
        ("t", "--offset-type", "EXACT_OFFSET", "--offset-value", 7),
        ("t", "--from-replica", 9),
        ("t", "-o", "newest"),
        ("t", "-p", 0, "--offset-type", "RESET_TO_OFFSET", "--offset-value", 99),
    ],
    ids=str,
)
def test_what_it_says_of_a_wrong_start_does_not_depend_on_a_filter(
    cluster: FakeCluster, smq: Smq, options: tuple[Any, ...]
) -> None:
    fill(cluster)
    plain, filtered = smq("consume", *options), smq("consume", *options, "--key", "user-0")
    assert plain.stderr
    assert (filtered.exit_code, filtered.stderr, filtered.stdout) == (plain.exit_code, plain.stderr, "")


def test_the_isolation_and_the_number_of_records_reach_the_node(cluster: FakeCluster, smq: Smq) -> None:
    fill(cluster)
    asked = searches(cluster)
    written(smq("consume", "t", "-p", 0, "--key", "user-0", "--isolation", "read_uncommitted", "-n", 1))
    written(smq("consume", "t", "-p", 0, "--key", "user-0"))
    assert [(r.isolation, r.max_records) for r in asked] == [(pb.READ_UNCOMMITTED, 1), (pb.READ_COMMITTED, 500)]


def test_it_searches_the_named_replica_whatever_the_replica_says() -> None:
    with cluster_in_thread(3, t=1) as cluster:
        fill(cluster)
        cluster.topics["t"][0].leader = 1
        refusals = [cluster.not_leader(cluster.topics["t"][0])]

        def refuse_once(name: str, request: Any) -> None:
            if name == "SearchRecords" and refusals:
                raise refusals.pop()

        cluster.nodes[3].hook = refuse_once
        environment = {"SMQ_BOOTSTRAP": cluster.nodes[1].address}
        found = CliRunner(env=environment).invoke(cli, ["consume", "t", "--key", "other", "--from-replica", "3"])
        assert written(found) == ["0/2", "0/5"]
        assert refusals == []
        assert [bool(cluster.nodes[n].pages) for n in (1, 2, 3)] == [False, False, True]


def test_records_that_are_deleted_meanwhile_are_an_error_after_what_was_written(cluster: FakeCluster, smq: Smq) -> None:
    fill(cluster)
    asked = searches(cluster)
    note = cluster.nodes[1].hook

    def delete(name: str, request: Any) -> None:
        note(name, request)
        if len(asked) == 2:
            cluster.topics["t"][0].log_start = 6

    cluster.nodes[1].hook = delete
    cluster.fetch_bytes_max = 1  # a page for each batch
    ended = smq("consume", "t", "-p", 0, "--key", "user-0", "-g", "g", "--commit", "--json")
    assert (ended.exit_code, [json.loads(line)["offset"] for line in ended.stdout.splitlines()]) == (1, [0])
    error = json.loads(ended.stderr)["error"]
    assert (error["code"], "no offset 1" in error["message"]) == ("OFFSET_OUT_OF_RANGE", True)
    assert cluster.commits["g", "t", 0][0] == 1
