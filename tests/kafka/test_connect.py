"""Kafka Connect in distributed mode against three nodes: a file goes to a topic, and from there to another file.

A worker keeps nothing but three compacted topics, which it makes itself: the configuration of the connectors, how far
each source has read, and what runs where. So after kill -9 all of it comes from what compaction has left there.
"""

import json
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from smq.coordinator.cli.cluster_dir import free_ports
from smq.testing.cluster import Cluster, live_cluster
from smq.testing.node_process import wait_for
from tests.kafka.client_adapters import bootstrap
from tests.kafka.foreign.clients import Missing, copied, run
from tests.kafka.foreign.jvm import JVM_S, Jvm
from tests.kafka.reading import messages

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

TOPIC, PARTITIONS = "lines", 3
INTERNAL = {"connect-configs": 1, "connect-offsets": 2, "connect-status": 2}  # and their partitions
STEP, PART = 100, 60_000  # lines
BATCH_SIZES = (100, 200, 300)  # of the source: each is a new version of its configuration
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, whatever the environment says

SETTINGS = """\
bootstrap.servers={servers}
listeners=http://127.0.0.1:{port}
group.id=workers
key.converter=org.apache.kafka.connect.storage.StringConverter
value.converter=org.apache.kafka.connect.storage.StringConverter
config.storage.topic=connect-configs
config.storage.replication.factor=3
config.storage.min.cleanable.dirty.ratio=0
offset.storage.topic=connect-offsets
offset.storage.partitions=2
offset.storage.replication.factor=3
offset.storage.min.cleanable.dirty.ratio=0
status.storage.topic=connect-status
status.storage.partitions=2
status.storage.replication.factor=3
status.storage.min.cleanable.dirty.ratio=0
offset.flush.interval.ms=200
session.timeout.ms=6000
heartbeat.interval.ms=1000
scheduled.rebalance.max.delay.ms=0
"""


@pytest.fixture(scope="module")
def jars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = copied("connect", tmp_path_factory.mktemp("java"))
    try:
        run(directory, "mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars")
    except Missing as e:
        pytest.skip(str(e))
    return directory / "jars"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with live_cluster(tmp_path / "cluster", compaction_check_ms=500) as made:
        made.nodes[1].raw.create_topic(TOPIC, PARTITIONS, replication_factor=3)
        yield made


class Worker:
    """One worker, its two files, and its REST interface."""

    def __init__(self, cluster: Cluster, jars: Path, root: Path) -> None:
        self.servers = bootstrap(cluster)
        self._jars = jars
        self._root = root
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}/"
        self._settings = root / "worker.properties"
        self._settings.write_text(SETTINGS.format(servers=self.servers, port=port))
        self.source, self.sink = root / "source.txt", root / "sink.txt"
        self.source.touch()
        self.sink.touch()
        self.lines = 0
        self._runs = count(1)
        self._jvm = self._started()

    def _started(self) -> Jvm:
        command = ["-cp", f"{self._jars}/*", "org.apache.kafka.connect.cli.ConnectDistributed", str(self._settings)]
        return Jvm(command, self._root / f"connect-{next(self._runs)}.log", self._root)

    def restart(self) -> None:
        self._jvm.kill()
        self._jvm = self._started()

    def stop(self) -> None:
        self._jvm.stop()

    def ask(self, path: str, config: dict[str, str] | None = None) -> Any:
        """The answer to a GET, or to a PUT of `config`; waits until the worker is up and has balanced its work."""
        body = json.dumps(config).encode() if config is not None else None
        method = "GET" if body is None else "PUT"
        request = urllib.request.Request(self._url + path, body, {"Content-Type": "application/json"}, method=method)
        return wait_for(f"an answer of {path}", partial(self._answer, request), JVM_S)

    def _answer(self, request: urllib.request.Request) -> Any:
        self._jvm.check()
        try:
            with _DIRECT.open(request, timeout=JVM_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as e:
            if e.code not in (404, 409, 503):  # it is starting, or rebalancing
                raise
        except (urllib.error.URLError, ConnectionError):
            pass  # it does not listen yet
        return None

    def write(self, lines: int) -> None:
        """To the source's file."""
        with self.source.open("a") as file:
            file.writelines(f"<{n:06}>\n" for n in range(self.lines, self.lines + lines))
        self.lines += lines

    def position(self) -> int:
        """How many bytes of its file the source has read, by what it has committed; -1 if it has not yet."""
        self._jvm.check()
        offsets = self.ask("connectors/source/offsets")["offsets"]
        return int(offsets[0]["offset"]["position"]) if offsets else -1

    def wait_committed(self) -> None:
        """Returns once the source has committed all of its file."""
        size = self.source.stat().st_size
        wait_for(f"the source has committed {size} bytes", lambda: self.position() == size, JVM_S)

    def written(self) -> list[int]:
        """The lines in the sink's file. One that the kill has cut off is none."""
        self._jvm.check()
        return lines_of(self.sink.read_text())

    def wait_sunk(self) -> None:
        """Returns once every line is in the sink's file."""
        wait_for("every line is in the sink", lambda: len(set(self.written())) == self.lines, JVM_S)


def lines_of(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"<(\d{6})>", text)]


