"""How many frames from other nodes one turn of the event loop handles."""

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from smq.raft_state.ids import NodeId
from smq.replication.net import peer_connection as tcp_connection
from smq.replication.ports import Channel
from tests.unit.replication.net.test_tcp import CONTROL, ONE, TWO, Pair, Recorder, paired


def test_thousands_of_frames_that_arrive_together_are_handled_in_order_over_several_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that each message advances by a millisecond."""
    handled_ns, turn = 0, 0
    turns = Counter[int]()
    monkeypatch.setattr(tcp_connection, "time", SimpleNamespace(monotonic_ns=lambda: handled_ns))

    class Slow(Recorder):
        def on_message(self, peer: NodeId, channel: Channel, payload: memoryview) -> None:
            nonlocal handled_ns
            handled_ns += 1_000_000
            turns[turn] += 1
            super().on_message(peer, channel, payload)

    async def body(pair: Pair) -> None:
        def next_turn() -> None:
            nonlocal turn
            turn += 1
            asyncio.get_running_loop().call_soon(next_turn)

        await pair.both_open()
        slow = pair.networks[TWO]._handler = Slow()
        next_turn()
        sent = [number.to_bytes(4, "big") for number in range(1_000)]
        for message in sent:
            assert pair.networks[ONE].send(TWO, CONTROL, [message])
        await slow.wait_count("message", len(sent))
        assert slow.messages() == sent
        stretch = tcp_connection.HANDLING_NS_MAX // 1_000_000
        assert max(turns.values()) <= 2 * stretch  # one when it is read, and one more in the same turn

    paired()(body)()


def test_connections_share_a_turn_and_none_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, soon = 1, list[Callable[[], None]]()
    monkeypatch.setattr(tcp_connection, "time", SimpleNamespace(monotonic_ns=lambda: now_ns))
    turn = tcp_connection.Turn(SimpleNamespace(call_soon=soon.append))  # type: ignore[arg-type] # all of a loop it needs
    first = turn.ends_ns()
    assert first == now_ns + tcp_connection.HANDLING_NS_MAX
    now_ns = first
    assert [turn.ends_ns(), turn.ends_ns()] == [first + tcp_connection.HANDLING_NS_MIN] * 2
    assert len(soon) == 1
    soon.pop()()
    assert turn.ends_ns() == now_ns + tcp_connection.HANDLING_NS_MAX
