"""The client matrix: each client does everything that it can, and reads what every other has written.

What holds is kept in docs/generate/kafka-clients.json, from which `make docs` renders a table: a client that loses a
capability, or wins one, fails here. Clients of other languages, and all pairs, are for `-m full`;
`pytest -m full tests/kafka/test_foreign.py --rewrite` rewrites the file.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smq.testing.cluster import Cluster
from smq.testing.node_process import wait_for
from tests.kafka.client_adapters import Item, bootstrap
from tests.kafka.foreign.clients import BUILDS, Missing, start
from tests.kafka.foreign.driver import Client

pytestmark = pytest.mark.timeout(600)

MATRIX = Path(__file__).resolve().parents[2] / "docs/generate/kafka-clients.json"
NOW_MS = time.time_ns() // 1_000_000
ITEMS = [  # text alone: kcat takes nothing else on its command line
    Item(b"k", b"plain", NOW_MS - 50_000, (("h", b"1"), ("other", b"zwei"))),
    Item(None, b"no key", NOW_MS - 40_000),
    Item(b"gone", None, NOW_MS - 30_000),
    *(Item(b"%d" % i, b"many" * 50, NOW_MS - 20_000 + i) for i in range(5)),
]


PYTHON = ("confluent-kafka", "kafka-python", "aiokafka")  # they are here wherever these tests are
EACH = [pytest.param(name, marks=() if name in PYTHON else pytest.mark.full) for name in BUILDS]


class Clients:
    """Each is started when it is first needed, and writes its topic once."""

    def __init__(self, cluster: Cluster, build: Path) -> None:
        self._cluster = cluster
        self._build = build
        self._started: dict[str, Client | Missing] = {}
        self._written: set[str] = set()
        self._transactions: dict[str, str] = {}
        self.fenced: dict[str, str] = {}  # the error of each client's fenced producer
        self.matrix: dict[str, dict[str, Any]] = {}

    def get(self, name: str) -> Client:
        if name not in self._started:
            try:
                self._started[name] = start(name, bootstrap(self._cluster), self._build)
            except Missing as e:
                self._started[name] = e
        found = self._started[name]
        if isinstance(found, Missing):
            pytest.skip(f"{name}: {found}")
        return found

    def written(self, name: str) -> tuple[str, list[Item]]:
        """A topic that the client has created and filled, in every codec it has, and what it meant by it."""
        client, topic = self.get(name), f"by-{name.split()[0]}"
        if name not in self._written:
            client.create(topic)
            self._cluster.wait_leader(topic, 0)
            for codec in client.codecs:
                client.produce(topic, codec, ITEMS)
            self._written.add(name)
        return topic, ITEMS * len(client.codecs)

    def transactions(self, name: str) -> str:
        """A topic in which the client has committed "0" and "2" and aborted "1", with a group's offsets."""
        if name not in self._transactions:
            topic = self._transactions[name] = self._cluster.make_topic()
            self.fenced[name] = self.get(name).transact(topic)
        return self._transactions[name]

    def note(self, name: str, **capabilities: Any) -> None:
        self.matrix.setdefault(name, {}).update(capabilities)

    def close(self) -> None:
        for client in self._started.values():
            if isinstance(client, Client):
                client.close()


@pytest.fixture(scope="module")
def clients(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    made = Clients(cluster, tmp_path_factory.mktemp("clients"))
    yield made
    made.close()


def _timeless(items: list[Item]) -> list[Item]:
    return [replace(item, timestamp_ms=0) for item in items]


@pytest.mark.full
@pytest.mark.parametrize("writer", BUILDS)
@pytest.mark.parametrize("reader", BUILDS)
def test_a_client_reads_what_another_wrote_in_every_codec(clients: Clients, reader: str, writer: str) -> None:
    topic, expected = clients.written(writer)
    found = clients.get(reader).read(topic, len(expected))
    if clients.get(writer).is_timed:
        assert found == expected
    else:
        assert _timeless(found) == _timeless(expected)
        assert all(NOW_MS - 60_000 < item.timestamp_ms <= time.time_ns() // 1_000_000 for item in found)
    client = clients.get(reader)
    clients.note(reader, version=client.version, writes=client.codecs)
    read = clients.matrix[reader].get("reads", [])
    clients.note(reader, reads=sorted({*read, writer}, key=list(BUILDS).index))


@pytest.mark.parametrize("name", EACH)
def test_a_group_continues_from_its_commit(cluster: Cluster, clients: Clients, name: str) -> None:
    topic, expected = clients.written(name)
    client, group = clients.get(name), f"group-{name.split()[0]}"
    first = len(expected) // 2
    assert client.group(topic, group, first) == list(range(first))
    assert cluster.nodes[1].raw.committed(f"kafka-cg-{group}", topic, 0) == first
    assert client.group(topic, group, len(expected) - first) == list(range(first, len(expected)))
    assert cluster.nodes[2].raw.committed(f"kafka-cg-{group}", topic, 0) == len(expected)
    clients.note(name, group=True)


@pytest.mark.parametrize("name", EACH)
def test_a_client_seeks_to_a_time(clients: Clients, name: str) -> None:
    topic, expected = clients.written(name)
    client = clients.get(name)
    times = [item.timestamp_ms for item in client.read(topic, len(expected))]
    for wanted in {times[0], times[2], max(times)}:
        assert client.at_time(topic, wanted) == next(i for i, at in enumerate(times) if at >= wanted)
    clients.note(name, time=True)


TRANSACTIONAL = tuple(name for name in BUILDS if name != "kcat")  # kcat writes no transactions, and reads committed


@pytest.mark.parametrize("name", [each for each in EACH if each.values[0] in TRANSACTIONAL])
def test_a_client_commits_aborts_and_is_fenced(cluster: Cluster, clients: Clients, name: str) -> None:
    client, topic = clients.get(name), clients.transactions(name)
    assert client.is_transactional
    assert clients.fenced[name] not in ("", "none")
    asked = f"kafka-cg-group-{topic}"
    wait_for("the offset of the last commit", lambda: cluster.nodes[1].raw.committed(asked, topic, 0) == 2, 30)
    clients.note(name, transactions=True)


@pytest.mark.full
@pytest.mark.parametrize("reader", BUILDS)
@pytest.mark.parametrize("writer", TRANSACTIONAL)
def test_a_committed_reader_leaves_out_what_another_client_aborted(clients: Clients, reader: str, writer: str) -> None:
    assert clients.get(reader).committed(clients.transactions(writer), 2) == [b"0", b"2"]
    read = clients.matrix.get(reader, {}).get("committed", [])
    clients.note(reader, committed=sorted({*read, writer}, key=list(BUILDS).index))


@pytest.mark.full
def test_the_matrix_is_the_documented_one(clients: Clients, request: pytest.FixtureRequest) -> None:
    """Runs last, over what the tests above have shown; of clients that are missing here nothing is said."""
    shown = {name: clients.matrix[name] for name in BUILDS if name in clients.matrix}
    if request.config.getoption("--rewrite"):
        assert list(shown) == list(BUILDS), "only a machine with all clients can write the matrix"
        MATRIX.write_text(json.dumps(shown, indent=2) + "\n")
    saved = json.loads(MATRIX.read_text())
    for name, row in shown.items():
        known = {key: saved[name][key] for key in row}  # what `make test` shows of a client may not have been run here
        for key in ("reads", "committed"):
            known[key] = [other for other in known.get(key, []) if other in shown]
        assert row == known | {"version": row["version"]}, name
