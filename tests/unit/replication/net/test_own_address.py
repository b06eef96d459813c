"""What a starting node learns at its own address: itself, another process of this node, or nothing of use."""

import asyncio

import pytest

from smq.coordinator.cli.cluster_dir import free_ports
from smq.raft_state.ids import NodeId
from smq.replication.net.duplicates import AddressAnswer
from smq.replication.net.frames import FrameKind
from smq.replication.net.listening import bind_listener
from smq.replication.net.tcp import TcpNetwork, TcpSettings
from smq.replication.ports import Channel
from tests.unit.replication.net.test_tcp import Recorder, frame, hello_payload, on_loop, run

ONE, TWO = NodeId(1), NodeId(2)


def network(node: NodeId, address: tuple[str, int] | None = None, cluster_id: str = "c") -> TcpNetwork:
    listener = bind_listener(*(address or ("127.0.0.1", 0)))
    peers = dict.fromkeys((ONE, TWO), ("127.0.0.1", 1)) | {node: listener.getsockname()[:2]}
    settings = TcpSettings(connect_timeout_ms=300, redial_min_ms=1, redial_max_ms=10)
    return TcpNetwork(
        loop=asyncio.get_running_loop(),
        node_id=node,
        cluster_id=cluster_id,
        peers=peers,
        listener=listener,
        settings=settings,
    )


def address_of(one: TcpNetwork) -> tuple[str, int]:
    return "127.0.0.1", one.port


@on_loop
async def test_a_node_finds_itself_at_its_own_address() -> None:
    me = network(TWO)
    found = await me.ask_own_address(address_of(me))
    assert me.is_me(found.process)
    me.close()


@on_loop
async def test_another_process_of_the_node_is_found_whether_it_serves_or_is_about_to() -> None:
    first, second = network(TWO), network(TWO)
    await first.ask_own_address(address_of(first))  # a process that is still opening its disk
    asked = asyncio.create_task(second.ask_own_address(address_of(first)))
    await asyncio.sleep(0)
    first.start(Recorder())
    for found in (await asked, await second.ask_own_address(address_of(first))):
        assert found.process
        assert not second.is_me(found.process)
    first.close()
    second.close()


@pytest.mark.parametrize(("node", "cluster_id"), [(ONE, "c"), (TWO, "other")])
def test_another_node_at_the_address_is_no_process_of_this_one(node: NodeId, cluster_id: str) -> None:
    async def test() -> None:
        me, other = network(TWO), network(node, cluster_id=cluster_id)
        other.start(Recorder())
        found = await me.ask_own_address(address_of(other))
        assert not found.process
        assert "another node, or another program" in found.reason
        me.close()
        other.close()

    run(test)


@on_loop
async def test_a_dead_address_is_a_reason() -> None:
    me = network(TWO)
    (port,) = free_ports(1)
    found = await me.ask_own_address(("127.0.0.1", port))
    assert found == AddressAnswer(reason=found.reason)
    assert "refused" in found.reason.lower() or "connect" in found.reason.lower()
    me.close()


@on_loop
async def test_a_program_that_says_nothing_is_given_up() -> None:
    silent = bind_listener("127.0.0.1", 0)
    me = network(TWO)
    assert (await me.ask_own_address(silent.getsockname())).reason == "timed out"
    me.close()
    silent.close()


@on_loop
async def test_a_peer_that_dials_before_the_start_gets_its_session_after_it() -> None:
    me = network(TWO)
    peer = network(ONE)
    peer._peers[TWO] = address_of(me)
    handlers = Recorder(), Recorder()
    peer.start(handlers[0])
    for _ in range(3):
        await me.ask_own_address(address_of(me))
    assert handlers[0].events == []
    me.start(handlers[1])
    await handlers[0].wait_count("open", 1)
    await handlers[1].wait_count("open", 1)
    me.close()
    peer.close()


@on_loop
async def test_the_answer_to_a_second_process_is_the_end_of_its_connection() -> None:
    me = network(TWO)
    me.start(Recorder())
    reader, writer = await asyncio.open_connection(*address_of(me))
    writer.write(frame(hello_payload(sender=TWO, receiver=TWO), FrameKind.WHO))
    async with asyncio.timeout(20):
        assert await reader.read() != b""
    assert not me.is_open(TWO, Channel.CONTROL)
    writer.close()
    me.close()


def test_both_sides_of_a_session_learn_how_far_the_other_clock_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        clocks = {ONE: iter(range(1_000_000, 2_000_000)), TWO: iter(range(9_000_000, 10_000_000))}
        seen: dict[NodeId, int] = {}
        two = network(TWO)
        one = network(ONE)
        one._peers[TWO] = address_of(two)
        for node, known in ((ONE, one), (TWO, two)):
            known._on_clock = seen.__setitem__
            monkeypatch.setattr(known, "_wall_ms", clocks[node].__next__)
            known.start(Recorder())
        async with asyncio.timeout(20):
            while len(seen) < 2:  # noqa: ASYNC110 - a state of the networks, not an event
                await asyncio.sleep(0.001)
        assert 7_900_000 < seen[TWO] < 8_100_000
        assert -8_100_000 < seen[ONE] < -7_900_000
        one.close()
        two.close()

    run(test)
