"""Every bound of the server, each with its reason. Constants only; all of smq.coordinator may import it."""

from typing import Final

MIB: Final = 1 << 20

GRPC_SEND_BYTES_MAX: Final = 101 * MIB  # a batch is sent in one message, and may be configured up to 100 MiB
# gRPC fails a whole stream for one message beyond its limit. So gRPC's limit is this much above ours, which refuses
# that request alone, with a typed error. It is not higher, because each stream may hold that much in memory.
GRPC_RECEIVE_SLACK_BYTES: Final = MIB
# Of one Kafka request: the largest batch that a topic may be set to take, as Kafka's own limit of a request, and a MiB
# for the rest of the request. So by default a node takes every batch that a topic does.
REQUEST_BYTES_MAX: Final = 101 * MIB
REQUEST_OVERHEAD_BYTES: Final = 64 << 10  # of a request with one batch: names, at most
# Of one gRPC request, and of an answer with records. Each of thousands of gRPC's streams may hold a whole message that
# it has not given to the node yet, which no budget can bound.
ANSWER_BYTES_MAX: Final = 8 * MIB

# One HTTP/2 connection multiplexes a client process: one subscription per partition of a large topic fits.
GRPC_STREAMS_PER_CONNECTION_MAX: Final = 1024
GRPC_CONNECTIONS_MAX: Final = 5_000  # a client process needs one per node
GRPC_CONNECTIONS_PER_ADDRESS_MAX: Final = 2_000  # like Kafka's
GRPC_HANDSHAKE_MS: Final = 10_000  # of TLS and HTTP/2 together: a silent client is dropped
GRPC_IDLE_MS: Final = 600_000  # without any call; a client that wants another connects again by itself
# What a stream may send ahead of what the node has asked for. By default gRPC widens it to what the line can carry
# during one answer, so the slower a node gets, the more it takes in: measured, 32 streams of one client filled 7 GB in
# 10 s. 256 KiB allow 25 MB/s per stream over 10 ms, and are more than loopback needs.
GRPC_WINDOW_BYTES: Final = 256 << 10
GRPC_ARRIVALS_MAX: Final = 32  # calls whose request, at most 9 MiB, is arriving; most are a single packet
GRPC_ARRIVAL_S_MAX: Final = 1.0  # a call that takes longer while others wait loses its place and becomes a slow one
GRPC_ARRIVALS_SLOW_MAX: Final = 32  # beyond, the oldest slow call is ended: others do not wait for it
# Unary calls and streams of one address whose first message has not been read. As many as it may have connections; each
# holds some 25 KB, and its place in the queue delays the calls of others by 10 ms at most.
GRPC_SILENT_CALLS_PER_ADDRESS_MAX: Final = 2_000
GRPC_LARGE_REQUEST_BYTES: Final = 64 << 10  # smaller ones are bounded by the number of streams
# Of all requests being served: each stays in memory while it waits for a commit or for records.
GRPC_LARGE_REQUESTS_BYTES_MAX: Final = 128 * MIB
GRPC_KEEPALIVE_MS: Final = 10_000  # a dead client's streams end within about half a minute
GRPC_KEEPALIVE_TIMEOUT_MS: Final = 20_000
GRPC_CLIENT_PING_INTERVAL_MS_MIN: Final = 5_000  # between a client's pings; gRPC's default is 5 min, ours 10 s
GRPC_SHUTDOWN_GRACE_S: Final = 2.0  # after draining: enough to answer, too little to hang
KAFKA_NOTICE_S: Final = 5.0  # after a start, a Kafka port that is still closed says why: longer than an election
FIRST_START_POLL_S: Final = 0.2  # a node that belongs to no cluster looks for what `smq first-start` leaves
LAST_WORDS_S: Final = 5.0  # for the log to say why the process ends, which it does then whatever the log does

# One publishing stream: beyond either bound the stream is not read, and HTTP/2 flow control slows the client down.
PUBLISH_INFLIGHT_PER_STREAM_MAX: Final = 1024
PUBLISH_INFLIGHT_BYTES_PER_STREAM_MAX: Final = 32 * MIB
PUBLISH_INFLIGHT_BYTES_PER_NODE_MAX: Final = 256 * MIB

