"""Planted bugs of disks that hang, or read slowly, without an error.

Owns these rows only. `catalogue` alone imports it.
"""

from typing import Final

from chaos_tests.sim.mutation import Mutation, PlantedBug

_READER = "smq.replication.log.reader:LogReader."
_LOG = "smq.replication.log.partition_log:PartitionLog."
_REPLICA = "smq.replication.partition.replica:Replica."

DISK_BUGS: Final[tuple[PlantedBug, ...]] = (
    PlantedBug(
        name="only-the-own-disk-is-served",
        rule="13: what a majority's disks hold is served, if need be from memory",
        mutations=(
            Mutation(
                _REPLICA + "readable_end",
                "self._verified(self.log.appended_end)",
                "self.durable_verified_end",
            ),
        ),
        scenario="hung_disk",
        anomalies=frozenset({"no-progress"}),
        seeds=8,
    ),
    PlantedBug(
        name="hung-leader-leads-on",
        rule="a leader whose disk hangs gives its partition to a follower that stores more",
        mutations=(Mutation("smq.replication.partition.step_aside:step_aside", "and hang.hangs:", "and False:"),),
        scenario="hung_disk",
        anomalies=frozenset({"no-progress"}),
        seeds=8,
    ),
    PlantedBug(
        name="raft-stays-on-a-hung-disk",
        rule="a node whose disk hangs does not lead Raft while another can",
        mutations=(
            Mutation(
                "smq.replication.membership.balancer:Balancer._leave_raft",
                "self._liveness.disk(me.node) is not wire.DiskCondition.HANGS",
                "True",
            ),
        ),
        scenario="hung_disk",
        anomalies=frozenset({"no-progress"}),
        seeds=8,
    ),
    PlantedBug(
        name="cold-reads-on-the-loop",
        rule="reads that may wait for the medium do not hold up the loop",
        mutations=(
            Mutation(
                _READER + "read_memory",
                "        return None\n    return fitting",
                "        return self.read(offset, end, bytes_max)\n    return fitting",
            ),
        ),
        scenario="slow_reads",
        anomalies=frozenset({"no-progress"}),
        seeds=8,
    ),
    PlantedBug(
        name="a-busy-replica-counts-as-damaged",
        rule="a batch is lost only if every replica says so: one that is behind or busy is asked again",
        mutations=(
            Mutation(
                "smq.replication.partition.repair:Repairs.on_found",
                "repair.is_uncertain |= message.may_have",
                "pass",
            ),
        ),
        scenario="slow_reads",
        anomalies=frozenset({"false-damage"}),
        seeds=800,
    ),
    PlantedBug(
        name="each-wake-up-counts-as-a-repair",
        rule="a fetch that is woken while a repair runs waits for that one, and counts it once",
        mutations=(Mutation("smq.replication.partition.reads:Reads._try", " or poll.awaits_repair", ""),),
        scenario="slow_reads",
        anomalies=frozenset({"false-damage"}),
        seeds=60,
    ),
    PlantedBug(
        name="rows-of-a-deleted-topic-count-as-damaged",
        rule="rows that a deletion has removed during a read are no damage",
        mutations=(
            Mutation(
                "smq.replication.partition.reads:Reads.fail_all",
                "{**self._parked.get(pid, {}), **self._away.get(pid, {})}",
                "list(self._parked.get(pid, ()))",
            ),
            Mutation(_LOG + "read_later", "self.is_dropped or ", ""),
        ),
        scenario="slow_reads",
        anomalies=frozenset({"false-damage"}),
        seeds=40,
    ),
    PlantedBug(
        name="batch-of-another-partition-served",
        rule="a batch is of the partition that it is stored in, whatever a damaged page number says",
        mutations=(
            Mutation("smq.replication.log.codec:build_value", "_COVERED.pack(pid,", "_COVERED.pack(bytes(20),"),
            Mutation("smq.replication.log.codec:parse_value", "_COVERED.pack(pid,", "_COVERED.pack(bytes(20),"),
            Mutation("smq.replication.log.codec:parse_header_of", "_COVERED.pack(verify,", "_COVERED.pack(bytes(20),"),
        ),
        scenario="rot",
        anomalies=frozenset({"inconsistent-offsets", "divergent-replica"}),
        seeds=12,
    ),
    PlantedBug(
        name="look-ups-on-the-loop",
        rule="look-ups by time do not hold up the loop",
        mutations=(
            Mutation(
                _LOG + "look_up",
                "return self._disk.look_up(self.pid, find_in, on_found)",
                "found = find_in(self._disk)\n    return self._disk.look_up(self.pid, lambda _rows: found, on_found)",
            ),
        ),
        scenario="slow_reads",
        anomalies=frozenset({"no-progress"}),
        seeds=8,
    ),
    PlantedBug(
        name="unreadable-batch-ends-the-process",
        rule="a batch that the medium cannot give is damaged, and is fetched again",
        mutations=(
            Mutation(
                "smq.replication.log.codec:parse_value",
                "size = len(value) - ENVELOPE_BYTES\n",
                "assert value, 'EIO'\n    size = len(value) - ENVELOPE_BYTES\n",
            ),
        ),
        scenario="slow_reads",
        anomalies=frozenset({"process-died", "no-progress"}),
        seeds=8,
    ),
)
