"""docs/kafka.md from the tables of the Kafka listener and from the results of the client matrix (kafka-clients.json,
written by tests/kafka/test_foreign.py), so that page and code cannot differ.
"""

import json
from pathlib import Path
from typing import Any, Final

from docs.generate import table
from smq.coordinator.kafka.api_keys import SERVED, ApiKey
from smq.raft_state.cluster_config import CLUSTER_CONFIG, IN_NODE_TOML
from smq.raft_state.config_keys import ConfigKey
from smq.raft_state.topic_config import TOPIC_CONFIG

CLIENTS = Path(__file__).with_name("kafka-clients.json")

_HEAD = """\
# Kafka clients

Generated from `smq/coordinator/kafka` by `make docs`; do not edit.

Every node speaks the Kafka protocol on its own port, on the log's own offsets: there is no gateway process, offset
mapping or translation. gRPC and Spark read what a Kafka client writes byte for byte, and vice versa.

<!-- not run: both run until Ctrl-C; tests/cluster/test_cli.py starts and ends them -->
```sh
smq dev                                             # Kafka on 127.0.0.1:9092
smq cluster --nodes 3 --data-dir D --kafka-port 0   # free ports; the ready file and the output name them
```

In `node.toml`, `kafka_address` opens the listener; without it, `smq serve` has none. `smq dev` and `smq cluster` open
one. There may be more, such as one for clients outside: [docs/addresses.md](addresses.md#named-listeners). `rack` is
the node's location (`smq cluster --racks a,b,c`); it can change when the node restarts. `request_bytes_max` bounds a
request: a larger Produce gets MESSAGE_TOO_LARGE.

After a start, a node refuses Kafka connections until it is ready (`/readyz`): a majority of the nodes runs, and it has
the cluster's topics. A client then takes another of its `bootstrap.servers`, so name several.

<!-- run by tests/cluster/pages/test_shell_blocks.py -->
```python
from confluent_kafka import Producer

producer = Producer({"bootstrap.servers": "127.0.0.1:9092", "enable.idempotence": True})
producer.produce("greetings", b"hello")
producer.flush()
```

## What a client may rely on

- `acks=all` is answered when a majority of replicas has the batch on disk; `acks=1` when the leader has it on disk;
  `acks=0` never, and a refused batch then closes the connection.
- With one replica, ListOffsets(latest) and Fetch show an answered record of `acks=1`. With more, as in Kafka, they may
  not until a majority has it, and it may go with the leader before that.
- If a batch of an idempotent producer is refused so that it comes again (too much waits for the disk:
  NOT_ENOUGH_REPLICAS), the batches that the producer sent after it are refused with the same code until it has come. So
  no batch overtakes another for good. Other producers keep their order with one request in flight, as in Kafka.
- An idempotent producer's retry is stored once, even after the death of a leader or a restart of all nodes.
- Any replica answers a fetch, up to the high water mark it knows.
- Fetch sessions (KIP-227) are Kafka's: at most 1,000 on a node, and 64 MiB. Without room, or beyond 10,000 partitions,
  a client goes on with full requests. A session serves the user who began it, on any connection, one fetch at a time.
  A client learns of a new last stable offset, too. The node still looks at each partition of a session.
- A consumer reads in its own rack (KIP-392). If `client.rack` is the `rack` of a node with a replica, and the leader is
  in another rack, the leader names that node; of several, the one that holds most. It must hold the offset, be alive,
  and not be drained. It serves what it knows to be committed, one network delay later than the leader. If it lacks the
  offset or has lost the cluster, it answers OFFSET_NOT_AVAILABLE: the client asks the leader.
- ListOffsets by time is exact to the record; earliest, latest and the largest timestamp too. All are linearizable, and
  answered by the leader only, as in Kafka: another node says NOT_LEADER_OR_FOLLOWER. A leader that cannot confirm in
  time that it leads says OFFSET_NOT_AVAILABLE (LEADER_NOT_AVAILABLE before version 5); clients ask again.
- OFFSET_OUT_OF_RANGE is true: a node asks the leader before it says so. If that does not answer, a fetch gets
  OFFSET_NOT_AVAILABLE (NOT_LEADER_OR_FOLLOWER before version 11).
- A refused batch names its bad records (KIP-467): clients fail the others with a code of their own.
- Errors name the new leader and its address (KIP-951), in Produce from version 10, in Fetch from version 16.
- Groups use Kafka's classic protocol, with the assignors of the clients, static members and incremental rebalancing,
  or that of KIP-848 (`group.protocol=consumer`), with the assignors `uniform` and `range` of the coordinator. The
  replicated state chooses one coordinator per group at any time. Members, generation and assignment are replicated, so
  neither the coordinator's death nor a rolling restart of all nodes causes a rebalance.
- A commit is a Raft commit, fenced by the member's generation and the coordinator's epoch. In a group without members
  any client may commit, but likewise only at the coordinator.
- CreateTopics and CreatePartitions place replicas as the client assigns them; the first one is the preferred leader.
- ACLs are Kafka's, for users of ports that ask for them ([security.md](security.md#rights)).
- Group `g` is group `kafka-cg-g` for gRPC and the command line, with the same offsets.

## For administrators' tools

- Topics are described in pages of up to 2,000 partitions (DescribeTopicPartitions), as Kafka 4's admin client asks.
- Each node describes its own data directory: the size of each replica, and the space of the file system.
- ElectLeaders hands leaderships to the preferred replicas, through whichever node, a few at a time, and gives up no
  record. Unclean elections do not exist: ELIGIBLE_LEADERS_NOT_AVAILABLE.
- DescribeQuorum shows Raft as partition 0 of `__cluster_metadata`, at any node, as Raft's leader knows it. A voter's
  offset is after its last entry on disk. A replaced disk is an observer until the others have admitted it.
- DescribeProducers shows the idempotent producers that a replica knows, and where their open transactions begin; the
  time is when the last batch or end of a transaction was appended, as in Kafka. DescribeTransactions and
  ListTransactions show those that the node coordinates. A pattern of ids is RE2's, as in Kafka.
  `kafka-transactions.sh abort` writes markers past the coordinator, and is not served: `smq txn abort` ends
  a transaction that hangs ([docs/operations.md](operations.md#transactions)).
- AlterUserScramCredentials changes the users of ports that ask for them ([security.md](security.md)).
- AlterClientQuotas sets quotas ([security.md](security.md#quotas)). There are no reassignments: that list is empty.

## Transactions

- One replicated entry decides a transaction over all its partitions and group offsets. EndTxn is answered then. The
  leaders append the control batches right after it. Until the last of them is committed, InitProducerId and
  AddPartitionsToTxn get CONCURRENT_TRANSACTIONS, which clients repeat by themselves.
- Both protocols of KIP-890 are served. ApiVersions names the feature `transaction.version`, supported from 0 to 2 and
  finalized at 2, so Java clients from 4.0 on and franz-go use the second one by themselves. librdkafka and aiokafka use
  the first. A transactional id may move from one to the other and back.
- In the second protocol a batch (Produce 12) or offsets (TxnOffsetCommit 5) become part of the transaction by
  themselves: no AddPartitionsToTxn, no AddOffsetsToTxn. A batch that begins the next transaction waits up to a second
  for the control batches of the last one, then gets CONCURRENT_TRANSACTIONS. EndTxn 5 answers the id and epoch that the
  producer goes on with: each end begins the next epoch, or a fresh id after the last one. A repeated EndTxn of the
  epoch before gets the first answer again; once another transaction has begun, PRODUCER_FENCED.
- In the first protocol an epoch has many transactions, and a batch is taken only into one that is open and has its
  partition. Otherwise TRANSACTION_ABORTABLE from Produce 11 and TxnOffsetCommit 4 on, INVALID_TXN_STATE before. A
  batch of an epoch that is not the producer's present one, older or never given, gets INVALID_PRODUCER_EPOCH; one of a
  producer that is not the named transactional id's INVALID_PRODUCER_ID_MAPPING; one in a request that names none
  TRANSACTIONAL_ID_AUTHORIZATION_FAILED. But a late EndTxn *request*, one that lies unread until the next transaction of
  the same epoch is open, ends that one, as in Kafka before KIP-890.
- A client of the first protocol may use any version of Produce. In an epoch in which a transaction has ended, nothing
  becomes part of the next one by itself: it gets TRANSACTION_ABORTABLE, because it may be late.
- Java's producer (seen with 4.3) has a race: right after a transaction's end, the EndTxn of the next commit may leave
  before its batches. It gets INVALID_TXN_STATE, after which the producer must be closed. Call `flush()` before
  `commitTransaction()`.
- Fetch with `isolation.level=read_committed` returns the last stable offset and the aborted transactions; "latest" is
  then the last stable offset.
- If a client asks for stable offsets (KIP-447), those that an open transaction may move are UNSTABLE_OFFSET_COMMIT.
- `transaction.max.timeout.ms` and `transactional.id.expiration.ms` are settings of the cluster. Time-outs follow a
  replicated clock, which moves every second or every quarter of the shortest open time-out, whichever is longer.
- A producer whose transactional id has been forgotten gets INVALID_PRODUCER_ID_MAPPING, and a fresh producer id if it
  then starts again, whether it names its old one or not. librdkafka's does so after an abort; Java's has to be made
  again.

## What is not there yet

Of SASL, GSSAPI and tokens without SaslAuthenticate. Of the consumer groups of KIP-848: members of
both protocols in one group, so change the protocol while the group is empty; settings of one group; racks in the
assignment; and the variant of Java Streams. Keys not in the table below are not advertised; using one closes the
connection.

## Configuration

CreateTopics, AlterConfigs and IncrementalAlterConfigs set a topic's configuration. Every key of Kafka 4.3 is known. A
fixed key has no effect here, nor as a default of all brokers: it takes any valid value, nothing is stored, and
DescribeConfigs shows it as read-only and says why. A value is refused with INVALID_CONFIG only if it is invalid, or if
a promise depends on it: `unclean.leader.election.enable=true`, `min.insync.replicas` above the majority of the
replicas, and `remote.storage.enable=true`. The value shown for `min.insync.replicas` is the majority of the topic's
replicas. `mirrored`, `storage` and `retention.records` are keys of smq's own: Kafka clients see only topics with
`storage=log`.

By default everything is kept (`retention.ms=-1`, where Kafka deletes after a week). A batch whose newest timestamp is
more than an hour ahead of the leader's clock is refused (`message.timestamp.after.max.ms`), as in Kafka.

- `compression.type`: the leader converts a batch that comes in another codec, on a thread of its own. Batches keep
  their order meanwhile. One that does not decompress is refused with INVALID_RECORD, one that is larger than
  `max.message.bytes` before or after with MESSAGE_TOO_LARGE.
- `message.timestamp.type=LogAppendTime`: all records of a batch have the leader's time when it was appended.
- `message.timestamp.before.max.ms` and `.after.max.ms`: a batch with one record beyond the limit is refused whole, with
  INVALID_TIMESTAMP, by the leader's clock. With other values than the defaults the records are read. A batch that the
  log already holds is answered like its first attempt.

### Topics

"""