# Each may hold one request that is not admitted yet, in three copies: gRPC's bytes, Python's bytes, and the message. By
# sending alone, one connection can make a node hold 16 streams of 9 MiB. A producer needs one stream per node.
PUBLISH_STREAMS_PER_CONNECTION_MAX: Final = 16

# Half of the bound at which the node refuses. If the other replicas' disks are faster than this node's,
# acknowledgements do not slow a stream down, so this disk's own queue must.
PUBLISH_DISK_QUEUE_BYTES_MAX: Final = 16 * MIB
PUBLISH_DISK_POLL_MS: Final = 2  # a disk takes much longer for 16 MiB; only a congested stream waits for this
OVERLOADED_RETRY_AFTER_MS: Final = 100  # a disk queue of 16 MiB is shorter by then

# Requests for offsets without records, of one message: a client's callers that are due together. As a message of this
# size takes the loop a few milliseconds, it delays others no longer.
OFFSET_REQUESTS_PER_MESSAGE_MAX: Final = 1_000
OFFSET_REQUESTS_PER_STREAM_MAX: Final = 4_000  # not answered yet; beyond, the stream is not read
OFFSET_STREAMS_PER_CONNECTION_MAX: Final = 16  # as for publishing; a client needs one of each kind per node

PUBLISH_SESSIONS_MAX: Final = 10_000  # a few hundred bytes each; one more evicts the least recently used
SUBSCRIPTIONS_MAX: Final = 10_000  # each is a stream with one response in memory, of 16 KiB at least
SESSION_ID_CHARS_MAX: Final = 256  # a name, not a document

FETCH_PARTITIONS_MAX: Final = 1_000  # of one request; a larger topic takes several requests
FETCH_PARTITION_BYTES_DEFAULT: Final = MIB
FETCH_CONCURRENCY: Final = 8  # concurrent reads of one request: overshoots the byte cap by at most 8 batches
FETCH_INFLIGHT_BYTES_PER_CONNECTION_MAX: Final = 32 * MIB  # answers being read or not taken yet, like Kafka's
FETCH_INFLIGHT_BYTES_PER_NODE_MAX: Final = 512 * MIB
FETCH_WAIT_MS_MAX: Final = 50_000  # a longer poll gets an empty answer and asks again
FETCH_BARRIER_MS: Final = 8_000  # beyond max_wait, for the barrier before "out of range": longer than an election
LIST_OFFSETS_MAX: Final = 1_000
RANGES_PER_TURN: Final = 1_000  # partitions of one view whose ends are asked for at a time: a few ms of the loop
VIEW_ENDS_MS: Final = 500  # a view of many partitions does not wait longer for a leader that may be gone
COMMIT_ITEMS_MAX: Final = 10_000  # one Raft entry; about 100 bytes per item

