"""A mirror between two nodes: what stops one partition, what it says, and that nothing here changes by it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner

from smq.clients import Admin
from smq.clients.cluster import ClusterClient
from smq.clients.pb import smq_pb2 as pb
from smq.clients.types import CommittedOffset
from smq.coordinator.cli.mirror import copying
from smq.coordinator.cli.mirror.comparing import Compared, compare
from smq.coordinator.cli.mirror.copying import Mirror
from smq.coordinator.cli.mirror.kafka_side import KafkaSide, Piece, Place, client_options
from smq.coordinator.cli.mirror.returning import end_transactions, give_back, source_producer
from smq.coordinator.cli.mirror.settings import KafkaSettings, MirrorSettings, load
from smq.coordinator.cli.mirror.target import Target
from smq.coordinator.cli.root import cli
from smq.coordinator.config.addresses import format_address
from smq.coordinator.user_errors import ConfigError, UserError
from smq.raft_state.errors import SmqError
from smq.records import NewRecord, encode_batch
from smq.testing.served import Served, publish_request, served_node
from tests.unit.coordinator.grpc.test_mirror import at, opened, records

ANY_PORT = ("127.0.0.1", 0)


def address(served: Served, *, is_kafka: bool = False) -> str:
    found = served.server.kafka_address if is_kafka else served.server.grpc_address
    assert found is not None
    return format_address(found)


@dataclass
class Pair:
    there: Served
    here: Served
    said: list[str] = field(default_factory=list)

    async def mirror(self, share: tuple[int, int] = (0, 1)) -> Mirror:
        """Copies everything."""
        async with self._mirror(share) as made:
            await made.run(once=True)
        return made

    @property
    def settings(self) -> MirrorSettings:
        return MirrorSettings(source=KafkaSettings(bootstrap=address(self.there, is_kafka=True)), topics=("t",))

    @asynccontextmanager
    async def _mirror(self, share: tuple[int, int] = (0, 1)) -> AsyncIterator[Mirror]:
        settings = self.settings
        cluster = ClusterClient(address(self.here))
        await cluster.start()
        async with Admin(address(self.here)) as admin, self.sides() as (source, here):
            yield Mirror(settings, source, here, admin, Target(cluster), self.said.append, share)
        await cluster.close()

    @asynccontextmanager
    async def sides(self) -> AsyncIterator[tuple[KafkaSide, KafkaSide]]:
        sides = [KafkaSide(KafkaSettings(bootstrap=address(s, is_kafka=True)), "side") for s in (self.there, self.here)]
        async with sides[0] as there, sides[1] as here:
            yield there, here

    async def compare(self) -> Compared:
        async with self.sides() as (there, here):
            return await compare(there, here, ("t", 0), is_compacted=False)

    async def end(self) -> int:
        async with Admin(address(self.here)) as admin:
            return (await admin.partition_range("t", 0)).next_offset


@pytest.fixture
def pair(tmp_path: Path) -> AbstractAsyncContextManager[Pair]:
    """The other cluster has ten records in two batches, and all are copied."""
    return _pair(tmp_path)


@asynccontextmanager
async def _pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with (
        served_node(tmp_path / "there", kafka_address=ANY_PORT) as there,
        served_node(tmp_path / "here", kafka_address=ANY_PORT) as here,
    ):
        await there.create(config={"retention.ms": "-1", "max.message.bytes": "2000000"})
        await there.fill([5, 5])
        made = Pair(there, here)
        assert not (await made.mirror()).problems
        yield made


async def remade(pair: Pair, *counts: int, value: bytes = b"other") -> None:
    async with Admin(address(pair.there)) as admin:
        await admin.delete_topic("t")
    await pair.there.create()
    await pair.there.publish(*(publish_request([value] * count, correlation_id=i) for i, count in enumerate(counts)))


async def test_a_topic_that_was_made_again_stops_and_the_copy_stays(pair: Pair) -> None:
    for counts, words in (
        ((3,), "the source ends at 3, and the copy at 10"),
        ((5, 5, 5), "other records at offsets 0, 1, 2"),
    ):
        await remade(pair, *counts)
        (problem,) = (await pair.mirror()).problems
        assert words in problem
        assert await pair.end() == 10


async def test_what_the_source_deletes_before_it_is_copied_leaves_a_gap(pair: Pair) -> None:
    await pair.there.fill([5, 5])
    async with Admin(address(pair.there)) as admin:
        await admin.delete_records("t", 0, 15)
    assert not (await pair.mirror()).problems
    assert pair.said == ["t/0: the source deleted offsets 10 to 14 before they were copied"]
    compared = await pair.compare()
    assert (compared.start, compared.stop, compared.records, compared.is_copy) == (15, 20, 5, True)


async def test_a_topic_that_the_source_deletes_stops_and_its_copy_stays(pair: Pair) -> None:
    async with pair._mirror() as mirror:
        await mirror.look()
        async with Admin(address(pair.there)) as admin:
            await admin.delete_topic("t")
        await mirror.look()
    assert mirror.problems == ["t/0: the source has deleted the topic; its copy here is kept"]
    assert await pair.end() == 10


async def test_a_topic_with_producers_of_its_own_is_left_alone(pair: Pair) -> None:
    async with Admin(address(pair.here)) as admin:
        assert (await admin.describe_topic("t")).config == {"max.message.bytes": "2000000", "mirrored": "true"}
    await opened(pair.here)
    await pair.here.publish(publish_request([b"own"]))
    async with Admin(address(pair.there)) as there, Admin(address(pair.here)) as here:
        await there.commit_offsets("kafka-cg-a", {("t", 0): 4})
        (problem,) = (await pair.mirror()).problems
        assert await here.fetch_offsets("kafka-cg-a") == {}
    assert "exists here and has producers of its own" in problem
    assert await pair.end() == 11


async def test_a_commit_waits_for_the_records_that_another_mirror_copies(pair: Pair) -> None:
    async with Admin(address(pair.there)) as there, Admin(address(pair.here)) as here:
        await there.add_partitions("t", 2)
        await pair.there.fill([3], partition=1)
        await there.commit_offsets("kafka-cg-a", {("t", 0): 4, ("t", 1): 2})
        await pair.mirror((0, 2))
        assert (await here.fetch_offsets("kafka-cg-a")).keys() == {("t", 0)}
        await pair.mirror((1, 2))
        await pair.mirror((0, 2))
        assert (await here.fetch_offsets("kafka-cg-a")).keys() == {("t", 0), ("t", 1)}


async def test_a_commit_that_is_further_here_is_kept_and_any_other_follows(pair: Pair) -> None:
    async with Admin(address(pair.there)) as there, Admin(address(pair.here)) as here:
        for group, offset, own in (("a", 4, None), ("b", 4, 3), ("c", 4, 6)):
            await there.commit_offsets(f"kafka-cg-{group}", {("t", 0): offset})
            if own is not None:
                await here.commit_offsets(f"kafka-cg-{group}", {("t", 0): own})
        await pair.mirror()
        found = [await here.fetch_offsets(f"kafka-cg-{group}") for group in "abc"]
    assert found == [{("t", 0): CommittedOffset(offset=offset, metadata="")} for offset in (4, 4, 6)]
    assert pair.said == ["group c: 6 of t/0 is kept here; the source has 4"]


async def test_two_mirrors_at_once_make_one_copy(pair: Pair) -> None:
    await pair.there.fill([3] * 40)
    made = await asyncio.gather(pair.mirror(), pair.mirror())
    assert [m.problems for m in made] == [[], []]
    compared = await pair.compare()
    assert (compared.records, compared.is_copy, compared.equal_ranges) == (130, True, 1)


@pytest.mark.parametrize(
    ("policy", "silent_looks", "patience_s", "records"),
    [("delete", 4, 0.0, 22), ("compact", 4, 60.0, 22), ("compact", 1_000, 0.0, 10)],
)
async def test_only_compaction_leaves_nothing_up_to_the_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, policy: str, silent_looks: int, patience_s: float, records: int
) -> None:
    """The source's answers are empty for a while: it cannot read its records, or has none."""
    await pair.there.fill([3] * 4)
    async with Admin(address(pair.there)) as admin:
        await admin.alter_topic("t", set={"cleanup.policy": policy})
    fetch, looks = KafkaSide.fetch, 0

    async def silent(
        self: KafkaSide, node: int, offsets: list[tuple[Place, int]], wait_ms: int, *more: int
    ) -> list[Piece]:
        nonlocal looks
        pieces = await fetch(self, node, offsets, wait_ms, *more)
        looks += wait_ms == copying.WAIT_MS
        return [p._replace(batches=[]) if wait_ms == copying.WAIT_MS and looks <= silent_looks else p for p in pieces]

    monkeypatch.setattr(KafkaSide, "fetch", silent)
    monkeypatch.setattr(copying, "EMPTY_S", patience_s)
    assert (await pair.mirror()).problems == []
    monkeypatch.undo()
    assert ((await pair.compare()).records, await pair.end()) == (records, 22)


