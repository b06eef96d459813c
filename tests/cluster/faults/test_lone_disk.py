"""Two of three disks are lost: `smq disk export` reads what the third one has, without a cluster."""

import json
from pathlib import Path
from typing import Any

from smq.clients import SyncAdmin, SyncProducer
from smq.raft_state.ids import PartitionId
from smq.replication.log.stored_batch import batch_key
from smq.replication.ports import Put, Table
from smq.replication.storage.directory import DirectoryInUse
from smq.replication.storage.offline import OfflineDisk
from smq.testing.cluster import Cluster
from smq.testing.node_process import run_cli, wait_for

SURVIVOR = 2
COMPACTED_S = 90.0  # it is looked for every 15 s


def test_a_lone_disk_gives_what_its_cluster_had_and_names_what_is_damaged(own_cluster: Cluster, tmp_path: Path) -> None:
    cluster = own_cluster.start()
    plain, open_, kept = (
        cluster.make_topic(2),
        cluster.make_topic(),
        cluster.make_topic(config={"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}),
    )
    with SyncProducer(cluster.servers) as producer:
        for n in range(40):
            producer.send(plain, b"\xff%d" % n, b"k", [("h", b"%d" % n)], n % 2).result()  # a batch of its own
            producer.send(kept, b"%d" % n, b"k%d" % (n % 4)).result()
    with SyncProducer(cluster.servers, transactional_id="ends") as ends:
        for n, end in enumerate((ends.commit, ends.abort, ends.commit)):
            ends.begin()
            ends.send(plain, b"transaction %d" % n, partition=0).result()
            end()
    with SyncProducer(cluster.servers, transactional_id="open") as left:
        left.begin()
        left.send(open_, b"open").result()
        with SyncAdmin(cluster.servers) as admin:
            admin.commit_offsets("g", {(plain, 0): 7, (kept, 0): 4})
        of_survivor = ("consume", kept, "--from-replica", str(SURVIVOR), "--bootstrap", cluster.servers)
        wait_for("compaction", lambda: len(run_cli(*of_survivor).stdout.splitlines()) == 4, COMPACTED_S)
        before = {topic: _exported(cluster, topic, tmp_path) for topic in (plain, kept)}
        cluster.wait_converged(plain, 2)
        cluster.wait_digests_equal()
        cluster.make_topic()  # with its entry, each disk notes that the ones before it are committed
        cluster.wait_digests_equal()
        _refuses_a_running_node(cluster, tmp_path)
        cluster.kill(*cluster.nodes)
    wait_for("the survivor's directory is free", lambda: _damage(cluster, before[plain][5]))

    out = tmp_path / "out"
    done = run_cli("disk", "export", str(cluster.nodes[SURVIVOR].data_dir), "--output", str(out), "--json")
    assert done.returncode == 1, "a batch is damaged"
    report = json.loads(done.stdout)
    assert report == json.loads((out / "report.json").read_text())
    before[plain].pop(5)
    (gap,) = ({**p, **gap} for p in report["partitions"] for gap in p["missing"])
    assert (gap["topic"], gap["partition"], gap["lo"], gap["hi"]) == (plain, 0, 5, 6)
    assert "CRC" in gap["why"]
    for topic, rows in before.items():
        assert [row for path in sorted((out / "records" / topic).iterdir()) for row in _lines(path)] == rows
    assert [row["value"] for row in _lines(out / "records" / open_ / "0.uncertain.jsonl")] == ["open"]
    assert {p["topic"]: p["aborted"] for p in report["partitions"] if p["aborted"]} == {plain: 1}
    topics = {topic["name"]: topic for topic in json.loads((out / "topics.json").read_text())}
    assert topics[kept]["config"]["cleanup.policy"] == "compact"
    assert len(topics[plain]["partitions"]) == 2
    groups = json.loads((out / "groups.json").read_text())
    assert [(g["group"], {(o["topic"], o["offset"]) for o in g["offsets"]}) for g in groups] == [
        ("g", {(plain, 7), (kept, 4)})
    ]

    with_aborted = tmp_path / "with aborted"
    arguments = ["--output", str(with_aborted), "--topic", plain, "--isolation", "read_uncommitted"]
    done = run_cli("disk", "export", str(cluster.nodes[SURVIVOR].data_dir), *arguments)
    assert (done.returncode, f"missing: {plain}/0 [5, 6): " in done.stdout) == (1, True)
    values = [row.get("value") for row in _lines(with_aborted / "records" / plain / "0.jsonl")]
    assert [value for value in values if value] == [f"transaction {n}" for n in range(3)]


def _refuses_a_running_node(cluster: Cluster, tmp_path: Path) -> None:
    arguments = ["disk", "export", str(cluster.nodes[SURVIVOR].data_dir), "--output", str(tmp_path / "in use")]
    done = run_cli(*arguments)
    assert (done.returncode, "is in use by process" in done.stderr) == (1, True)
    assert not (tmp_path / "in use").exists()


def _exported(cluster: Cluster, topic: str, tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / f"{topic}.jsonl"
    done = run_cli("topic", "export", topic, "--output", str(path), "--bootstrap", cluster.servers)
    assert done.returncode == 0, done.stderr
    return _lines(path)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _damage(cluster: Cluster, record: dict[str, Any]) -> bool:
    """Flips a bit of the batch with this record, which is its only one."""
    try:
        with OfflineDisk(cluster.nodes[SURVIVOR].data_dir) as opened:
            ((pid, value),) = (
                (PartitionId(key[:20]), value)
                for key, value in opened.disk.scan(Table.BATCHES, b"", b"\xff" * 32)
                if value[16:24] == record["_index"].to_bytes(8, "big") and b"\xff%d" % (2 * record["_index"]) in value
            )
            value = value[:-1] + bytes([value[-1] ^ 1])
            opened.disk.submit([Put(Table.BATCHES, batch_key(pid, record["_index"]), value)])
    except DirectoryInUse:
        return False
    return True