SUBSCRIBE_BYTES_DEFAULT: Final = MIB
SUBSCRIBE_BYTES_MAX: Final = 8 * MIB  # of a response; a single record may be larger
SUBSCRIBE_BYTES_MIN: Final = 16 << 10  # of a response when memory is short: 10,000 streams then hold 160 MiB
# Of all streams, what they have read and opened: room for one of the largest batches, in both forms.
SUBSCRIBE_OPEN_BYTES_PER_NODE_MAX: Final = 256 * MIB
SUBSCRIBE_SENDING_BYTES_PER_NODE_MAX: Final = 256 * MIB  # responses that clients have not taken, and their copies
SUBSCRIBE_SHARE: Final = 32  # a response is at most this part of what is left of that
SUBSCRIBE_COPIES: Final = 3  # of a response in memory: the records, gRPC's bytes, and those that its transport holds
SUBSCRIBE_LARGE_MAX: Final = 2  # responses of one record above SUBSCRIBE_BYTES_MAX at a time: up to 300 MiB each
SUBSCRIBE_OPENED_BYTES: Final = 4 * MIB  # that a batch is expected to take decompressed; a larger one waits for room
# After this time a stream gives back what it has opened, if others wait: its client takes little. Opening the largest
# batch again costs a fifth of that.
SUBSCRIBE_LEASE_S: Final = 1.0
DECODE_THREADS: Final = 2  # for subscriptions, and again for searches and the console's pages
SUBSCRIBE_POLL_MS: Final = 30_000  # of one long poll of a subscription, which then polls again
SEARCH_RECORDS_DEFAULT: Final = 500  # a page for a person or a script
SEARCH_RECORDS_MAX: Final = 10_000
SEARCH_BYTES_DEFAULT: Final = MIB
SEARCH_BYTES_MAX: Final = 8 * MIB  # of a page, like a subscription's response; a single record may be larger
SEARCH_READ_BYTES: Final = MIB  # read at a time; a single batch may be larger
SEARCH_SCAN_BYTES_MAX: Final = 16 * MIB  # for one page, as stored: 116,000 records of 140 bytes took 0.5 s
SEARCH_SCAN_S_MAX: Final = 1.0  # for one page: its client shows progress, and asks for the next one
SEARCH_LAG_MS: Final = 500  # for records that this replica does not have yet
SEARCHES_MAX: Final = 8  # on one node: each takes its turns of the loop
FILTER_HEADERS_MAX: Final = 32  # each is compared with each header of a record
TIMEOUT_MS_DEFAULT: Final = 30_000
TIMEOUT_MS_MAX: Final = 60_000  # as in the node itself
TIMEOUT_GRACE_MS: Final = 2_000  # the node answers by its own deadline; after this we answer for it
DEADLINE_SLACK_MS: Final = 100  # our typed error is sent this long before the client's own deadline

AUDIT_LINES_WAITING_MAX: Final = 10_000  # for the disk; further ones are counted and lost: no request waits for them
AUDIT_NAMES_MAX: Final = 100  # of what one request is about
AUDIT_TEXT_CHARS_MAX: Final = 512  # of each name
AUDIT_REFUSALS_MAX: Final = 10_000  # remembered, so that the same one does not fill the files
# Of all refusals, which strangers can cause: some 250 lines. The files of 128 MiB then go back more than a day.
AUDIT_REFUSED_BYTES_PER_MINUTE_MAX: Final = 64 << 10

QUOTA_METERS_MAX: Final = 10_000  # of users, client ids and addresses with a quota: some 500 bytes each

DRAIN_MS: Final = 5_000  # after SIGTERM: leaderships not handed over by then are left to the other nodes
METRICS_PARTITIONS_MAX: Final = 10_000  # more series would make a scrape larger than a batch