_FIXED = """
Fixed, with Kafka's meanings. The values in brackets are what DescribeConfigs shows.

"""

_CLUSTER = """
### The cluster and its nodes

Kafka's names, in three places. The first that has a value wins:

1. The cluster's own value, replicated, in effect at every node without a restart: `smq config set num.partitions=4`, or
   IncrementalAlterConfigs of the resource BROKER without a name
   (`kafka-configs.sh --entity-type brokers --entity-default`; the Python clients refuse the empty name).
2. The node's `[settings]` in `node.toml`: `num.partitions = 4`. `smq cluster --set num.partitions=4` (also `smq dev`)
   writes it there for all nodes, and `smq serve --set` overrides it for one run. A new directory of `smq cluster` or
   `smq dev` begins with `auto.create.topics.enable = true` and `group.initial.rebalance.delay.ms = 0`.
3. The default.

A key that is the same on all nodes cannot be in a `node.toml`, because it changes what commands do. DescribeConfigs of
a node shows all of these with their sources, and read-only what else Kafka's tools ask for: `broker.rack`,
`log.segment.bytes`, `group.max.session.timeout.ms` and others. A group has no configuration: each member brings its
`session.timeout.ms`. `smq topic create` and gRPC name the number of partitions themselves.

"""

_NEW_TOPICS = """
The other keys are defaults of new topics, the same on all nodes. A topic takes them when it is created, unless its
creator names the key, and a key of a topic that is deleted goes back to the default of that moment. Unlike in Kafka,
topics that exist keep what they have when a default changes: a smaller `log.retention.ms` deletes nothing of theirs.

"""

