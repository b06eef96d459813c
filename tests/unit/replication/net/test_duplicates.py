"""Two processes with one node id over real TCP, whichever came first; and what looks like it, and must go on."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from smq.coordinator.cli.cluster_dir import free_ports
from smq.raft_state.ids import NodeId
from smq.replication.net import duplicates, tcp
from smq.replication.net.duplicates import RETURNS_MAX, DuplicateRule
from smq.replication.net.frames import FrameKind, encode_reason
from smq.replication.net.listening import bind_listener
from smq.replication.net.tcp import TcpNetwork, TcpSettings
from smq.replication.ports import Channel
from tests.unit.replication.net.test_tcp import CONTROL, DATA, ONE, PATIENCE_S, TWO, Recorder, frame, hello_frame, lent

Address = tuple[str, int]


class Processes:
    """Processes of nodes 1 and 2, each at an address of its own: node 1 dials node 2."""

    def __init__(self) -> None:
        self.addresses = {node: self.free_address() for node in (ONE, TWO)}
        self.refusals: dict[TcpNetwork, list[str]] = {}
        self.handlers: dict[TcpNetwork, Recorder] = {}

    @staticmethod
    def free_address() -> Address:
        return "127.0.0.1", free_ports(1)[0]

    def start(self, node: NodeId, address: Address | None = None, own: Address | None = None) -> TcpNetwork:
        """A process of the node at `address`, its own by default, which holds `own` for its address."""
        listener = bind_listener(*(address or self.addresses[node]))
        refusals = list[str]()

        def end(why: str) -> None:
            refusals.append(why)
            network.close()

        network = TcpNetwork(
            loop=asyncio.get_running_loop(),
            node_id=node,
            cluster_id="c",
            peers=self.addresses | {node: own or address or self.addresses[node]},
            listener=listener,
            settings=TcpSettings(redial_min_ms=1, redial_max_ms=10, silence_ms_max=600_000),
            on_refused=end,
        )
        self.refusals[network] = refusals
        self.handlers[network] = Recorder()
        network.start(self.handlers[network])
        return network

    def starts_elsewhere(self, node: NodeId) -> TcpNetwork:
        return self.start(node, self.free_address())

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - a state of several networks
                await asyncio.sleep(0.002)

    async def connected(self, at: TcpNetwork, peer: NodeId, process: TcpNetwork) -> None:
        """`at` has sessions of this process of the peer, on both channels, and no other."""
        await self.until(lambda: [s.process for s in at.sessions_of(peer)] == [process._process] * len(Channel))

    def fall_silent(self, network: TcpNetwork) -> None:
        """Its machine is cut off: nothing answers there, and its connections look alive to the others."""
        network.acceptor.close()
        network._duplicates.close()
        for task in network._tasks:
            task.cancel()

    def close(self) -> None:
        for network in self.refusals:
            network.close()


with_processes = lent(Processes)


def assert_refused(world: Processes, duplicate: TcpNetwork, node: NodeId, by: NodeId) -> None:
    (why,) = world.refusals[duplicate]
    host, port = world.addresses[node]
    assert why.startswith(f"node {by} refuses this process of node {node}: another process is node {node}, at {host}")
    assert f":{port}, where node {by} has it under [peers], and this one connects from 127.0.0.1:" in why
    assert "stop one of the two, or give it a node_id and an address under [peers] of its own" in why


# -------------------------------------------------------------------------------------------------- duplicates
@with_processes
async def test_a_duplicate_that_came_first_is_refused_when_the_node_itself_comes(world: Processes) -> None:
    other = world.start(TWO)
    duplicate = world.starts_elsewhere(ONE)
    await world.connected(other, ONE, duplicate)
    assert not other.is_at_address(ONE)
    node = world.start(ONE)
    await world.until(lambda: bool(world.refusals[duplicate]))
    await world.connected(other, ONE, node)
    assert_refused(world, duplicate, ONE, by=TWO)
    assert other.is_at_address(ONE)
    assert not world.refusals[node]


@with_processes
async def test_a_duplicate_that_comes_later_is_refused_and_disturbs_no_session(world: Processes) -> None:
    other, node = world.start(TWO), world.start(ONE)
    await world.connected(other, ONE, node)
    await world.until(lambda: other.is_at_address(ONE))
    before = list(world.handlers[other].events)
    duplicate = world.starts_elsewhere(ONE)
    await world.until(lambda: bool(world.refusals[duplicate]))
    assert_refused(world, duplicate, ONE, by=TWO)
    assert world.handlers[other].events == before
    assert not world.refusals[node]


@pytest.mark.parametrize("is_first", [False, True])
@with_processes
async def test_a_duplicate_that_nobody_dials_asks_and_is_refused(world: Processes, is_first: bool) -> None:
    other = world.start(ONE)
    if is_first:
        duplicate = world.starts_elsewhere(TWO)
        await asyncio.sleep(0)
        node = world.start(TWO)
    else:
        node = world.start(TWO)
        await world.connected(other, TWO, node)
        duplicate = world.starts_elsewhere(TWO)
    await world.until(lambda: bool(world.refusals[duplicate]))
    await world.connected(other, TWO, node)
    assert world.refusals[duplicate][0].startswith("node 1 refuses this process of node 2: another process is node 2")
    assert not world.refusals[node]


@with_processes
async def test_of_two_processes_that_are_both_not_at_the_address_the_later_one_is_refused(world: Processes) -> None:
    other = world.start(TWO)
    first = world.starts_elsewhere(ONE)
    await world.connected(other, ONE, first)
    second = world.starts_elsewhere(ONE)
    await world.until(lambda: bool(world.refusals[second]))
    await world.connected(other, ONE, first)
    assert "and began earlier" in world.refusals[second][0]
    assert not world.refusals[first]


@with_processes
async def test_the_refused_one_is_told_why_behind_all_that_it_has_yet_to_read(
    world: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_REFUSAL_S", 600.0)
    other = world.start(TWO)
    earlier, later = (hello_frame(process=process * 16) for process in (b"1", b"2"))
    turns = [earlier, later] * RETURNS_MAX
    reader, opened = await come(world, other, turns)
    assert other.send(ONE, CONTROL, [b"x" * (32 << 20)])
    assert other.backlog_bytes(ONE, CONTROL), "the reason has to wait"
    _, again = await come(world, other, [earlier])
    async with asyncio.timeout(PATIENCE_S):
        received = await reader.read()
    assert b"and began earlier" in received[-1_000:]
    for writer in (opened, again):
        writer.close()


async def come(
    world: Processes, at: TcpNetwork, hellos: Sequence[bytes]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Processes of node 1 that are not at its address open a session one after the other: the last one's connection."""
    for hello in hellos:
        before = at.sessions_of(ONE)
        reader, writer = await asyncio.open_connection(*world.addresses[TWO])
        writer.write(hello)
        await world.until(lambda before=before: at.sessions_of(ONE) not in ([], before))  # type: ignore[misc] # bound now
    return reader, writer


