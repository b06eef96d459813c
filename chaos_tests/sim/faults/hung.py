"""Disks that hang: no commit ends for tens of seconds, and none fails. Judged while the disk still hangs.

Owns the strike and its probes. Records are taken and served immediately, if need be from memory, because a majority
of the disks writes; after a bound, no partition depends on the hung disk any more. A check after the heal would find
nothing, because every queued commit ends then.
"""

from typing import Final

from chaos_tests.sim.clients.base import Known
from chaos_tests.sim.clients.consumer import Consumer
from chaos_tests.sim.clients.producer import Producer
from chaos_tests.sim.faults.catalogue import Fault
from chaos_tests.sim.rpc import Script, Sleep
from smq.raft_state.ids import NodeId
from smq.replication.api import Acks

RECOVERED_MS: Final = 6_000.0  # three times `disk_hang_ms`: it is noticed, leaderships move, clients find them
AT_ONCE_READS_MAX: Final = 4  # of the first probe: it is over before a leadership moves
READS_MAX: Final = 20
PAUSE_MS: Final = 50.0  # between two reads of a probe; a read waits up to 150 ms


def hung_disk(fault: Fault) -> Script:
    """One node's disk hangs. Partitions are probed while it does, one of those that it leads immediately."""
    hosts = [host for host in fault.hosts() if host.disk is not None]
    lasting_ms = max(fault.lasting_ms(), RECOVERED_MS)
    for host in hosts:
        assert host.disk is not None
        fault.note("hung-disk", n=host.node, ms=lasting_ms)
        host.disk.stall(lasting_ms * 2)  # until the probe is over, however long it takes
    if not hosts:
        return
    _, leaders = fault.arena.seen_leaders()
    partitions = [known for known in fault.arena.world.partitions if not known.dropped]
    led = [known for known, leader in zip(partitions, leaders, strict=False) if leader in {h.node for h in hosts}]
    if led:
        yield from _probe(fault, led[0], AT_ONCE_READS_MAX)
    yield Sleep(RECOVERED_MS)
    for known in partitions:
        yield from _probe(fault, known, READS_MAX)
    yield Sleep(lasting_ms - RECOVERED_MS)
    _demand_others_lead(fault, {host.node for host in hosts})
    for host in hosts:
        if host.disk is not None:
            fault.note("hung-disk-heal", n=host.node)
            host.disk.end_stall()
    yield Sleep(RECOVERED_MS)


def _demand_others_lead(fault: Fault, hung: set[NodeId]) -> None:
    """Every partition has taken a record meanwhile, so each has had a reason to move, and none to come back."""
    raft_leader, leaders = fault.arena.seen_leaders()
    led = sum(leader in hung for leader in leaders)
    why = f"nodes {sorted(hung)} lead {led} partitions on disks that hang; node {raft_leader} leads Raft"
    fault.arena.world.recorder.note("progress", ok=not led and raft_leader not in hung, why=why)


def _probe(fault: Fault, known: Known, reads_max: int) -> Script:
    """A record is acknowledged, and the leader serves it."""
    world, name = fault.arena.world, f"hung-disk/{fault.rng.getrandbits(32)}"
    producer = Producer(world, name, acks=Acks.ALL, idempotent=True, think_ms=0)
    before = known.hwm
    yield from producer.send(known)
    if known.hwm == before or known.leader is None:
        world.recorder.note("progress", ok=False, why=f"no record was acknowledged in {known.key}")
        return
    end, node = known.hwm, known.leader
    reader, position = Consumer(world, f"{name}/reader", think_ms=0), max(before, known.lo)
    for _ in range(reads_max):
        position = yield from reader.poll(known, node, position)
        if position >= end:
            break
        yield Sleep(PAUSE_MS)
    is_read = position >= end
    why = f"{known.key}: node {node} acknowledged records below {end}, and served none from {position} on"
    world.recorder.note("progress", ok=is_read, why=known.key if is_read else why)
