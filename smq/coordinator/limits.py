"""Every bound of the server, each with its reason. Constants only; the whole of smq.coordinator may import it."""

from typing import Final

MIB: Final = 1 << 20

GRPC_SEND_BYTES_MAX: Final = 101 * MIB  # a batch comes whole, and may be configured up to 100 MiB
# gRPC fails a whole stream for a message beyond its limit, so the limit lies this much above what we refuse ourselves,
# with a typed answer to that one request. It is no more, for what is beyond is held in memory by each stream.
GRPC_RECEIVE_SLACK_BYTES: Final = MIB
REQUEST_BYTES_DEFAULT: Final = 8 * MIB  # a request, unless configured otherwise
REQUEST_BYTES_MAX: Final = 100 * MIB

# One HTTP/2 connection multiplexes a client process: one subscription per partition of a large topic fits.
GRPC_STREAMS_PER_CONNECTION_MAX: Final = 1024
GRPC_CONNECTIONS_MAX: Final = 5_000  # a client process needs one to a node
GRPC_CONNECTIONS_PER_ADDRESS_MAX: Final = 2_000  # as Kafka's
GRPC_HANDSHAKE_MS: Final = 10_000  # of TLS and HTTP/2 together: who says nothing is dropped
GRPC_IDLE_MS: Final = 600_000  # without any call; a client that wants another connects again by itself
# What a stream may send ahead of what the node has asked for. By default gRPC widens it to what the line could carry in
# the time that an answer takes, so the slower a node gets, the more it takes in: measured, 32 streams of one client
# filled 7 GB in 10 s. 256 KiB are 25 MB/s a stream over 10 ms, and more than loopback needs.
GRPC_WINDOW_BYTES: Final = 256 << 10
GRPC_ARRIVALS_MAX: Final = 32  # calls whose request, at most 9 MiB, is arriving; most are a single packet
GRPC_ARRIVAL_S_MAX: Final = 1.0  # a call that takes longer while others wait loses its place and becomes a slow one
GRPC_ARRIVALS_SLOW_MAX: Final = 32  # beyond, the oldest slow call is ended: others do not wait for it
GRPC_LARGE_REQUEST_BYTES: Final = 64 << 10  # smaller ones are as many as the streams, and weigh as little
# Of all that are being served: a request waits for a commit or for records, with all that its client sent along.
GRPC_LARGE_REQUESTS_BYTES_MAX: Final = 128 * MIB
GRPC_KEEPALIVE_MS: Final = 10_000  # a dead client's streams end within about half a minute
GRPC_KEEPALIVE_TIMEOUT_MS: Final = 20_000
GRPC_CLIENT_PING_INTERVAL_MS_MIN: Final = 5_000  # what a client may ping: below gRPC's default of 5 min, ours use 10 s
GRPC_SHUTDOWN_GRACE_S: Final = 2.0  # after draining: enough to answer, not to hang

# One publishing stream: past either bound the stream is not read, and HTTP/2 flow control slows the client down.
PUBLISH_INFLIGHT_PER_STREAM_MAX: Final = 1024
PUBLISH_INFLIGHT_BYTES_PER_STREAM_MAX: Final = 32 * MIB
PUBLISH_INFLIGHT_BYTES_PER_NODE_MAX: Final = 256 * MIB

# Each may hold one request that is not admitted yet, three times: gRPC's bytes, Python's, and the message. 16 streams
# of 9 MiB are what one connection can make a node hold by sending alone. A producer needs one stream to a node.
PUBLISH_STREAMS_PER_CONNECTION_MAX: Final = 16

# Half of what the node refuses at: acknowledgements do not hold a stream back where the other replicas' disks are
# faster than this node's, so the disk's own queue must.
PUBLISH_DISK_QUEUE_BYTES_MAX: Final = 32 * MIB
PUBLISH_DISK_POLL_MS: Final = 2  # 32 MiB take a disk much longer; nothing waits for this but a congested stream
OVERLOADED_RETRY_AFTER_MS: Final = 100  # a disk queue of 32 MiB is shorter by then

PUBLISH_SESSIONS_MAX: Final = 10_000  # a few hundred bytes each; the idlest goes when there is one more
SUBSCRIPTIONS_MAX: Final = 10_000  # each is a stream with at most one response in memory
SESSION_ID_CHARS_MAX: Final = 256  # a name, not a document

FETCH_PARTITIONS_MAX: Final = 1_000  # of one request; a topic of more is fetched by several
FETCH_PARTITION_BYTES_DEFAULT: Final = MIB
FETCH_CONCURRENCY: Final = 8  # reads of one request at a time: overshoots the byte cap by 8 batches at most
FETCH_INFLIGHT_BYTES_PER_CONNECTION_MAX: Final = 32 * MIB  # answers that are read, or not taken yet, as Kafka's
FETCH_INFLIGHT_BYTES_PER_NODE_MAX: Final = 512 * MIB
FETCH_WAIT_MS_MAX: Final = 50_000  # a longer poll is told empty and asks again
FETCH_BARRIER_MS: Final = 8_000  # beyond max_wait, for a barrier before "out of range": longer than an election
LIST_OFFSETS_MAX: Final = 1_000
COMMIT_ITEMS_MAX: Final = 10_000  # one Raft entry; ~100 bytes an item

