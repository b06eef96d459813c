"""The named bounds of the replicated state, each with its reason.

Owns the numbers that change outcomes, so they are the same on every node of one version. Limits that an operator may
choose travel in `InitCluster` and are replicated; the others are constants here. It imports only the command shapes.
Any module may import it.
"""

from typing import Final

from smq.raft_state.commands import InitCluster
from smq.raft_state.ids import NO_BIRTH, BirthId, Offset

# --- chosen by the operator, once, at InitCluster; these are the defaults
TOPICS_MAX_DEFAULT: Final = 10_000  # as many as a console can list and a snapshot carries in ~10 ms
PARTITIONS_MAX_DEFAULT: Final = 100_000  # 100k partitions make a snapshot of ~10 MB, still installed in a second
GROUPS_MAX_DEFAULT: Final = (
    10_000  # one per job; a client with a new group name at each start hits this limit, not memory
)
REPLIES_MAX_DEFAULT: Final = 10_000  # of each cache: at 300 such requests/s a retry is known for 33 s
TOPIC_PARTITIONS_MAX: Final = 10_000  # of one topic: a sanity bound before the replicated limit
LIMIT_CAP: Final = 1_000_000  # no limit may be set higher: a snapshot has to fit in memory twice
REPLIES_CAP: Final = (
    100_000  # dropping the oldest of a dict scans its dead entries: above this, that takes milliseconds
)

# --- sizes of names and ids, in bytes of UTF-8
CLUSTER_ID_BYTES_MAX: Final = 64  # a uuid in text, or a short name
ADDRESS_BYTES_MAX: Final = 300  # a DNS name has 253 bytes, a port 6
TOPIC_NAME_CHARS_MAX: Final = 249  # Kafka's bound: clients and file names rely on it
GROUP_NAME_BYTES_MAX: Final = 512  # Kafka's groups are named "kafka-cg-<group>" here; no user types more
METADATA_BYTES_MAX: Final = 4_096  # Kafka's offset.metadata.max.bytes
TOPIC_ID_BYTES: Final = 16  # a uuid
PARTITION_ID_BYTES: Final = 20  # the topic's uuid, then a uint32
LISTENERS_MAX: Final = 8  # of one node, beside its own addresses: ways in from inside, outside, a partner's network
LISTENER_NAME_BYTES_MAX: Final = 32
RACK_BYTES_MAX: Final = 255  # the name of a zone or a data centre; every Metadata response carries it
DISK_ID_BYTES: Final = 16  # random, as a request id
BIRTH_ID_BYTES: Final = 16  # likewise
SEGMENT_DIGEST_BYTES: Final = 16  # of SHA-256: two texts that share them have never been found
REQUEST_ID_BYTES: Final = 16  # random; 2**128 makes collisions within the cache impossible in practice

# --- counts
NODES_MAX: Final = 64  # far above any sane Raft group; bounds what a misconfigured starter can register
COMMIT_ITEMS_MAX: Final = 10_000  # of one CommitOffsets: a member of a group with 10k partitions, in one entry
PRODUCERS_MAX: Final = 100_000  # ids with a bumped epoch; the producer of a dropped id starts a new session
ASSIGN_ITEMS_MAX: Final = 5_000  # callers that share one AssignOffsets: 270 KB, a few ms per apply
ASSIGN_COUNT_MAX: Final = 1_000_000  # offsets of one request: a runaway loop must not use up an int64
ASSIGNED_MAX: Final = 20_000  # requests with a known answer: 1 MB of a snapshot; older ones are refused
PRODUCER_EPOCH_RETIRED: Final = 2**15 - 1  # never allocated: an id that would reach it is replaced by a fresh one

# --- groups with members
COORDINATOR_SLOTS: Final = 64  # groups are spread over the slots, and the slots over the nodes
GROUP_MEMBERS_MAX: Final = 1_000  # each rebalance writes all members in one entry, and all of them wait for it
GROUP_BYTES_MAX: Final = 900_000  # names and metadata of a group's members, or their assignments: one Raft entry
MEMBER_BYTES_CLUSTER_MAX: Final = 64 * 1024 * 1024  # metadata and assignments of all groups: a snapshot holds them
MEMBER_BYTES_OVERHEAD: Final = 64  # lengths and numbers of one member
MEMBER_PROTOCOLS_MAX: Final = 32  # assignors of one member: clients have five
MEMBER_TEXT_BYTES_MAX: Final = 1_024  # a member's or client's id, an instance id (Kafka: 249 characters), a protocol
PATTERN_BYTES_MAX: Final = 8_192  # of a subscription: a few hundred names in one expression
SESSION_TIMEOUT_MS_MAX: Final = 2**31 - 1  # the most that the wire can carry; the coordinator allows less
OFFSETS_RETENTION_MINUTES_DEFAULT: Final = 90 * 1_440  # a consumer that was away for 30 days resumes, with a margin
OFFSETS_RETENTION_MINUTES_MAX: Final = 100 * 365 * 1_440  # a century: beyond it, 0 (for ever) says what is meant
GROUP_INITIAL_DELAY_MS_DEFAULT: Final = 3_000  # like Kafka's
GROUP_INITIAL_DELAY_MS_MAX: Final = 60_000  # beyond it a first consumer would seem to hang
CONSUMER_SESSION_MS_DEFAULT: Final = 45_000  # like Kafka's; so are the next five, but for the two floors
CONSUMER_SESSION_MS_MIN: Final = 1_000  # a test, or a network without pauses
CONSUMER_SESSION_MS_MAX: Final = 1_800_000
CONSUMER_HEARTBEAT_MS_DEFAULT: Final = 5_000
CONSUMER_HEARTBEAT_MS_MIN: Final = 100  # 1,000 members: 10,000 heartbeats/s, more than a node answers
CONSUMER_HEARTBEAT_MS_MAX: Final = 15_000
GENERATION_MAX: Final = 2**31 - 1  # an int32 of Kafka's protocol