async def test_a_record_that_differs_is_found(pair: Pair) -> None:
    await pair.there.fill([2, 1])
    await pair.here.publish(publish_forged(at(10, records(2))), publish_forged(at(12, records(3))), is_mirror=True)
    compared = await pair.compare()
    assert (compared.records, compared.differing, compared.shown, compared.is_copy) == (10, 3, [10, 11, 12], False)


async def test_what_arrived_here_flows_back_unless_it_cannot_have_its_offset(pair: Pair) -> None:
    settings = pair.settings
    async with source_producer(settings) as producer:
        await opened(pair.here)
        await pair.here.fill([3, 2])
        async with pair.sides() as (there, here):
            assert await give_back(there, here, producer, ("t", 0)) == 5
            assert await give_back(there, here, producer, ("t", 0)) == 0  # run again
        assert (await pair.compare()).records == 15
        await pair.there.fill([1])
        async with pair.sides() as (there, here):
            with pytest.raises(UserError, match="ends at 16 of t/0, and here are offsets 0 to 14"):
                await give_back(there, here, producer, ("t", 0))
        await pair.here.publish(publish_request([b"other"]))
        async with pair.sides() as (there, here):
            with pytest.raises(UserError, match="other records at t/0, at 15"):
                await give_back(there, here, producer, ("t", 0))


