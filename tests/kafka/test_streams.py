"""Kafka Streams against three nodes: a stateful count survives kill -9 of the program, of its state and of a node.

Streams makes its own topics with its own settings. What it deletes from the repartition topic has to go, and the
changelog, which is all that is left of the state, has to be compacted without losing the last count of any word.
"""

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import confluent_kafka
import pytest

from smq.testing.cluster import Cluster, live_cluster
from smq.testing.node_process import wait_for
from tests.kafka.client_adapters import bootstrap
from tests.kafka.foreign.clients import Missing, copied, run
from tests.kafka.foreign.jvm import JVM_S, Jvm
from tests.kafka.reading import messages

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

PARTITIONS = 3
LINES, WORDS_A_LINE = 10_000, 5  # in each of three parts
WORDS = [f"word-{n}" for n in range(40)]
CHANGELOG, REPARTITION = "words-count-changelog", "words-word-repartition"
GROUP = "words"
EXACT = "exactly_once_v2"
SEED = 17


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = copied("streams", tmp_path_factory.mktemp("java"))
    try:
        run(directory, "mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars")
        run(directory, "javac", "-d", "classes", "-cp", "jars/*", "WordCount.java")
    except Missing as e:
        pytest.skip(str(e))
    return directory


class Counting:
    """The program, the words that it was given, and what the topics say of its progress."""

    def __init__(self, cluster: Cluster, program: Path, root: Path, guarantee: str) -> None:
        self._cluster = cluster
        self._program = program
        self._root = root
        self.guarantee = guarantee
        self._runs = count(1)
        self._rng = random.Random(SEED)
        self._state = root / "state"
        self.given: Counter[str] = Counter()
        self.jvm = self._started()

    @property
    def servers(self) -> str:
        return bootstrap(self._cluster)

    def _started(self) -> Jvm:
        path = f"{self._program}/classes:{self._program}/jars/*"
        command = ["-cp", path, "WordCount", self.servers, self.guarantee, str(self._state)]
        return Jvm(command, self._root / f"streams-{next(self._runs)}.log", self._root)

    def write(self) -> None:
        """One part of the input."""
        errors: list[object] = []
        producer = confluent_kafka.Producer({"bootstrap.servers": self.servers, "enable.idempotence": True})
        for n in range(LINES):
            words = self._rng.choices(WORDS, k=WORDS_A_LINE)
            self.given.update(words)
            line = " ".join(words).encode()
            producer.produce("lines", line, partition=n % PARTITIONS, on_delivery=lambda error, _: errors.append(error))
            producer.poll(0)
        assert producer.flush(JVM_S) == 0
        assert errors == [None] * LINES

    def is_all_counted(self) -> bool:
        """True if nothing is left beyond what the program has committed, in the input and between its two steps."""
        self.jvm.check()
        return all(not self._left(topic) for topic in ("lines", REPARTITION))

    def _left(self, topic: str) -> int:
        places = [confluent_kafka.TopicPartition(topic, p) for p in range(PARTITIONS)]
        settings = {"bootstrap.servers": self.servers, "group.id": GROUP}
        with closing(confluent_kafka.Consumer(settings)) as consumer:
            offsets = [place.offset for place in consumer.committed(places, JVM_S)]
        if min(offsets) < 0:
            return -1
        return sum(map(len, messages(self.servers, topic, partitions=PARTITIONS, starts=offsets)))

    def wait_written(self, topic: str, records: int) -> None:
        """Returns once so much has been written to the topic, in whatever transactions."""
        consumer = confluent_kafka.Consumer({"bootstrap.servers": self.servers, "group.id": "none"})
        places = [confluent_kafka.TopicPartition(topic, p) for p in range(PARTITIONS)]
        with closing(consumer):

            def is_written() -> bool:
                self.jvm.check()
                return sum(consumer.get_watermark_offsets(place, JVM_S)[1] for place in places) >= records

            wait_for(f"{records} records in {topic}", is_written, JVM_S)

    def kill_and_wipe(self) -> int:
        """Starts it again with nothing of its state; the number of records from which it has restored it."""
        self.jvm.kill()
        assert self._left(REPARTITION), "it has died in the middle of its work"
        shutil.rmtree(self._state)
        self.jvm = self._started()
        self.jvm.wait_line("running")
        return sum(int(records) for _, topic, _, records in self.jvm.lines("restored") if topic == CHANGELOG)

    def counts(self, topic: str) -> dict[str, list[bytes]]:
        """Of each word, every count that a committed reader gets, in order."""
        found: dict[str, list[bytes]] = {}
        for partition in messages(self.servers, topic, partitions=PARTITIONS):
            for message in partition:
                found.setdefault((message.key() or b"").decode(), []).append(message.value() or b"")
        return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """One for each test: nodes die."""
    with live_cluster(tmp_path / "cluster", compaction_check_ms=500) as made:
        for topic in ("lines", "counts"):
            made.nodes[1].raw.create_topic(topic, PARTITIONS, replication_factor=3)
            for partition in range(PARTITIONS):
                made.wait_leader(topic, partition)
        yield made