SUBSCRIBE_BYTES_DEFAULT: Final = MIB
SUBSCRIBE_BYTES_MAX: Final = 8 * MIB  # held by a stream whose client does not read; one batch may be larger
SUBSCRIBE_POLL_MS: Final = 30_000  # how long one long poll of a subscription parks; it then polls again
SUBSCRIBE_SEEKS_QUEUED_MAX: Final = 64  # control messages read ahead of the sender
DECODE_CHUNK_RECORDS: Final = 500  # decoded before others get the loop: about a millisecond

TIMEOUT_MS_DEFAULT: Final = 30_000
TIMEOUT_MS_MAX: Final = 60_000  # as the node itself clips
TIMEOUT_GRACE_MS: Final = 2_000  # the node answers by its own deadline; past this we answer for it
DEADLINE_SLACK_MS: Final = 100  # our typed error leaves this long before the client's own deadline

DRAIN_MS: Final = 5_000  # SIGTERM: leaderships are handed over, or left to the others
PARTITION_COUNT_MAX: Final = 10_000  # one topic's; a sanity bound before the replicated limit
METRICS_PARTITIONS_MAX: Final = 10_000  # series beyond would make a scrape larger than a batch

# One Kafka connection is one thread or loop of a client, with a handful of requests in flight (5 by default).
KAFKA_INFLIGHT_PER_CONNECTION_MAX: Final = 256
# Fetches that one connection may have read and not taken, each up to a whole answer; clients have one or two at a time.
# Without it one connection that pipelines fetches and does not read holds all that the node has for everybody.
KAFKA_FETCHES_PER_CONNECTION_MAX: Final = 4
KAFKA_INFLIGHT_BYTES_PER_CONNECTION_MAX: Final = 32 * MIB  # past it the socket is not read; one request may pass it
KAFKA_INFLIGHT_BYTES_PER_NODE_MAX: Final = 512 * MIB  # of all its connections, answers that nobody reads yet included
KAFKA_ROOM_S_MAX: Final = 1  # a fetch on a full node is then answered with nothing, which its client asks again
KAFKA_CONNECTIONS_MAX: Final = 10_000  # some 10 KB each when idle; beyond, the file descriptors come to an end first
KAFKA_CONNECTIONS_PER_ADDRESS_MAX: Final = 2_000  # a host of many clients, or a few hosts behind one address
KAFKA_CONFIRM_MS: Final = 5_000  # "unknown topic" is retried by clients: they do not wait for a lost quorum to say it
KAFKA_FRAME_S_MAX: Final = 30  # for all of one request: 8 MiB over a slow line, but no dripping byte by byte
KAFKA_STUCK_S_MAX: Final = 60  # a consumer that is held up this long has been given up by its group as well
KAFKA_STUCK_FULL_S_MAX: Final = 5  # where such answers have filled the node: others wait for their room
KAFKA_IDLE_S_MAX: Final = 600  # as Kafka's connections.max.idle.ms

# File descriptors of this process that no client gets: the disk, the listeners, the log, what Python and gRPC hold
# (some 50), and the sessions of 9 nodes (2 each, old and new) with 64 strangers on their port.
DESCRIPTORS_RESERVED: Final = 192
DESCRIPTORS_MIN: Final = 256  # less leaves hardly a client: the node says so instead of starting

HTTP_CONNECTIONS_MAX: Final = 256  # probes, scrapes, a few browsers
HTTP_CONNECTIONS_PER_ADDRESS_MAX: Final = 64
# --- groups with members
GROUP_SESSION_MS_MIN: Final = 1_000  # below it a busy machine evicts who is well; Kafka's own default floor is 6 s
GROUP_SESSION_MS_MAX: Final = 1_800_000  # as Kafka's group.max.session.timeout.ms
# Groups without a generation yet that one address has asked for: a tenth of groups_max, which strangers could else fill
# by asking for ids under many names; more than a machine starts jobs at once.
GROUPS_NEW_PER_ADDRESS_MAX: Final = 1_000
GROUP_INITIAL_DELAY_MS_DEFAULT: Final = 3_000  # as Kafka's group.initial.rebalance.delay.ms
GROUP_INITIAL_DELAY_MS_MAX: Final = 60_000  # beyond it a first consumer would seem to hang
GROUP_QUEUE_MAX: Final = 4_000  # requests that wait for one command: a few of each member there may be
GROUP_ID_GIVEN_MS_MAX: Final = 30_000  # a member joins under its new id at once, or has gone
MEMBER_ID_CHARS_MAX: Final = 233  # of an id that is given: the client's name, cut, and 32 random digits
GROUP_TICK_MS: Final = 50  # sessions are of seconds
GROUP_PAUSE_MS: Final = 1_000  # a tick this late: this process stood still, and heard nobody meanwhile
GROUP_COMMAND_MS_MAX: Final = 10_000  # of one change of a group: longer than an election
GROUP_EXPIRY_MS: Final = 600_000  # how often committed offsets are looked at for expiry
METRICS_GROUPS_MAX: Final = 1_000  # series beyond would make a scrape larger than a batch

HTTP_REQUEST_BYTES_MAX: Final = 64 << 10  # nothing posts here