# ------------------------------------------------------------------------------------------- what must go on
@with_processes
async def test_a_restart_while_the_old_session_looks_alive_is_in_at_once(world: Processes) -> None:
    other, node = world.start(TWO), world.start(ONE)
    await world.until(lambda: other.is_at_address(ONE))
    world.fall_silent(node)
    again = world.start(ONE)
    await world.connected(other, ONE, again)
    await world.until(lambda: other.is_at_address(ONE))
    assert not world.refusals[again]


@with_processes
async def test_the_restart_of_a_node_that_is_dialled_renews_a_session_that_looks_alive(world: Processes) -> None:
    """It asks the node that should have dialled it, which then asks at its address."""

    other, node = world.start(ONE), world.start(TWO)
    await world.connected(other, TWO, node)
    world.fall_silent(node)
    again = world.start(TWO)
    await world.connected(other, TWO, again)
    assert not world.refusals[again]


@with_processes
async def test_a_node_that_moved_is_in_although_its_old_address_swallows_every_question(
    world: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "HOLD_S", 0.05)
    other, node = world.start(TWO), world.start(ONE)
    await world.until(lambda: other.is_at_address(ONE))
    world.fall_silent(node)
    silent = bind_listener(*world.addresses[ONE])
    moved = world.starts_elsewhere(ONE)
    await world.connected(other, ONE, moved)
    assert not other.is_at_address(ONE)
    assert not world.refusals[moved]
    silent.close()