async def test_the_transactions_of_a_source_that_is_gone_are_aborted(pair: Pair) -> None:
    own = {"producer_id": 7, "producer_epoch": 2, "base_sequence": 0}
    open_one = encode_batch([NewRecord(None, b"open", 1)], is_transactional=True, **own)  # type: ignore[arg-type] # of the producer
    await pair.here.publish(publish_forged(at(10, open_one)), is_mirror=True)
    cluster = ClusterClient(address(pair.here))
    async with Admin(address(pair.here)) as admin, pair.sides() as (_, here):
        before = await admin.partition_range("t", 0)
        assert (before.lso, before.next_offset) == (10, 11)
        assert await end_transactions(here, Target(cluster), ("t", 0), before.lso, before.next_offset) == 1
        after = await admin.partition_range("t", 0)
        assert (after.lso, after.next_offset) == (12, 12)
    await cluster.close()


def publish_forged(batch: bytes) -> pb.PublishRecordRequest:
    request = publish_request([b""])
    request.batch = batch
    return request


async def test_a_node_that_names_no_kafka_address_asks_for_one_in_the_file(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "mirror.toml"
    path.write_text(f"topics = ['t']\n[source]\nbootstrap = '{address(pair.there, is_kafka=True)}'")
    async with served_node(tmp_path / "other") as other:
        words = ["mirror", "verify", "--config", str(path), "--bootstrap", address(other)]
        result = await asyncio.to_thread(CliRunner().invoke, cli, words)
    assert "as [target_kafka]" in result.output


@pytest.mark.parametrize(("mode", "words"), [(0o600, ""), (0o640, "others may read"), (0o604, "others may read")])
def test_a_password_is_taken_from_a_file_of_this_account_alone(tmp_path: Path, mode: int, words: str) -> None:
    path = tmp_path / "password"
    path.write_bytes(b"secret\r\nmore")
    path.chmod(mode)
    way = KafkaSettings(bootstrap="a:1", security_protocol="SASL_SSL", username="u", password_file=str(path))
    with pytest.raises(SmqError, match=words) if words else nullcontext():
        assert client_options(way)["sasl_plain_password"] == "secret"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "source, topics must be set"),
        ("topics = []\nsource = 1", "write \\[source\\]"),
        ("topics = []\nspeed = 1\n[source]\nbootstrap='a:1'", "unknown speed"),
        ("topics = ['(']\n[source]\nbootstrap='a:1'", "no regular expression"),
        ("topics = []\nbytes_per_second = -1\n[source]\nbootstrap='a:1'", "a number from 0"),
        ("topics = []\n[source]\nbootstrap=1", "bootstrap is a text"),
        ("topics = []\n[source", "mirror.toml"),
    ],
)
def test_a_file_with_a_mistake_is_refused_by_its_key(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mirror.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load(path)
