"""The parts of the live harness by themselves: proxies, the switch's rules, listening sockets, hooks, the ledger."""

import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from chaos_tests.checkers.judge import judge
from chaos_tests.live.environment import sockets
from chaos_tests.live.environment.links import Link, Links, both
from chaos_tests.live.environment.proxies import ProxyNetwork
from chaos_tests.live.environment.switch import Switch
from chaos_tests.live.external_cluster import HooksError, read_hooks
from chaos_tests.live.faults import network as network_faults
from chaos_tests.live.faults.kinds import Arena, has_complete_tree, hostile
from chaos_tests.live.faults.planted import PLANTED, Plant
from chaos_tests.live.fleet import Fleet
from chaos_tests.live.load.groups import TeamMember
from chaos_tests.live.load.grpc import Ack, Partition, SharedRecorder, World
from chaos_tests.live.load.kafka import reach
from chaos_tests.live.report import ledger
from chaos_tests.live.report.campaign_page import write_index, write_reports
from chaos_tests.live.report.summary import Struck, failover_ms
from chaos_tests.sim.ledger import Ledger, Totals
from chaos_tests.sim.long_runs import RUN, LongRun
from chaos_tests.sim.replacement import planted
from smq.clients.pb import smq_pb2 as pb
from smq.clients.tls import Tls
from smq.coordinator.cli.cluster_dir import Ports, prepare_cluster
from smq.coordinator.config.node_toml import load_config
from smq.raft_state.ids import NodeId
from smq.replication.ports import Put, Table
from smq.replication.storage.disk import NodeLogDisk
from smq.replication.storage.index import DATA_FILE
from smq.testing.node_process import ClusterError, Node, Nodes
from tests.pages import claimed
from tests.unit.coordinator.http.test_metrics import FakeNode, scrape


# ------------------------------------------------------------------------------------------------------ proxies
@pytest.fixture
def link(tmp_path: Path) -> Iterator[tuple[ProxyNetwork, socket.socket, socket.socket]]:
    """A network of two nodes, and both ends of a connection that node 1 has made to node 2."""
    paths = prepare_cluster(tmp_path, 2, Ports(grpc=0, http=0, kafka=0))
    real = load_config(paths[1]).peers
    network = ProxyNetwork(1)
    try:
        network.prepare(paths)
        dialled = load_config(paths[0]).peers[NodeId(2)]
        assert dialled != real[NodeId(2)]
        with closing(socket.create_server(real[NodeId(2)])) as listener:
            near = socket.create_connection(dialled)
            far, _ = listener.accept()
            with closing(near), closing(far):
                near.settimeout(10)
                far.settimeout(10)
                yield network, near, far
    finally:
        network.close()


def test_a_good_link_carries_both_directions(link: Any) -> None:
    _, near, far = link
    near.sendall(b"there")
    far.sendall(b"back")
    assert (far.recv(10), near.recv(10)) == (b"there", b"back")


def test_a_cut_direction_is_silent_and_delivers_after_the_heal(link: Any) -> None:
    network, near, far = link
    network.impose(Links.cut([(1, 2)]))
    near.sendall(b"held")
    far.sendall(b"other way")
    assert near.recv(20) == b"other way"
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(10)
    far.settimeout(10)
    network.impose(Links())
    assert far.recv(10) == b"held"


def test_a_damaged_link_flips_a_bit_and_keeps_the_length(link: Any) -> None:
    network, near, far = link
    network.impose(Links.all_of([1, 2], Link(damage=1.0)))
    near.sendall(bytes(50))
    got = far.recv(50, socket.MSG_WAITALL)
    assert sum(byte.bit_count() for byte in got) >= 1  # one per chunk, and there may be several chunks


def test_a_slow_link_delays_and_keeps_the_order(link: Any) -> None:
    network, near, far = link
    network.impose(Links.all_of([1, 2], Link(delay_ms=200, jitter_ms=50)))
    begun = time.monotonic()
    for i in range(20):
        near.sendall(b"%02d" % i)
    got = b""
    while len(got) < 40:
        got += far.recv(100)
    assert time.monotonic() - begun >= 0.2
    assert got == b"".join(b"%02d" % i for i in range(20))


def test_a_reset_ends_the_connection(link: Any) -> None:
    network, near, far = link
    near.sendall(b"x")
    assert far.recv(10) == b"x"  # the proxy knows both halves: accepting alone does not say so
    network.reset(2)
    with pytest.raises(ConnectionError):
        near.recv(10)