# --- the clock of expiry, and producers
CLOCK_ELAPSED_MS_MAX: Final = 600_000  # per AdvanceClock: after hours without a quorum, retries still have their time
PRODUCER_EXPIRATION_MS_DEFAULT: Final = 86_400_000  # Kafka's default, a day
# Twice five minutes, the longest default delivery timeout of any known client: the clock may run at double speed.
PRODUCER_EXPIRATION_MS_MIN: Final = 600_000
PRODUCER_EXPIRATION_MS_MAX: Final = 2**31 - 1  # Kafka's type of this setting
PRODUCER_MARKS_PER_EXPIRATION: Final = 4  # a producer is forgotten after one expiration to one and a quarter
PRODUCER_MARKS_MAX: Final = 8  # twice that, for changes of the setting; without room, producers live longer

# --- users
USERS_MAX: Final = 10_000  # one per person and service; a snapshot has 3 MB of them
USER_NAME_BYTES_MAX: Final = 256  # an e-mail address has at most 254
SCRAM_ITERATIONS_MIN: Final = 4_096  # RFC 7677
SCRAM_ITERATIONS_MAX: Final = 16_384  # Kafka's: a login by PLAIN costs a node as many, 10 ms
SCRAM_SALT_BYTES_MAX: Final = 128  # clients make 16 to 64
DECOY_SECRET_BYTES: Final = 32  # of the salts that unknown users seem to have

# --- rules about users
ACLS_MAX: Final = 10_000  # a few for each user; a snapshot has 2 MB of them
ACL_NAME_BYTES_MAX: Final = 512  # as a group's name
HOST_BYTES_MAX: Final = 64  # an address

# --- quotas
QUOTAS_MAX: Final = 10_000  # one or two for each user; a snapshot has 1 MB of them
QUOTA_NAME_BYTES_MAX: Final = 512  # of a user, a client id or an address: as a group's name
QUOTA_MAX: Final = 10**12  # bytes per second, or whatever the unit is: more than any machine can do

# --- transactions
TRANSACTIONAL_IDS_MAX: Final = 20_000  # one per task of a stream job; an id that is not used expires
TRANSACTIONAL_ID_BYTES_MAX: Final = 512  # as a group's name
TRANSACTION_PARTITIONS_MAX: Final = 10_000  # of one transaction: one Raft entry touches as many replicas
TRANSACTION_ITEMS_CLUSTER_MAX: Final = 500_000  # partitions and staged offsets of all open ones: some 100 MB
DIGEST_BYTES_MAX: Final = 32  # of the rows of a batch: the longest that is usual (SHA-256)
BATCH_TRANSACTIONS_MAX: Final = 5_000  # of one CommitBatch, one per task of a job: half a megabyte
APPS_MAX: Final = 10_000  # that commit batches: as many as groups
APP_BYTES_MAX: Final = 512  # as a transactional id
TRANSACTION_TIMEOUT_MS_MAX_DEFAULT: Final = 900_000  # Kafka's default
TRANSACTIONAL_ID_EXPIRATION_MS_DEFAULT: Final = 7 * 86_400_000  # Kafka's default

# --- offsets: half of int64 is spare, so the sum of an offset and a batch cannot overflow
START_OFFSET_MAX: Final = Offset(2**62)
OFFSET_MAX: Final = Offset(2**63 - 1)

# --- the topic configuration
MESSAGE_BYTES_DEFAULT: Final = 1_048_588  # Kafka's default: 1 MiB and the overhead of a batch
MESSAGE_BYTES_CAP: Final = 100 * 1024 * 1024  # a batch is one request, and a request may have a MiB more

# --- the codec
TEXT_BYTES_MAX: Final = 16_384  # of any string in a command: more than twice the longest valid one
ITEMS_MAX: Final = LIMIT_CAP  # of any list in a command: one item per partition
COMMAND_BYTES_MAX: Final = 64 * 1024 * 1024  # ITEMS_MAX advances are 48 MB; nothing valid is larger
QUOTED_CHARS_MAX: Final = 80  # of a user's text inside an error message


def default_init(cluster_id: str, birth: BirthId = NO_BIRTH) -> InitCluster:
    """The command that starts a cluster with the default limits."""
    return InitCluster(
        cluster_id=cluster_id,
        birth=birth,
        topics_max=TOPICS_MAX_DEFAULT,
        partitions_max=PARTITIONS_MAX_DEFAULT,
        groups_max=GROUPS_MAX_DEFAULT,
        replies_max=REPLIES_MAX_DEFAULT,
    )
