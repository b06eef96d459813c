// kafkajs behind the drivers' protocol: one JSON object a line in, one out. See ../driver.py for the operations.
"use strict";
const readline = require("node:readline");
const { Kafka, CompressionTypes, CompressionCodecs, Partitioners, logLevel } = require("kafkajs");
const fzstd = require("fzstd");
const lz4 = require("lz4-napi");

// Of the codecs kafkajs has gzip itself; the others are plugged in, here without a compiler: zstd can only be read so.
CompressionCodecs[CompressionTypes.Snappy] = require("kafkajs-snappy");
CompressionCodecs[CompressionTypes.LZ4] = () => ({
  compress: async ({ buffer }) => lz4.compressFrame(buffer),
  decompress: async (data) => lz4.decompressFrame(data),
});
CompressionCodecs[CompressionTypes.ZSTD] = () => ({
  compress: async () => { throw new Error("zstd can only be read"); },
  decompress: async (data) => Buffer.from(fzstd.decompress(data)),
});
const CODECS = { none: CompressionTypes.None, gzip: CompressionTypes.GZIP, snappy: CompressionTypes.Snappy, lz4: CompressionTypes.LZ4 };

const brokers = process.argv[2].split(",");
const kafka = new Kafka({ clientId: "matrix", brokers, logLevel: logLevel.ERROR, logCreator: () => (entry) => process.stderr.write(`${entry.log.message}\n`) });
const b64 = (data) => (data === null || data === undefined ? null : Buffer.from(data).toString("base64"));
const unb64 = (text) => (text === null ? null : Buffer.from(text, "base64"));
let readers = 0;

function outgoing({ k, v, t, h }) {
  const headers = {};
  for (const [name, value] of h) (headers[name] ??= []).push(unb64(value));
  return { key: unb64(k), value: unb64(v), timestamp: String(t), headers, partition: 0 };
}

function incoming(partition, { key, value, timestamp, headers, offset }) {
  const h = [];
  for (const [name, values] of Object.entries(headers ?? {})) for (const one of [values].flat()) h.push([name, b64(one)]);
  return { k: b64(key), v: b64(value), t: Number(timestamp), h, o: Number(offset), p: partition };
}

// kafkajs reads by group alone. `then` runs when `count` records are there, with the consumer still in its group.
async function consume(groupId, topic, count, { offset, then, readUncommitted = true } = {}) {
  const consumer = kafka.consumer({ groupId, readUncommitted });
  const records = [];
  await consumer.connect();
  await consumer.subscribe({ topic, fromBeginning: true });
  await new Promise((resolve, reject) => {
    consumer.on(consumer.events.CRASH, (event) => reject(event.payload.error));
    consumer.run({
      autoCommit: false,
      eachMessage: async ({ partition, message }) => {
        if (records.length < count && (offset === undefined || Number(message.offset) >= offset)) {
          records.push(incoming(partition, message));
          if (records.length === count) resolve();
        }
      },
    }).catch(reject);
    if (offset !== undefined) consumer.seek({ topic, partition: 0, offset: String(offset) });
  });
  if (then) await then(consumer, records);
  await consumer.disconnect();
  return { records };
}

const transactional = async (topic) => {
  const producer = kafka.producer({
    createPartitioner: Partitioners.DefaultPartitioner, transactionalId: `tx-${topic}`, idempotent: true, maxInFlightRequests: 1,
  });
  await producer.connect();
  return producer;
};

async function transact(topic) {
  const producer = await transactional(topic);
  for (let n = 0; n < 3; n++) {
    const transaction = await producer.transaction();
    await transaction.send({ topic, acks: -1, messages: [{ partition: 0, value: String(n) }] });
    const offsets = { topics: [{ topic, partitions: [{ partition: 0, offset: String(n) }] }] };
    await transaction.sendOffsets({ consumerGroupId: `group-${topic}`, ...offsets });
    await (n === 1 ? transaction.abort() : transaction.commit());
  }
  const transaction = await producer.transaction();
  await transaction.send({ topic, acks: -1, messages: [{ partition: 0, value: "zombie" }] });
  const next = await transactional(topic);
  await (await next.transaction()).abort(); // kafkajs gets its id's next epoch with its first transaction
  try {
    await transaction.commit();
    return { failure: "none" };
  } catch (e) {
    return { failure: e.type ?? e.name };
  } finally {
    await next.disconnect();
    await producer.disconnect();
  }
}

async function withAdmin(action) {
  const admin = kafka.admin();
  await admin.connect();
  try { return await action(admin); } finally { await admin.disconnect(); }
}

const OPERATIONS = {
  hello: async () => ({ version: require("kafkajs/package.json").version, codecs: Object.keys(CODECS) }),
  create: ({ topic, partitions }) =>
    withAdmin(async (admin) => ({ created: await admin.createTopics({ topics: [{ topic, numPartitions: partitions }] }) })),
  produce: async ({ topic, codec, records }) => {
    const producer = kafka.producer({ createPartitioner: Partitioners.DefaultPartitioner });
    await producer.connect();
    await producer.send({ topic, acks: -1, compression: CODECS[codec], messages: records.map(outgoing) });
    await producer.disconnect();
    return {};
  },
  read: ({ topic, count }) => consume(`reader-${process.pid}-${readers++}`, topic, count),
  committed: ({ topic, count }) =>
    consume(`reader-${process.pid}-${readers++}`, topic, count, { readUncommitted: false }),
  transact: ({ topic }) => transact(topic),
  group: ({ topic, group, count }) =>
    consume(group, topic, count, {
      then: (consumer, records) => {
        const next = records[records.length - 1].o + 1;
        return consumer.commitOffsets([{ topic, partition: 0, offset: String(next) }]);
      },
    }),
  time: async ({ topic, timestamp }) => {
    const [{ offset }] = await withAdmin((admin) => admin.fetchTopicOffsetsByTimestamp(topic, timestamp));
    return consume(`reader-${process.pid}-${readers++}`, topic, 1, { offset: Number(offset) });
  },
};

(async () => {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const request = JSON.parse(line);
    const answer = await OPERATIONS[request.op](request).catch((e) => ({ error: `${e.name}: ${e.message}` }));
    process.stdout.write(JSON.stringify(answer) + "\n");
  }
  process.exit(0);
})();