# ------------------------------------------------------------------------------------------------------- switch
def test_the_switch_learns_addresses_and_obeys_the_rules_of_each_direction() -> None:
    ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    for ours, theirs in ends:
        ours.setblocking(False)
        theirs.settimeout(10)
    commands, control = os.pipe()
    switch = Switch([ours.fileno() for ours, _ in ends], random.Random(1))
    switch.impose([(0, 1, {"blocked": True})])
    thread = threading.Thread(target=switch.run, args=(commands,))
    thread.start()
    macs = [bytes([2, 0, 0, 0, 0, i]) for i in range(3)]
    broadcast = b"\xff" * 6
    try:
        ends[0][1].send(broadcast + macs[0] + b"hello")  # no address is known: sent to all, but the link to 1 is cut
        assert ends[2][1].recv(100)[12:] == b"hello"
        ends[1][1].send(macs[0] + macs[1] + b"one way works")
        assert ends[0][1].recv(100)[12:] == b"one way works"
        ends[0][1].send(macs[1] + macs[0] + b"lost")
        ends[2][1].send(macs[1] + macs[2] + b"whole")
        assert ends[1][1].recv(100)[12:] == b"whole"
    finally:
        os.close(control)
        thread.join(10)
        os.close(commands)
        for pair in ends:
            for end in pair:
                end.close()
    assert not thread.is_alive()


class _Network:
    links = Links()

    def impose(self, links: Links) -> None:
        self.links = links


class _Fleet:
    """Enough for the faults of a network."""

    def __init__(self, size: int) -> None:
        self.nodes = dict.fromkeys(range(1, size + 1))
        self.network = _Network()


@pytest.mark.parametrize(("size", "heard"), [(3, 1), (5, 2)])
def test_in_a_ring_every_node_hears_as_many_and_alone_it_hears_none(size: int, heard: int) -> None:
    fleet: Any = _Fleet(size)
    arena = Arena(fleet, random.Random(1))
    for strike, expected in ((network_faults.ring, heard), (network_faults.all_alone, 0)):
        assert sorted(strike(arena)) == arena.nodes
        links = fleet.network.links
        for node in arena.nodes:
            others = [other for other in arena.nodes if other != node]
            assert sum(not links.of(other, node).blocked for other in others) == expected
    network_faults.uneven(arena)
    assert len({link.delay_ms for link in fleet.network.links.rules.values()}) == size * (size - 1)


class _Informed(Fleet):
    """Each node answers with (epoch, leader) of the topic t's partitions; one with None does not answer."""

    def __init__(self, known: dict[int, list[tuple[int, int]] | None]) -> None:
        self.known = known

    def up(self) -> list[Any]:
        return [SimpleNamespace(id=node) for node in self.known]

    def describe(self, node: int) -> pb.DescribeClusterResponse | None:
        known = self.known[node]
        if known is None:
            return None
        infos = [pb.PartitionInfo(partition=i, epoch=epoch, leader=leader) for i, (epoch, leader) in enumerate(known)]
        return pb.DescribeClusterResponse(topics=[pb.TopicInfo(name="t", partitions=infos)])


def test_a_cut_off_node_that_knows_old_epochs_does_not_name_the_leaders() -> None:
    """It would be asked for records that only the new leader has, until the run is called a failure."""
    cut_off, silent, current = [(3, 1), (5, 2), (4, 1)], None, [(4, 2), (5, 2), (7, 3)]
    assert _Informed({1: cut_off, 2: silent, 3: current}).leaders() == {"t/0": 2, "t/1": 2, "t/2": 3}
    assert _Informed({1: current, 2: cut_off}).leaders() == {"t/0": 2, "t/1": 2, "t/2": 3}
    assert _Informed({1: silent}).leaders() == {}