_KEYS = """
## Keys and versions

"""

_CLIENTS = """
## Clients

What each unmodified client did against three nodes in `pytest -m full tests/kafka/test_foreign.py`. Each creates its
topic, writes it in every codec named, and reads what the others wrote. With transactions it commits two, with a group's
offset in each, aborts one between them, and is fenced by another producer of its id. As a committed reader it gets of
each client's transactions what was committed.

"""

_CLIENT = (
    *("client", "version", "writes", "reads what was written by", "groups: commit, resume", "seeks by time"),
    *("transactions", "reads committed ones of"),
)

_REMARKS = """
librdkafka (confluent-kafka, kcat) stops fetching a partition for one second whenever its own queue is full. A consumer
of many small records should set `fetch.queue.backoff.ms=2`; [performance.md](performance.md#kafka-clients) shows the
difference.

librdkafka's `send_offsets_to_transaction` may wait for ever, whatever its time-out, after the group's coordinator was
missing in an answer to Metadata, as a node is that has not come back yet (its issues 5511 and 5456, open in 2.16). A
program that copies with it needs a supervisor that starts it again; nothing is lost or doubled then.

## Programs that run on it

Each of these tests kills nodes and the program with SIGKILL on the way (`pytest -m full`):

"""

_PROVEN: Final = (
    (
        "a copy, exactly once, by confluent-kafka, Java's client and franz-go",
        "`tests/kafka/transactions/test_exactly_once.py`",
        "each partition of the copy holds each record once, in order, for a committed reader; the group's offsets are "
        "those of the end",
    ),
    (
        "Kafka Streams 4.3.0, a stateful count",
        "`tests/kafka/test_streams.py`",
        "with `at_least_once` no word is counted too rarely; with `exactly_once_v2` a committed reader gets each count "
        "once, in order; the state comes back from the compacted changelog",
    ),
    (
        "Kafka Connect 4.3.0, distributed, file source and sink",
        "`tests/kafka/test_connect.py`",
        "both connectors come back with their last configuration, the source goes on from its committed offset, and "
        "each line is in the sink's file in order",
    ),
)

