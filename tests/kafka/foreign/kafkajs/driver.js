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
async function consume(groupId, topic, count, { offset, then } = {}) {
  const consumer = kafka.consumer({ groupId });
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