@pytest.fixture(params=["at_least_once", EXACT])
def words(request: pytest.FixtureRequest, cluster: Cluster, program: Path, tmp_path: Path) -> Iterator[Counting]:
    made = Counting(cluster, program, tmp_path, request.param)
    yield made
    made.jvm.stop()


def test_counts_survive_the_death_of_the_program_of_its_state_and_of_a_node(
    cluster: Cluster, words: Counting, record_property: Callable[[str, object], None]
) -> None:
    words.jvm.wait_line("running")
    (changelog,) = cluster.nodes[1].raw.describe(CHANGELOG).topics
    assert changelog.config["cleanup.policy"] == "compact", "as Streams has asked for it"
    words.write()
    wait_for("all of the first part is counted", words.is_all_counted, JVM_S)
    _await_compacted(words)
    _await_purged(words)

    words.write()
    part = LINES * WORDS_A_LINE
    words.wait_written("counts", part + part // 4)
    restored = words.kill_and_wipe()
    assert len(WORDS) <= restored
    assert restored < part, "restored from what compaction had left"

    words.write()
    words.wait_written("counts", 2 * part + part // 4)
    leader = cluster.wait_leader(CHANGELOG, 0)
    cluster.kill(leader)
    wait_for("all is counted without the node", words.is_all_counted, JVM_S)
    cluster.restart(leader)
    words.jvm.stop()

    found = words.counts("counts")
    given, counted = words.given.total(), sum(map(len, found.values()))
    written = sum(map(len, messages(words.servers, "counts", partitions=PARTITIONS, isolation="read_uncommitted")))
    told = f"{words.guarantee}: {given} words in, {counted} counts out, {written} in the logs"
    record_property("counts", f"{told}; {restored} of {part} records restored; a program, its state and a node died")
    assert found.keys() == words.given.keys()
    last = {word: max(map(int, counts)) for word, counts in found.items()}
    if words.guarantee == EXACT:
        assert found == {word: [b"%d" % n for n in range(1, total + 1)] for word, total in words.given.items()}
    else:
        assert not {word: (last[word], total) for word, total in words.given.items() if last[word] < total}
    state = {word: int.from_bytes(values[-1]) for word, values in words.counts(CHANGELOG).items()}
    assert state == last
    cluster.wait_converged(CHANGELOG, PARTITIONS)
    cluster.wait_digests_equal()


def _await_compacted(words: Counting) -> None:
    """The changelog still has a count of each word, and not many of those before."""

    def is_compacted() -> bool:
        held = words.counts(CHANGELOG)
        return held.keys() == words.given.keys() and sum(map(len, held.values())) < words.given.total() // 2

    wait_for("the changelog is compacted", is_compacted, JVM_S)


def _await_purged(words: Counting) -> None:
    """What Streams has read between its two steps, it deletes."""

    def is_purged() -> bool:
        return sum(map(len, messages(words.servers, REPARTITION, partitions=PARTITIONS))) < words.given.total() // 2

    wait_for("the repartition topic is purged", is_purged, JVM_S)