_CODES = """
## Error codes

[reference/errors.md](reference/errors.md) has the Kafka code for each of smq's errors. A batch that may have been
stored is never reported as "not stored". A request about a group or a transaction gets an answer before its client
gives up, with a code after which Java, librdkafka and franz-go repeat it.
"""


def render() -> str:
    served = sorted(((ApiKey(key), row) for key, row in SERVED.items()), key=lambda item: item[0])
    keys = ((str(int(key)), row.name, f"{row.versions.lo}-{row.versions.hi}") for key, row in served)
    topics = ((f"`{key}`", row.default, row.documentation) for key, row in TOPIC_CONFIG.items() if not row.is_fixed)
    cluster = (_cluster_key(key, row) for key, row in CLUSTER_CONFIG.items() if not _of_new_topics(row))
    rows = json.loads(CLIENTS.read_text(encoding="utf-8"))
    writers = [name for name, row in rows.items() if row.get("transactions")]
    clients = (_client(name, row, list(rows), writers) for name, row in rows.items())
    setting = ("key", "default", "meaning")
    return (
        f"{_HEAD}{table(setting, topics)}{_FIXED}{_fixed()}"
        f"{_CLUSTER}{table(setting, cluster)}{_NEW_TOPICS}{_new_topics()}"
        f"{_KEYS}{table(('key', 'name', 'versions'), keys)}{_CLIENTS}{table(_CLIENT, clients)}"
        f"{_REMARKS}{table(('what', 'test', 'what it shows'), _PROVEN)}{_CODES}"
    )


def _fixed() -> str:
    """A line for each reason, with the keys that it holds for."""
    keys: dict[str, list[str]] = {}
    for key, row in TOPIC_CONFIG.items():
        if row.is_fixed:
            _, _, why = row.documentation.partition("; without effect: ")
            keys.setdefault(why, []).append(f"`{key}` ({row.default or 'none'})")
    return "".join(f"- {', '.join(found)}: {why}\n" for why, found in keys.items())


def _cluster_key(key: str, row: ConfigKey) -> tuple[str, ...]:
    meaning = row.documentation
    return f"`{key}`", row.default, meaning if key in IN_NODE_TOML else f"the same on all nodes; {meaning}"


def _of_new_topics(row: ConfigKey) -> str:
    """The topic's key that this one is the default of. Empty if it is none."""
    key, found, _ = row.documentation.partition(" of new topics, ")
    return key if found else ""


def _new_topics() -> str:
    """What they mean, and their values, stand in the table of topics."""
    named = {key: of for key, row in CLUSTER_CONFIG.items() if (of := _of_new_topics(row))}
    assert all(CLUSTER_CONFIG[key].default == TOPIC_CONFIG[of].default for key, of in named.items())
    return "".join(f"- `{key}`{'' if key == of else f' for `{of}`'}\n" for key, of in named.items())


def _client(name: str, row: dict[str, Any], names: list[str], writers: list[str]) -> tuple[str, ...]:
    return (
        name,
        row["version"],
        ", ".join(row["writes"]),
        _all_of(names, row["reads"]),
        _yes(row.get("group")),
        _yes(row.get("time")),
        _yes(row.get("transactions")),
        _all_of(writers, row.get("committed", [])),
    )


def _all_of(names: list[str], found: list[str]) -> str:
    missing = [name for name in names if name not in found]
    return f"all but {', '.join(missing)}" if missing else "all"


def _yes(shown: bool | None) -> str:
    return "yes" if shown else "no"
