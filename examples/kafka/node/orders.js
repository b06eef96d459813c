// Writes ten orders and reads ten, from its group's commit on.
//
//     npm ci
//     node orders.js 127.0.0.1:9092 orders
"use strict";
const { Kafka, Partitioners, logLevel } = require("kafkajs");

const COUNT = 10;
const CUSTOMERS = ["ada", "ben", "cleo"];
const IDLE_MS = 30_000;

const [servers, topic] = process.argv.slice(2);
const kafka = new Kafka({ clientId: "orders", brokers: servers.split(","), logLevel: logLevel.ERROR });

async function write() {
  const producer = kafka.producer({
    createPartitioner: Partitioners.DefaultPartitioner, idempotent: true, maxInFlightRequests: 1,
  });
  await producer.connect();
  const messages = Array.from({ length: COUNT }, (_, n) => ({ key: CUSTOMERS[n % CUSTOMERS.length], value: `order ${n}` }));
  await producer.send({ topic, messages });
  await producer.disconnect();
}

async function read() {
  const consumer = kafka.consumer({ groupId: `${topic}-node` });
  await consumer.connect();
  await consumer.subscribe({ topic, fromBeginning: true });
  let count = 0;
  await new Promise((resolve, reject) => {
    const idle = setTimeout(() => reject(new Error(`no order has come for ${IDLE_MS / 1000} s`)), IDLE_MS);
    consumer.on(consumer.events.CRASH, (event) => reject(event.payload.error));
    consumer.run({
      autoCommit: false,
      eachMessage: async ({ partition, message }) => {
        console.log(`${partition}/${message.offset} ${message.key}: ${message.value}`);
        await consumer.commitOffsets([{ topic, partition, offset: String(BigInt(message.offset) + 1n) }]);
        idle.refresh();
        if (++count === COUNT) {
          clearTimeout(idle);
          resolve();
        }
      },
    }).catch(reject);
  });
  await consumer.disconnect();
}

write().then(read).catch((error) => {
  console.error(error);
  process.exit(1);
});