# ------------------------------------------------------------------------------------------------ complete replicas
class _Measured(Fleet):
    """Nodes that answer at these HTTP addresses."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses

    def up(self) -> list[Any]:
        return [SimpleNamespace(http=address) for address in self.addresses]


def test_the_next_fault_waits_for_replicas_that_may_lack_what_they_acknowledged() -> None:
    """A leader whose disk was full ended while a node with an empty disk was ready, and had not caught up: one replica
    of three was left, and a run was called a failure."""
    node = FakeNode()

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/metrics"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"".join(scrape(node)))

        def log_message(self, *_args: object) -> None: ...

    with socket.socket() as unserved, HTTPServer(("127.0.0.1", 0), Metrics) as server:
        unserved.bind(("127.0.0.1", 0))
        closed, served = f"127.0.0.1:{unserved.getsockname()[1]}", f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            part = node.state.topics["t"].partitions[7]
            part.incomplete = frozenset({NodeId(1)})
            assert _Measured(closed, served).incomplete() == ["t/7"]
            with pytest.raises(ClusterError, match="t/7"):
                _Measured(served).wait_complete(0.0)
            part.incomplete = frozenset()
            _Measured(closed, served).wait_complete(0.0)
            assert _Measured(closed).incomplete() is None
            with pytest.raises(ClusterError, match="None"):
                _Measured(closed).wait_complete(0.0)
        finally:
            server.shutdown()
            thread.join()


# ---------------------------------------------------------------------------------------------------- damaged files
def test_a_damaged_tree_is_known_before_the_next_fault(tmp_path: Path) -> None:
    disk = NodeLogDisk(tmp_path, call_soon_threadsafe=lambda fn: None, on_fatal=lambda e: None)
    disk.submit([Put(Table.BATCHES, b"%06d" % i, bytes(500)) for i in range(2_000)])
    disk.close()
    assert has_complete_tree(tmp_path)
    file = tmp_path / DATA_FILE
    middle = file.stat().st_size // 2 // 4096 * 4096
    with file.open("r+b") as f:
        f.seek(middle)
        f.write(bytes(16 * 4096))
    assert not has_complete_tree(tmp_path)


# -------------------------------------------------------------------------------------------------- hostile bytes
def test_hostile_bytes_reach_every_port_of_a_node() -> None:
    ports = ("grpc", "http", "kafka", "peer")
    with ExitStack() as stack:
        listeners = {name: stack.enter_context(closing(socket.create_server(("127.0.0.1", 0)))) for name in ports}
        addresses = {name: f"127.0.0.1:{listener.getsockname()[1]}" for name, listener in listeners.items()}
        fleet: Any = SimpleNamespace(up=lambda: [SimpleNamespace(**addresses)], nodes={1: None})
        hostile(Arena(fleet, random.Random(1)))
        for name, listener in listeners.items():
            listener.settimeout(10)
            connection, _ = listener.accept()
            with closing(connection):
                connection.settimeout(10)
                assert connection.recv(1), name


def test_both_names_every_pair_between_two_sides() -> None:
    assert sorted(both([1], [2, 3])) == [(1, 2), (1, 3), (2, 1), (3, 1)]


# ------------------------------------------------------------------------------------------------------ sockets
def test_listening_sockets_are_found_with_their_addresses() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as local:
        found = sockets.listening(os.getpid())
        assert ("127.0.0.1", local.getsockname()[1]) in found


# -------------------------------------------------------------------------------------------------------- hooks
def test_the_hooks_of_the_page_are_read(tmp_path: Path) -> None:
    [page] = claimed("docs/chaos.md", __file__)
    file = tmp_path / "hooks.toml"
    file.write_text(page)
    (fault,) = read_hooks(file)
    assert (fault.name, fault.family) == ("kill", "kill")


def test_hooks_run_the_commands_of_the_file_for_the_node_they_strike(tmp_path: Path) -> None:
    file = tmp_path / "hooks.toml"
    log = tmp_path / "log"
    file.write_text(
        f'[[fault]]\nname = "mine"\nstrike = "echo strike {{node}} >> {log}"\nundo = "echo undo {{node}} >> {log}"\n'
    )
    (fault,) = read_hooks(file)

    class Any3:
        def any_node(self) -> int:
            return 3

    arena: Any = Any3()
    nodes = fault.strike(arena)
    fault.undo(arena, nodes)
    assert log.read_text().splitlines() == ["strike 3", "undo 3"]


_HOOK = "[[fault]]\nname = 'x'\nstrike = 'a'\nundo = 'b'\n"


@pytest.mark.parametrize(
    "text",
    [
        "[[fault]]\nname = 'x'\n",
        "[[fault]]\nnmae = 'x'\n",
        "[[fault",
        f"{_HOOK}target = 'boss'\n",
        f"{_HOOK}family = 'fire'\n",
        f"{_HOOK}hold_s = 3\n",
    ],
)
def test_wrong_hooks_are_refused_with_the_file_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "hooks.toml"
    file.write_text(text)
    with pytest.raises(HooksError, match=r"hooks\.toml"):
        read_hooks(file)


# ------------------------------------------------------------------------------------------------------- ledger
def _summary(**changed: Any) -> dict[str, Any]:
    fault = {"name": "kill-leader", "family": "kill", "start_s": 1.0, "end_s": 3.5, "failover_ms": 500.4, "flips": 0}
    fault["recovery_ms"] = 90.0
    return {
        "scenario": "all",
        "seed": 1,
        "commit": "abc",
        "nodes": 3,
        "network": "n",
        "disks": "d",
        "workload": ["gRPC", "Kafka"],
        "started": "2026-01-01T00:00:00Z",
        "seconds": 60.0,
        "fault_seconds": 12.5,
        "acked_sends": 300,
        "acked_records": 900,
        "records_read": 5000,
        "settle_ms": 100.0,
        "anomalies": {},
        "replay": "python -m chaos_tests run",
        "planted": None,
        "invalid": [],
        "violations": [],
        "operations": {"send": {"ok": 300}},
        "faults": [fault] * 5,
        **changed,
    }


def test_the_ledger_keeps_valid_histories_once_and_leaves_planted_ones_out(tmp_path: Path) -> None:
    for name, summary in {
        "a": _summary(),
        "b": _summary(seed=2, anomalies={"lost-write": 1}),
        "c": _summary(seed=3, planted="ack-before-fsync"),
        "d": _summary(seed=4, invalid=["too little"]),
    }.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "summary.json").write_text(json.dumps(summary))
    kept = tmp_path / "kept"
    assert ledger.keep(tmp_path / "runs", kept) == 2
    assert ledger.keep(tmp_path / "runs", kept) == 0
    page = ledger.page(ledger.read(kept / ledger.HISTORIES))
    assert "| histories | 2 |" in page
    assert "| kill | 10 | 500 | 500 | 500 | 500 |" in page
    assert "lost-write: 1" in page  # a history with a finding is listed, never left out


def test_a_finding_reports_what_the_same_run_showed_later() -> None:
    at = {"started": "2026-01-02T00:00:00Z", "commit": "def"}
    entries = [ledger.history(_summary(anomalies={"lost-write": 2})), ledger.history(_summary(**at))]
    (line,) = [line for line in ledger.page(entries).splitlines() if "lost-write: 2; " in line]
    assert line == "- `python -m chaos_tests run` on abc: lost-write: 2; run again, it held on def"


def test_the_page_of_a_campaign_shows_its_histories_and_its_failures(tmp_path: Path) -> None:
    assert write_reports(tmp_path) == 2  # nothing is there
    runs = {"a": _summary(), "b": _summary(seed=2, anomalies={"lost-write": 1}, violations=["lost-write: <1>"])}
    for name, summary in runs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    page = write_index(tmp_path).read_text()
    assert "2 histories, <span class='bad'>1 with findings</span>" in page
    assert "<a href='b/report.html'>b</a>" in page
    assert "<span class='bad'>lost-write</span>" in page
    assert "<td>kill</td><td class='n'>10</td><td class='n'>500</td>" in page


def test_a_campaign_that_continues_replaces_its_line_and_long_runs_have_theirs(tmp_path: Path) -> None:
    campaign, damages = tmp_path / "sim", tmp_path / "flips"
    for seeds in (10, 1200):
        state = Ledger("c" * 40, totals=Totals(seeds=seeds, virtual_s=7200.0), failed=[(7, "power")])
        state.save(campaign)
        assert ledger.keep(campaign, tmp_path / "kept") == 1
    assert ledger.keep(campaign, tmp_path / "kept") == 0
    damages.mkdir()
    run = LongRun("damaged files", "d" * 40, "python -m chaos_tests flips", {"damages": 1003}, [])
    (damages / RUN).write_text(json.dumps(asdict(run)))
    assert ledger.keep(damages, tmp_path / "kept") == 1
    page = ledger.page(ledger.read(tmp_path / "kept" / ledger.RUNS))
    seeds_row = "| cccccccccc | 1,200 | 2.0 | 0 | 0 | `python -m chaos_tests sim --seed 7 --scenario power` |"
    assert seeds_row in page
    assert "| dddddddddd | 1,003 | nothing |" in page


def test_the_page_in_the_repository_is_generated_from_the_kept_lines() -> None:
    root = Path(__file__).parents[2]
    entries = [entry for path in sorted((root / ledger.KEPT).glob("*.jsonl")) for entry in ledger.read(path)]
    assert (root / ledger.PAGE).read_text() == ledger.page(entries), "run `python -m chaos_tests ledger`"


def test_every_bug_found_is_pinned_by_an_existing_test() -> None:
    root = Path(__file__).parents[2]
    # What is LEFT was reported, but is no bug of this code.
    pinned = [entry for entry in ledger.read(root / ledger.KEPT / "found.jsonl") if entry["kind"] != ledger.LEFT]
    assert pinned
    for entry in pinned:
        assert f"def {entry['test']}(" in (root / entry["file"]).read_text()


# ---------------------------------------------------------------------------------------------------- failovers
def test_a_failover_ends_with_another_nodes_acknowledgement_in_every_partition_led() -> None:
    struck = Struck("kill-leader", "kill", [1], ["t/0", "t/1"], 0.0)
    ms = 1_000_000
    late = Ack(1_010 * ms, "t/0", 1)  # of the struck node: its answer was on its way
    told_by_nobody = Ack(1_020 * ms, "t/0", 0)
    assert failover_ms([late, told_by_nobody, Ack(1_600 * ms, "t/1", 2)], struck, 1_000 * ms, 3_000 * ms) is None
    acks = [late, Ack(1_600 * ms, "t/1", 2), Ack(1_700 * ms, "t/0", 3), Ack(1_800 * ms, "t/0", 2)]
    assert failover_ms(acks, struck, 1_000 * ms, 3_000 * ms) == 700
    back_again = [Ack(1_600 * ms, "t/1", 2), Ack(3_200 * ms, "t/0", 1)]
    assert failover_ms(back_again, struck, 1_000 * ms, 3_000 * ms) == 2200


# ------------------------------------------------------------------------------------------------ Kafka clients
class _Assigned:
    """A consumer in a generation, with what it was assigned there."""

    def __init__(self, generation: int) -> None:
        self._generation = generation

    def consumer_group_metadata(self) -> bytes:
        return b"CGMDv2:" + self._generation.to_bytes(4, sys.byteorder, signed=True)


def test_librdkafka_gets_the_tls_files_if_the_cluster_uses_tls() -> None:
    world = World(SharedRecorder(), {}, "a:1", [Partition("t", 0)], random.Random(1))
    assert "security.protocol" not in reach(world)
    world.tls = Tls(ca="ca.crt", certificate="tls.crt", key="tls.key")
    assert reach(world)["ssl.ca.location"] == "ca.crt"
    assert reach(world)["ssl.key.location"] == "tls.key"


@pytest.mark.parametrize(("second", "anomalies"), [("same", set()), ("other", {"shared-partition"})])
def test_a_member_that_gets_its_assignment_again_shares_it_with_no_other_member(
    second: str, anomalies: set[str]
) -> None:
    """An unchanged follower that rejoins alone gets the current generation."""
    partition = Partition("t", 0)
    world = World(SharedRecorder(), {}, "", [partition], random.Random(1))
    member, other = (TeamMember(world, name, threading.Event()) for name in ("team-0", "team-1"))
    for each in (member, member if second == "same" else other):
        each._assigned(_Assigned(3), [TopicPartition(partition.topic, partition.index)])
    assert {violation.anomaly for violation in judge(world.recorder.events)} == anomalies


@pytest.mark.parametrize("plant", PLANTED.values(), ids=lambda plant: plant.name)
def test_a_bug_of_live_nodes_still_fits_the_code(plant: Plant) -> None:
    with planted(plant.faults):
        pass


def test_a_node_of_a_test_has_the_settings_of_its_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the shell would be the same for all nodes."""
    monkeypatch.setenv("SMQ_NODE_ID", "9")
    monkeypatch.setenv("OTHER", "1")
    node = Node(id=1, config=tmp_path, data_dir=tmp_path, log=tmp_path / "log", grpc="", http="", kafka="")
    nodes = Nodes(tmp_path, size=1, serve=("sh", "-c", "env"), nodes={1: node})
    nodes.run(1)
    nodes.wait_dead(1)
    given = node.log.read_text()
    assert "OTHER=1" in given
    assert "SMQ_" not in given