# One Kafka connection is one thread or loop of a client, with a few requests in flight (5 by default).
KAFKA_INFLIGHT_PER_CONNECTION_MAX: Final = 256
# Fetches that one connection may have read and not taken, each up to a whole answer; clients have one or two at a time.
# Without it one connection that pipelines fetches and does not read could take the whole node's budget.
KAFKA_FETCHES_PER_CONNECTION_MAX: Final = 4
KAFKA_INFLIGHT_BYTES_PER_CONNECTION_MAX: Final = 32 * MIB  # beyond it the socket is not read; one request may exceed it
KAFKA_INFLIGHT_BYTES_PER_NODE_MAX: Final = 512 * MIB  # of all its connections, including answers not read yet
# Of the bytes above, those of answers that are being read from the log. A slow disk may hold all of them for seconds,
# and the rest is for everything else: otherwise no Produce and no Heartbeat would be read meanwhile.
KAFKA_READING_BYTES_PER_NODE_MAX: Final = KAFKA_INFLIGHT_BYTES_PER_NODE_MAX // 2
KAFKA_BUDGET_WAIT_S_MAX: Final = 1  # a fetch on a full node then gets an empty answer, and its client asks again
KAFKA_FETCH_SESSIONS_MAX: Final = 1_000  # Kafka's max.incremental.fetch.session.cache.slots
KAFKA_FETCH_SESSION_STALE_S: Final = 120  # as Kafka's: younger sessions, and those in use, do not make room for others
KAFKA_FETCH_SESSION_PARTITIONS_MAX: Final = (
    10_000  # a fetch of more has no session: a short request would cost too much
)
KAFKA_FETCH_SESSION_PARTITION_BYTES: Final = 1_024  # measured, with a topic's longest name for each
KAFKA_FETCH_SESSION_BYTES_PER_NODE_MAX: Final = 64 * MIB  # of all sessions, and of the bytes in flight above
KAFKA_CONNECTIONS_MAX: Final = 10_000  # about 10 KB each when idle; file descriptors run out first
KAFKA_CONNECTIONS_PER_ADDRESS_MAX: Final = 2_000  # a host with many clients, or a few hosts behind one address
KAFKA_CONFIRM_MS: Final = 3_000  # clients ask again, so they need not wait longer for a quorum that is lost
KAFKA_DESCRIBED_PARTITIONS_MAX: Final = 2_000  # of one DescribeTopicPartitions answer, as in Kafka; a cursor goes on
# Of one DescribeProducers answer, 40 bytes each: 4 MB. A client that wants more asks for fewer partitions at a time.
KAFKA_DESCRIBED_PRODUCERS_MAX: Final = 100_000
KAFKA_QUORUM_MS: Final = 5_000  # longer than an election; a tool asks again
KAFKA_ELECTIONS_MAX: Final = 64  # hand-overs of one ElectLeaders at a time: each costs its partition a short pause
KAFKA_ELECTION_POLL_MS: Final = 20  # a hand-over takes a few round trips
KAFKA_ELECTION_RETRY_MS: Final = 1_000  # after a hand-over that was requested and did not happen
KAFKA_FRAME_S_MAX: Final = 30  # for one whole request, but not byte by byte
KAFKA_FRAME_BYTES_PER_S_MIN: Final = MIB  # and a second more for as much of it
KAFKA_LARGE_REQUEST_BYTES: Final = 8 * MIB  # a larger one arrives only with a place in the following
KAFKA_ARRIVING_BYTES_PER_NODE_MAX: Final = KAFKA_INFLIGHT_BYTES_PER_NODE_MAX // 4  # then the last may exceed it
KAFKA_STUCK_S_MAX: Final = 60  # by then a stuck consumer's group has given it up, too
KAFKA_STUCK_FULL_S_MAX: Final = 5  # if such answers have filled the node: others wait for the memory
KAFKA_IDLE_S_MAX: Final = 600  # like Kafka's connections.max.idle.ms

# --- users who log in
LOGIN_S_MAX: Final = 30  # from the connection to the user: a few round trips and a derivation of keys
SASL_REQUEST_BYTES_MAX: Final = 16 << 10  # of a client without a user; its largest is a token with headers
SASL_TOKEN_BYTES_MAX: Final = 8 << 10  # a name, a nonce and a proof have a tenth of it
LOGIN_FAILED_DELAY_S: Final = 0.1  # before a refusal, as in Kafka: a connection guesses ten times a second
LOGIN_WARNINGS_PER_S_MAX: Final = 10  # in the log: strangers could fail a thousand times as often
LOGIN_FAILED_LINGER_S: Final = 1.0  # for the client to take the refusal, and to end TLS
JWKS_BYTES_MAX: Final = 1 << 20  # a hundred times what issuers publish
JWKS_KEYS_MAX: Final = 256  # issuers publish two to ten
JWKS_FETCH_S_MAX: Final = 5.0  # a login may wait for it, and has KAFKA_LOGIN_S_MAX
JWKS_FETCH_S_MIN: Final = 10.0  # between two fetches, whatever keys tokens name
JWKS_REFRESH_S: Final = 300.0  # so that keys that are withdrawn serve no longer than that
PASSWORD_CHECKS_WAITING_MAX: Final = 128  # 10 ms each: a client of PLAIN waits a second at most, or connects again
DECISIONS_MAX: Final = 20_000  # remembered about rights: some 200 bytes each, made again in microseconds
LOGINS_PER_CONNECTION_MAX: Final = 2  # by gRPC, at a time: as by Kafka, a connection guesses some ten times a second
LOGIN_TOKEN_MS: Final = 3_600_000  # a stolen token serves so long at most; to log in again takes a client 20 ms
LOGIN_TOKENS_MAX: Final = 16_000  # at one listener, 500 bytes each; then the oldest ends, and its client logs in again
LOGIN_TOKENS_PER_USER_MAX: Final = 4_000  # so that one user does not end the tokens of others
USERS_CHECK_S: Final = 0.25  # how often a node looks whether users have changed: connections end well within a second

