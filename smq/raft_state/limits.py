"""The named bounds of the replicated state, each with its reason.

Owns numbers that change outcomes, so they are the same on every node of one version: what an operator may choose
travels in `InitCluster` and is replicated, what he may not is a constant here. Imports only the command shapes.
Everybody may import it.
"""

from typing import Final

from smq.raft_state.commands import InitCluster
from smq.raft_state.ids import Offset

# --- the operator's choice, once, at InitCluster; these are the defaults
TOPICS_MAX_DEFAULT: Final = 10_000  # as many as a console can list and a snapshot carries in ~10 ms
PARTITIONS_MAX_DEFAULT: Final = 100_000  # 100k partitions make a snapshot of ~10 MB, still installed in a second
GROUPS_MAX_DEFAULT: Final = 10_000  # one a job; a client that names a new group at every start hits it, not memory
REPLIES_MAX_DEFAULT: Final = 10_000  # at 1,000 commands/s a retry is known for 10 s, longer than any deadline
LIMIT_CAP: Final = 1_000_000  # no limit may be set higher: a snapshot has to fit in memory twice
REPLIES_CAP: Final = 100_000  # dropping the oldest of a dict scans its dead entries: above this it is milliseconds

# --- sizes of names and ids, in bytes of UTF-8
CLUSTER_ID_BYTES_MAX: Final = 64  # a uuid in text, or a short name
ADDRESS_BYTES_MAX: Final = 300  # a DNS name has 253 bytes, a port 6
TOPIC_NAME_CHARS_MAX: Final = 249  # Kafka's bound: clients and file names rely on it
GROUP_NAME_BYTES_MAX: Final = 512  # Kafka's groups live here as "kafka-cg-<group>"; nobody types more
METADATA_BYTES_MAX: Final = 4_096  # Kafka's offset.metadata.max.bytes
TOPIC_ID_BYTES: Final = 16  # a uuid
PARTITION_ID_BYTES: Final = 20  # the topic's uuid, then a uint32
RACK_BYTES_MAX: Final = 255  # the name of a zone or of a data centre; every answer to Metadata carries it
DISK_ID_BYTES: Final = 16  # random, as a request id
REQUEST_ID_BYTES: Final = 16  # random; 2**128 makes collisions within the cache impossible in practice

# --- counts
NODES_MAX: Final = 64  # far above any sane Raft group; it bounds what a misconfigured starter can register
COMMIT_ITEMS_MAX: Final = 10_000  # of one CommitOffsets: a member of a group with 10k partitions, in one entry
PRODUCERS_MAX: Final = 100_000  # ids with a bumped epoch; a dropped one only has to start a new session
ASSIGN_ITEMS_MAX: Final = 5_000  # callers that share one AssignOffsets: 270 KB, a few ms to apply
ASSIGN_COUNT_MAX: Final = 1_000_000  # offsets of one request: a loop gone wild must not use an int64 up
ASSIGNED_MAX: Final = 20_000  # requests whose answer is known: 1 MB of a snapshot; an older one is refused
PRODUCER_EPOCH_RETIRED: Final = 2**15 - 1  # never handed out: an id that would reach it is replaced by a fresh one

# --- groups with members
COORDINATOR_SLOTS: Final = 64  # groups are spread over these, and these over the nodes
GROUP_MEMBERS_MAX: Final = 1_000  # each rebalance writes all of them in one entry, and each of them waits for it
GROUP_BYTES_MAX: Final = 900_000  # names and metadata of a group's members, or their assignments: one Raft entry
MEMBER_BYTES_CLUSTER_MAX: Final = 64 * 1024 * 1024  # of all groups, metadata and assignments: a snapshot carries them
MEMBER_BYTES_OVERHEAD: Final = 64  # lengths and numbers of one member
MEMBER_PROTOCOLS_MAX: Final = 32  # assignors of one member: clients know five
MEMBER_TEXT_BYTES_MAX: Final = 1_024  # a member's or client's id, an instance id (Kafka: 249 characters), a protocol
SESSION_TIMEOUT_MS_MAX: Final = 2**31 - 1  # as the wire can say it; the coordinator allows less
OFFSETS_RETENTION_MS_DEFAULT: Final = 90 * 86_400_000  # a consumer that was away for 30 days resumes (P6), with room
OFFSETS_RETENTION_MS_MAX: Final = 100 * 365 * 86_400_000
GENERATION_MAX: Final = 2**31 - 1  # an int32 of Kafka's protocol
EXPIRY_STEP_MS_MAX: Final = 1_200_000  # of one ExpireOffsets: at one in 10 minutes no clock runs faster than twice

# --- offsets: half of int64 is left to grow into, so no sum of an offset and a batch can overflow
START_OFFSET_MAX: Final = Offset(2**62)
OFFSET_MAX: Final = Offset(2**63 - 1)

# --- the topic configuration
MESSAGE_BYTES_DEFAULT: Final = 1_048_588  # Kafka's default: 1 MiB and the overhead of a batch
MESSAGE_BYTES_CAP: Final = 100 * 1024 * 1024  # a batch comes in one request, and those may be 100 MiB

# --- the codec
TEXT_BYTES_MAX: Final = 16_384  # of any string in a command: over twice the longest that is valid
ITEMS_MAX: Final = LIMIT_CAP  # of any list in a command: one item a partition
COMMAND_BYTES_MAX: Final = 64 * 1024 * 1024  # ITEMS_MAX advances are 48 MB; nothing larger can be meant
QUOTED_CHARS_MAX: Final = 80  # of a user's text inside an error message


def default_init(cluster_id: str) -> InitCluster:
    """The command that starts a cluster with the default limits."""
    return InitCluster(
        cluster_id=cluster_id,
        topics_max=TOPICS_MAX_DEFAULT,
        partitions_max=PARTITIONS_MAX_DEFAULT,
        groups_max=GROUPS_MAX_DEFAULT,
        replies_max=REPLIES_MAX_DEFAULT,
    )
