"""Each argument of each public method: a wrong one is refused at the call by its name, and no method is forgotten.

`test_arguments` has the values that are wrong in subtler ways.
"""

import inspect
from collections.abc import Callable
from typing import Any, Final

import pytest

from smq.clients import Admin, Consumer, InvalidRequest, OffsetAssigner, Producer, RecordFilter, SyncProducer
from smq.testing.fake.runner import cluster_in_thread, cluster_of

PARTITION: Final = {"topic": "t", "partition": 0}
SEARCH: Final = {**PARTITION, "wanted": RecordFilter(), "start": "earliest", "end_offset": None}
NAMED: Final = {"name": "t"}
ID: Final = {"transactional_id": "x"}
# Valid calls: each argument in turn is replaced by wrong ones. Times are in test_arguments.
CALLS: Final[dict[type, dict[str, dict[str, Any]]]] = {
    Admin: {
        "create_topic": NAMED | {"partitions": 1, "replication_factor": 0, "config": {}, "start_offset": 0},
        "delete_topic": NAMED,
        "add_partitions": NAMED | {"partition_count": 9},
        "alter_topic": NAMED | {"set": {}, "unset": []},
        "delete_records": PARTITION | {"before_offset": 0},
        "set_node_drained": {"node": 1, "drained": False},
        "describe_cluster": {"topics": [], "is_linearizable": True},
        "describe_topic": NAMED,
        "node_status": {"node": 1, "with_digest": False, "with_replicas": True},
        "partition_range": PARTITION,
        "list_offsets": {"starts": {("t", 0): 0}, "group": None, "reset_if_gone": False, "isolation": "read_committed"},
        "alter_cluster_config": {"set": {}, "unset": []},
        "alter_acls": {"add": [], "remove": []},
        "alter_quotas": {"quotas": []},
        "test_acl": {"user": "u", "operation": "read", "resource": "topic", "name": "t", "host": "h"},
        "create_user": NAMED | {"password": "secret"},
        "change_password": NAMED | {"password": "secret"},
        "delete_user": NAMED,
        "describe_group": NAMED | {"with_sizes": False},
        "delete_group": NAMED,
        "describe_transaction": ID,
        "abort_transaction": ID,
        "commit_offsets": {"group": "g", "offsets": {("t", 0): 0}},
        "delete_offsets": {"group": "g", "partitions": [("t", 0)]},
        "fetch_offsets": {"group": "g", "partitions": [("t", 0)]},
    },
    OffsetAssigner: {
        "assign": PARTITION | {"count": 1, "request_id": None, "not_before": None},
        "advance": PARTITION | {"offset": 0},
    },
    Consumer: {
        "assign": {"partitions": "t", "start": None, "end_offset": None, "until_ms": None},
        "subscribe": {"topics": "t", "start": "RESUME_OR_EARLIEST"}
        | {"on_assigned": None, "on_revoked": None, "on_lost": None},
        "pause": {"partitions": []},
        "resume": {"partitions": []},
        "close": {"commit": True},
        "seek": PARTITION | {"start": 0},
        "position": PARTITION,
        "lag": PARTITION,
        "high_water_mark": PARTITION,
        "commit": {"offsets": {}},
        "committed": {"partitions": []},
        "getmany": {"max_records": 1, "timeout_ms": 0},
        "getbatch": {"timeout_ms": 0},
        "fetch_range": PARTITION | {"offset": 0, "max_bytes": 0, "max_wait_ms": 0},
        "search_page": SEARCH | {"cursor": None, "max_records": 0},
        "search": SEARCH | {"follow": False},
        "search_pages": SEARCH | {"follow": False, "max_records": 0},
    },
    Producer: {
        "send": PARTITION | {"value": b"", "key": None, "headers": (), "timestamp_ms": None},
        "send_many": PARTITION | {"values": [b""], "keys": None, "timestamp_ms": None},
        "close": {"deliver": True},
    },
}
OTHERWISE: Final = {"partitions": "partition", "offsets": "offset"}  # one of several, in the words of its message
WRONG: Final = (object(), [object()])  # the second cannot be hashed
OPTIONS: Final[dict[type, dict[str, str]]] = {Consumer: {"group": "g"}}


def takes_arguments(cls: type) -> set[str]:
    found = inspect.getmembers_static(cls, inspect.isfunction)
    return {name for name, function in found if name[0] != "_" and len(inspect.signature(function).parameters) > 1}


def test_no_method_is_forgotten() -> None:
    # The blocking producer has checked what it gives to the first two. The third needs transactions, which a fake
    # cluster has not; it checks its arguments as Admin.commit_offsets does. The blocking consumer gives positions to
    # the last two that it has had from it.
    others = {"take", "refused", "send_offsets", "rewind", "resume_positions"}
    for cls, calls in CALLS.items():
        assert takes_arguments(cls) - others == set(calls)
        for name, given in calls.items():
            assert set(inspect.signature(getattr(cls, name)).parameters) == {"self", *given}


async def finished(call: Callable[..., Any], given: dict[str, Any]) -> None:
    outcome = call(**given)
    if inspect.isasyncgen(outcome):
        await anext(outcome, None)
    elif inspect.isawaitable(outcome):
        await outcome


@pytest.mark.parametrize("cls", CALLS)
async def test_an_argument_of_another_type_is_refused_by_its_name(cls: type) -> None:
    async with cluster_of(1, t=1) as cluster, cls(cluster.servers, **OPTIONS.get(cls, {})) as client:
        if cls is Consumer:
            await client.assign("t")
        for name, given in CALLS[cls].items():
            for argument in given:
                for wrong in WRONG:
                    with pytest.raises(InvalidRequest, match=OTHERWISE.get(argument, argument)):
                        await finished(getattr(client, name), given | {argument: wrong})
        assert cluster.applied == [], "nothing took effect"


@pytest.mark.parametrize(
    ("cls", "name", "argument", "wrong"),
    [
        (Admin, "node_status", "node", ""),
        (Admin, "list_offsets", "group", ""),
        (OffsetAssigner, "assign", "request_id", ""),
        (OffsetAssigner, "assign", "not_before", -1),
        (Consumer, "commit", "offsets", ""),
        (Consumer, "committed", "partitions", ""),
        (Consumer, "search_page", "cursor", ""),
        (Consumer, "search_page", "end_offset", -1),
        (Consumer, "search", "follow", ""),
    ],
)
async def test_what_is_empty_or_negative_does_not_pass_for_nothing(
    cls: type, name: str, argument: str, wrong: Any
) -> None:
    async with cluster_of(1, t=1) as cluster, cls(cluster.servers, **OPTIONS.get(cls, {})) as client:
        with pytest.raises(InvalidRequest, match=argument):
            await finished(getattr(client, name), CALLS[cls][name] | {argument: wrong})


@pytest.mark.parametrize("wrong", ["3", [3], True, float("nan")])
def test_a_delivery_refuses_what_is_no_time(wrong: Any) -> None:
    with cluster_in_thread(1) as cluster, SyncProducer(cluster.servers) as producer:
        delivery = producer.send("t", b"v", partition=0)
        with pytest.raises(InvalidRequest, match="timeout must be a number of seconds"):
            delivery.result(wrong)