@pytest.fixture
def worker(cluster: Cluster, jars: Path, tmp_path: Path) -> Iterator[Worker]:
    made = Worker(cluster, jars, tmp_path)
    yield made
    made.stop()


def test_a_file_reaches_another_through_the_death_of_the_worker(cluster: Cluster, worker: Worker) -> None:
    files = "org.apache.kafka.connect.file.FileStream"
    for size in BATCH_SIZES:
        source = {"connector.class": f"{files}SourceConnector", "file": str(worker.source), "topic": TOPIC}
        source |= {"batch.size": str(size), "tasks.max": "1"}
        worker.ask("connectors/source/config", source)
    sink = {"connector.class": f"{files}SinkConnector", "file": str(worker.sink), "topics": TOPIC, "tasks.max": "1"}
    worker.ask("connectors/sink/config", sink)
    for _ in range(5):
        worker.write(STEP)
        worker.wait_committed()
    worker.wait_sunk()
    committed = worker.position()
    _await_compacted(cluster, worker)

    worker.write(PART)
    early = worker.lines - PART
    wait_for("some of it is in the sink", lambda: len(worker.written()) > early + STEP, JVM_S)
    worker.restart()
    assert len(set(lines_of(worker.sink.read_text()))) < worker.lines, "it has died in the middle of its work"
    assert sorted(worker.ask("connectors")) == ["sink", "source"]
    assert worker.ask("connectors/source")["config"] == source | {"name": "source"}
    assert worker.ask("connectors/sink")["config"] == sink | {"name": "sink"}
    assert worker.position() >= committed
    worker.write(STEP)
    worker.wait_committed()
    worker.wait_sunk()

    _is_whole_and_in_order(worker, _held(worker), early)
    cluster.wait_digests_equal()


def _held(worker: Worker) -> list[list[int]]:
    """The lines of each partition."""
    found = messages(worker.servers, TOPIC, partitions=PARTITIONS)
    return [[int((message.value() or b"").strip(b"<>")) for message in partition] for partition in found]


def _is_whole_and_in_order(worker: Worker, held: list[list[int]], early: int) -> None:
    """The source has sent each line, and those before `early` once; the sink has written each partition in order."""
    times = Counter(line for partition in held for line in partition)
    assert times.keys() == set(range(worker.lines))
    assert all(times[line] == 1 for line in range(early)), "the source went on from the offset that it had committed"
    first_written = list(dict.fromkeys(worker.written()))
    for partition in held:
        assert sum(after < before for before, after in pairwise(partition)) <= 1, (
            "it went back once, when it was killed"
        )
        alone = {line for line, found in Counter(partition).items() if found == times[line]}  # in no other partition
        assert [line for line in first_written if line in alone] == [n for n in dict.fromkeys(partition) if n in alone]


def _await_compacted(cluster: Cluster, worker: Worker) -> None:
    """Each internal topic has the policy that Connect has asked for, and has lost records by it."""
    for described in cluster.nodes[1].raw.describe(*INTERNAL).topics:
        assert described.config["cleanup.policy"] == "compact", described.name
    settings = {"bootstrap.servers": worker.servers, "group.id": "none"}
    with closing(confluent_kafka.Consumer(settings)) as consumer:

        def is_compacted(topic: str, partitions: int) -> bool:
            places = [confluent_kafka.TopicPartition(topic, p) for p in range(partitions)]
            written = sum(consumer.get_watermark_offsets(place, JVM_S)[1] for place in places)
            return sum(map(len, messages(worker.servers, topic, partitions=partitions))) < written

        for topic, partitions in INTERNAL.items():
            wait_for(f"{topic} is compacted", partial(is_compacted, topic, partitions), JVM_S)