# File descriptors of this process that no client gets: the disk, the listeners, the log, those of Python and gRPC
# (about 50), the sessions of 9 nodes (2 each, old and new), and 64 unidentified connections on the nodes' port.
DESCRIPTORS_RESERVED: Final = 192
DESCRIPTORS_MIN: Final = 256  # fewer leave room for hardly a client: the node refuses to start

HTTP_CONNECTIONS_MAX: Final = 256  # probes, scrapes, a few browsers
HTTP_CONNECTIONS_PER_ADDRESS_MAX: Final = 64
# --- groups with members
GROUP_SESSION_MS_MIN: Final = 1_000  # below it a busy machine evicts healthy members; Kafka's own default floor is 6 s
GROUP_SESSION_MS_MAX: Final = 1_800_000  # like Kafka's group.max.session.timeout.ms
# Groups without a generation yet, per address: a tenth of groups_max, which strangers could otherwise fill by asking
# for ids under many names. No machine starts that many jobs at the same time.
GROUPS_NEW_PER_ADDRESS_MAX: Final = 1_000
GROUP_QUEUE_MAX: Final = 4_000  # requests that wait for one command: a few per member of the largest group
GROUP_ID_GIVEN_MS_MAX: Final = 30_000  # a member joins under its new id immediately, or is gone
MEMBER_ID_CHARS_MAX: Final = 233  # of an assigned id: the client's name, truncated, and 32 random digits
GROUP_TICK_MS: Final = 50  # looks whether the node stood still, and which groups it coordinates
GROUP_PAUSE_MS: Final = 1_000  # if a tick is this late, the process stood still and missed heartbeats
# Remembered with their topics, of one group: its members have one or two. Each takes 90 KB with 10,000 topics.
GROUP_PATTERNS_MAX: Final = 16
GROUP_COMMAND_MS_MAX: Final = 10_000  # of one change of a group: longer than an election
# Of a request about a group or a transaction, apart from what the other members take: as Kafka's
# offsets.commit.timeout.ms, and longer than an election. franz-go drops its connection after 10 s without an answer, so
# this and KAFKA_CONFIRM_MS together are less.
GROUP_ANSWER_MS: Final = 5_000
# Of JoinGroup, beyond the rebalance time-out: librdkafka drops its connection after 3,000, Java after 5,000.
GROUP_JOIN_LATE_MS: Final = 2_000
# Of SyncGroup while the leader has not assigned: Java drops its connection after 30,000, librdkafka a little after the
# session time-out. The members that ask again find the same generation.
GROUP_SYNC_MS_MAX: Final = 25_000
GROUP_CHANGES_WAITING_MAX: Final = 1_000  # of one group: a commit by each member of the largest group
GROUP_CHANGES_MAX: Final = 20_000  # of all groups of a node: as many as the node takes proposals
METRICS_GROUPS_MAX: Final = 1_000  # of one coordinator; more series would make a scrape larger than a batch

STATUS_EVENTS_MAX: Final = 20  # of the time line in an answer about a node: a screen of them
CONSOLE_CHANGE_MS_MAX: Final = 20_000  # of each call of a change through the console: a person waits for it
HTTP_REQUEST_BYTES_MAX: Final = 512 << 10  # a change of 1,000 partitions, as a form writes it