@with_processes
async def test_an_address_at_which_a_connected_peer_does_not_answer_is_a_warning_until_it_does(
    world: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "AGAIN_S", (0.001,))
    other = world.start(TWO)
    elsewhere = world.starts_elsewhere(ONE)
    await world.until(lambda: bool(other.warnings()))
    host, port = world.addresses[ONE]
    assert f"node 1 is connected to this node, but does not answer at {host}:{port}, where" in other.warnings()[0]
    assert not world.refusals[elsewhere]
    other._peers[ONE] = "127.0.0.1", elsewhere.port  # the name is corrected
    await world.until(lambda: not other.warnings())
    assert other.is_at_address(ONE)


@with_processes
async def test_an_old_process_that_returns_from_a_partition_is_refused_once_its_address_leads_elsewhere(
    world: Processes,
) -> None:
    other, node = world.start(TWO), world.start(ONE)
    await world.until(lambda: other.is_at_address(ONE))
    world.addresses[ONE] = world.free_address()
    other._peers[ONE] = world.addresses[ONE]  # the name is resolved again
    moved = world.start(ONE)
    await world.until(lambda: bool(world.refusals[node]))
    await world.connected(other, ONE, moved)
    assert not world.refusals[moved]


# ------------------------------------------------------------------------------------------------- strangers
@with_processes
async def test_strangers_do_not_take_the_slot_of_a_newcomer_that_waits_for_the_answer_of_its_address(
    world: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "HOLD_S", 600.0)
    other, node = world.start(TWO), world.start(ONE)
    await world.connected(other, ONE, node)
    await world.until(lambda: other.is_at_address(ONE))
    other._settings = replace(other._settings, pending_connections_max=2, hello_timeout_ms=600_000)
    monkeypatch.setattr(other, "ask_address", lambda _peer: asyncio.Event().wait())
    streams = []

    async def connect(first: bytes) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(*world.addresses[TWO])
        writer.write(first)
        streams.append(writer)
        return reader

    async def is_dropped(reader: asyncio.StreamReader) -> bool:
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                return await reader.read() == b""
        return True

    for count in range(other._peer_slots):
        await connect(hello_frame(process=b"z" * 16))
        await world.until(lambda count=count: len(other._duplicates._held) == count + 1)  # type: ignore[misc] # bound now
    held = set(other._duplicates._held)
    strangers = [await connect(b"") for _ in range(3)]
    assert await is_dropped(strangers[0])
    pretender = await connect(hello_frame(process=b"y" * 16))
    assert await is_dropped(strangers[1])
    for _ in range(2):
        await connect(b"")
    assert await is_dropped(pretender), "the slots of the peers are bounded"
    assert all(connection.is_alive for connection in held)
    for writer in streams:
        writer.close()


@with_processes
async def test_a_refusal_from_a_connection_that_the_node_did_not_dial_ends_nothing(world: Processes) -> None:
    other = world.start(TWO)
    for first in (b"", hello_frame()):
        reader, writer = await asyncio.open_connection(*world.addresses[TWO])
        writer.write(first + frame(encode_reason("go"), FrameKind.REFUSED))
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()
    assert not world.refusals[other]


@with_processes
async def test_a_question_opens_no_session_and_is_answered_once(world: Processes) -> None:
    other, node = world.start(TWO), world.start(ONE)
    await world.connected(other, ONE, node)
    await world.connected(node, TWO, other)
    before = list(world.handlers[node].events)
    assert (await other.ask_address(ONE)).process == node._process
    assert (await node.ask_address(TWO)).process == other._process
    assert world.handlers[node].events == before
    assert not node.is_open(ONE, CONTROL)
    assert node.is_open(TWO, DATA)


@with_processes
async def test_a_reason_is_bounded_and_fit_for_a_log(world: Processes) -> None:
    its_listener = bind_listener(*world.addresses[TWO])

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(encode_reason("a\x1b[2J\n" + "x" * 9_000), FrameKind.REFUSED))

    server = await asyncio.start_server(serve, sock=its_listener)
    node = world.start(ONE)
    await world.until(lambda: bool(world.refusals[node]))
    why = world.refusals[node][0]
    assert why.startswith("node 2 refuses this process of node 1: a?[2J?xx")
    assert len(why) < 600
    server.close()


# ------------------------------------------------------------------------------------------------------ duplicate rule
# Two processes with one node id, without sockets: which of them must end, and when neither must.
FIRST = NodeId(1)
ROUNDS = 2 * RETURNS_MAX - 1  # each of the two returns in every second one
EARLIER, LATER, THIRD = b"1" * 16, b"2" * 16, b"3" * 16


@pytest.fixture
def rule() -> DuplicateRule:
    return DuplicateRule()


def test_a_process_that_comes_in_the_place_of_one_at_the_address_is_contested_while_that_is_connected(
    rule: DuplicateRule,
) -> None:
    assert not rule.is_contested(FIRST, LATER, [EARLIER]), "there was no answer at that address yet"
    rule.found(FIRST, EARLIER)
    assert rule.is_contested(FIRST, LATER, [EARLIER])
    assert not rule.is_contested(FIRST, EARLIER, [EARLIER])
    assert not rule.is_contested(FIRST, LATER, []), "a restart, after which the old connections are gone"
    assert not rule.is_contested(FIRST, LATER, [THIRD])


def test_processes_that_follow_each_other_are_restarts(rule: DuplicateRule) -> None:
    processes = [bytes([i]) * 16 for i in range(50)]
    for older, newer in itertools.pairwise(processes):
        assert rule.loser(FIRST, older, newer) is None
    assert len(rule._returns[FIRST]) == duplicates._REPLACED_KEPT


def test_late_connections_around_many_restarts_never_add_up(rule: DuplicateRule) -> None:
    processes = [bytes([i]) * 16 for i in range(50)]
    for older, newer in itertools.pairwise(processes):
        assert rule.loser(FIRST, older, newer) is None
        for _channel in Channel:
            assert rule.loser(FIRST, newer, older) is None, "a late connection"
            assert rule.loser(FIRST, older, newer) is None, "it is back"


def test_a_late_connection_of_a_process_that_has_ended_proves_nothing(rule: DuplicateRule) -> None:
    assert rule.loser(FIRST, EARLIER, LATER) is None
    assert rule.loser(FIRST, LATER, EARLIER) is None
    assert rule.loser(FIRST, EARLIER, LATER) is None


def rounds_until_one_loses(rule: DuplicateRule) -> tuple[int, bytes]:
    older, newer = LATER, EARLIER
    for count in range(100):
        loser = rule.loser(FIRST, older, newer)
        if loser is not None:
            return count, loser
        older, newer = newer, older
    raise AssertionError("both go on")


def test_of_two_that_take_turns_the_one_that_began_later_ends_whoever_judges() -> None:
    assert rounds_until_one_loses(DuplicateRule()) == (ROUNDS, LATER)


def test_after_a_verdict_the_returns_are_counted_anew(rule: DuplicateRule) -> None:
    assert [rounds_until_one_loses(rule) for _ in range(3)] == [(ROUNDS, LATER)] * 3


def test_of_two_that_take_turns_the_one_that_was_at_the_address_stays(rule: DuplicateRule) -> None:
    rule.found(FIRST, LATER)
    assert rounds_until_one_loses(rule) == (ROUNDS, EARLIER)
