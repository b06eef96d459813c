// The Java client behind the drivers' protocol: one JSON object a line in, one out. See ../driver.py for the operations.
import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.DescribeTopicsOptions;
import org.apache.kafka.clients.admin.ListConfigResourcesOptions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.CloseOptions;
import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.ElectionType;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.TransactionAbortableException;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.quota.ClientQuotaFilter;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.utils.AppInfoParser;

public final class Driver {
    private static final long TIMEOUT_MS = 40_000;
    private static final Duration STEP = Duration.ofMillis(500);
    private static final Gson GSON = new GsonBuilder().serializeNulls().create();

    /** One record as the protocol writes it. */
    record Item(String k, String v, long t, List<List<String>> h, Long o, Integer p) {}

    /** Every operation's arguments; those that it does not have are null. */
    record Request(
            String op, String topic, Integer partitions, String codec, List<Item> records, String group, Integer count,
            Long timestamp, String target) {}

    private final Properties base = new Properties();

    private Driver(String bootstrap) {
        base.put("bootstrap.servers", bootstrap);
    }

    public static void main(String[] arguments) throws Exception {
        Driver driver = new Driver(arguments[0]);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            Map<String, Object> answer;
            try {
                answer = driver.answer(GSON.fromJson(line, Request.class));
            } catch (Exception e) {
                answer = Map.of("error", e.toString());
            }
            System.out.println(GSON.toJson(answer));
        }
    }

    private Map<String, Object> answer(Request request) throws Exception {
        return switch (request.op()) {
            case "hello" -> Map.of(
                    "version", AppInfoParser.getVersion(), "codecs", List.of("none", "gzip", "snappy", "lz4", "zstd"));
            case "create" -> create(request);
            case "produce" -> produce(request);
            case "read" -> read(request, with());
            case "group" -> group(request);
            case "time" -> time(request);
            case "tools" -> tools(request);
            case "transact" -> transact(request.topic());
            case "committed" -> read(request, with("isolation.level", "read_committed"));
            case "copy" -> copy(request);
            case "commits" -> commits(request.topic(), request.partitions(), request.count());
            default -> Map.of("error", "there is no operation " + request.op());
        };
    }

    private Map<String, Object> create(Request request) throws Exception {
        try (Admin admin = Admin.create(base)) {
            NewTopic topic = new NewTopic(request.topic(), request.partitions(), (short) -1);
            admin.createTopics(List.of(topic)).all().get();
        }
        return Map.of();
    }

    /** What Kafka's administration tools ask of a cluster, about one topic. */
    private Map<String, Object> tools(Request request) throws Exception {
        TopicPartition place = new TopicPartition(request.topic(), 0);
        try (Admin admin = Admin.create(base)) {
            var nodes = admin.describeCluster().nodes().get().stream().map(node -> node.id()).toList();
            var withOperations = new DescribeTopicsOptions().includeAuthorizedOperations(true);
            var topics = admin.describeTopics(List.of(request.topic()), withOperations).allTopicNames().get();
            var topic = topics.get(request.topic());
            List<Long> sizes = new ArrayList<>();
            for (var directories : admin.describeLogDirs(nodes).allDescriptions().get().values()) {
                directories.values().forEach(d -> sizes.add(d.replicaInfos().get(place).size()));
            }
            var election = admin.electLeaders(ElectionType.PREFERRED, Set.of(place)).partitions().get().get(place);
            var quorum = admin.describeMetadataQuorum().quorumInfo().get();
            var producers = admin.describeProducers(List.of(place)).partitionResult(place).get().activeProducers();
            var resources = admin.listConfigResources(Set.of(), new ListConfigResourcesOptions()).all().get();
            return Map.ofEntries(
                    Map.entry("nodes", nodes),
                    Map.entry("partitions", topic.partitions().size()),
                    Map.entry("operations", topic.authorizedOperations().stream().map(Enum::name).toList()),
                    Map.entry("sizes", sizes),
                    Map.entry("election", election.map(e -> e.getClass().getSimpleName()).orElse("none")),
                    Map.entry("leader", quorum.leaderId()),
                    Map.entry("voters", quorum.voters().stream().map(voter -> voter.replicaId()).toList()),
                    Map.entry("last_sequences", producers.stream().map(one -> one.lastSequence()).toList()),
                    Map.entry("resources", resources.stream().map(resource -> resource.name()).toList()),
                    Map.entry("reassigned", admin.listPartitionReassignments().reassignments().get().size()),
                    Map.entry("quotas", admin.describeClientQuotas(ClientQuotaFilter.all()).entities().get().size()));
        }
    }

    /** Commits "0" and "2", with offset n of its own topic, aborts "1", and is fenced by another producer of its id. */
    private Map<String, Object> transact(String topic) {
        var serializer = new ByteArraySerializer();
        var settings = with("transactional.id", "tx-" + topic);
        try (var producer = new KafkaProducer<>(settings, serializer, serializer);
                var next = new KafkaProducer<>(settings, serializer, serializer)) {
            producer.initTransactions();
            for (int n = 0; n < 3; n++) {
                producer.beginTransaction();
                producer.send(new ProducerRecord<>(topic, 0, null, String.valueOf(n).getBytes()));
                producer.sendOffsetsToTransaction(
                        Map.of(new TopicPartition(topic, 0), new OffsetAndMetadata(n)),
                        new ConsumerGroupMetadata("group-" + topic));
                producer.flush();
                if (n == 1) {
                    producer.abortTransaction();
                } else {
                    producer.commitTransaction();
                }
            }
            producer.beginTransaction();
            producer.send(new ProducerRecord<>(topic, 0, null, "zombie".getBytes()));
            producer.flush();
            next.initTransactions();
            producer.commitTransaction();
            return Map.of("failure", "none");
        } catch (KafkaException e) {
            return Map.of("failure", e.getClass().getSimpleName());
        }
    }

    /**
     * Transactions 0 to count - 1, each with its number to every partition. Every third is aborted. One that fails is
     * aborted, and its number counts as failed. Fatal errors end it. Each flushes before its end: the producer's sender
     * asks first whether batches are incomplete and then for the next request, so that it may send an EndTxn that came
     * between the two before the batches.
     */
    private Map<String, Object> commits(String topic, int partitions, int count) {
        var serializer = new ByteArraySerializer();
        List<Integer> failed = new ArrayList<>();
        try (var producer = new KafkaProducer<>(with("transactional.id", "tx-" + topic), serializer, serializer)) {
            producer.initTransactions();
            for (int n = 0; n < count; n++) {
                producer.beginTransaction();
                try {
                    for (int partition = 0; partition < partitions; partition++) {
                        producer.send(new ProducerRecord<>(topic, partition, null, String.valueOf(n).getBytes()));
                    }
                    producer.flush();
                    if (n % 3 == 2) {
                        producer.abortTransaction();
                    } else {
                        producer.commitTransaction();
                    }
                } catch (TransactionAbortableException e) {
                    failed.add(n);
                    producer.abortTransaction();
                }
            }
        }
        return Map.of("failed", failed);
    }

    /** See Client.copy in ../driver.py. */
    private Map<String, Object> copy(Request request) {
        int[] counts = new int[3]; // begun, aborted, failed
        boolean done = false;
        while (!done) {
            var serializer = new ByteArraySerializer();
            var producer = new KafkaProducer<>(with("transactional.id", "copy-" + request.target()), serializer, serializer);
            var consumer = consumer(with(
                    "group.id", request.group(), "auto.offset.reset", "earliest", "isolation.level", "read_committed",
                    "session.timeout.ms", "6000", "max.poll.records", "10"));
            try {
                producer.initTransactions();
                consumer.subscribe(List.of(request.topic()));
                while (!done) {
                    done = copySome(request, producer, consumer, counts);
                }
            } catch (KafkaException e) {
                System.err.println("begins again: " + e);
                counts[2]++;
            } finally {
                producer.close(Duration.ZERO);
                consumer.close(CloseOptions.timeout(STEP));
            }
        }
        return Map.of("aborted", counts[1], "failed", counts[2]);
    }

    /** One transaction at most; true if there is nothing more to copy. */
    private boolean copySome(
            Request request, KafkaProducer<byte[], byte[]> producer, KafkaConsumer<byte[], byte[]> consumer, int[] counts) {
        ConsumerRecords<byte[], byte[]> records = consumer.poll(STEP);
        if (records.isEmpty()) {
            return consumer.assignment().size() == request.partitions()
                    && consumer.committed(consumer.assignment()).values().stream()
                            .allMatch(at -> at != null && at.offset() >= request.count());
        }
        producer.beginTransaction();
        for (ConsumerRecord<byte[], byte[]> record : records) {
            byte[] copy = ("copy of " + new String(record.value())).getBytes();
            producer.send(new ProducerRecord<>(request.target(), record.partition(), record.key(), copy));
        }
        producer.sendOffsetsToTransaction(records.nextOffsets(), consumer.groupMetadata());
        if (++counts[0] % 5 != 0) {
            producer.commitTransaction();
            return false;
        }
        producer.abortTransaction();
        counts[1]++;
        consumer.committed(records.partitions())
                .forEach((place, at) -> consumer.seek(place, at == null ? 0 : at.offset()));
        return false;
    }

    private Map<String, Object> produce(Request request) throws Exception {
        Properties settings = with("compression.type", request.codec(), "linger.ms", "50");
        var serializer = new ByteArraySerializer();
        try (var producer = new KafkaProducer<>(settings, serializer, serializer)) {
            List<Future<?>> sent = new ArrayList<>();
            for (Item item : request.records()) {
                var record = new ProducerRecord<>(request.topic(), 0, item.t(), bytes(item.k()), bytes(item.v()));
                item.h().forEach(header -> record.headers().add(header.get(0), bytes(header.get(1))));
                sent.add(producer.send(record));
            }
            for (Future<?> one : sent) {
                one.get();
            }
        }
        return Map.of();
    }

    private Map<String, Object> read(Request request, Properties settings) {
        try (var consumer = consumer(settings)) {
            TopicPartition place = new TopicPartition(request.topic(), 0);
            consumer.assign(List.of(place));
            consumer.seekToBeginning(List.of(place));
            return Map.of("records", take(consumer, request.count()));
        }
    }

    private Map<String, Object> group(Request request) {
        Properties settings = with("group.id", request.group(), "auto.offset.reset", "earliest");
        try (var consumer = consumer(settings)) {
            consumer.subscribe(List.of(request.topic()));
            List<Item> found = take(consumer, request.count());
            long next = found.get(found.size() - 1).o() + 1;
            consumer.commitSync(Map.of(new TopicPartition(request.topic(), 0), new OffsetAndMetadata(next)));
            return Map.of("records", found);
        }
    }

    private Map<String, Object> time(Request request) {
        try (var consumer = consumer(with())) {
            TopicPartition place = new TopicPartition(request.topic(), 0);
            consumer.assign(List.of(place));
            consumer.seek(place, consumer.offsetsForTimes(Map.of(place, request.timestamp())).get(place).offset());
            return Map.of("records", take(consumer, 1));
        }
    }

    private List<Item> take(KafkaConsumer<byte[], byte[]> consumer, int count) {
        List<Item> found = new ArrayList<>();
        long deadline = System.currentTimeMillis() + TIMEOUT_MS;
        while (found.size() < count && System.currentTimeMillis() < deadline) {
            for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
                if (found.size() < count) {
                    found.add(item(record));
                }
            }
        }
        if (found.size() < count) {
            throw new IllegalStateException(found.size() + " of " + count + " records came");
        }
        return found;
    }

    private static Item item(ConsumerRecord<byte[], byte[]> record) {
        List<List<String>> headers = new ArrayList<>();
        for (Header header : record.headers()) {
            headers.add(List.of(header.key(), text(header.value())));
        }
        return new Item(
                text(record.key()), text(record.value()), record.timestamp(), headers, record.offset(), record.partition());
    }

    private KafkaConsumer<byte[], byte[]> consumer(Properties settings) {
        settings.put("enable.auto.commit", "false");
        return new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    private Properties with(String... pairs) {
        Properties settings = new Properties();
        settings.putAll(base);
        for (int i = 0; i < pairs.length; i += 2) {
            settings.put(pairs[i], pairs[i + 1]);
        }
        return settings;
    }

    private static byte[] bytes(String text) {
        return text == null ? null : Base64.getDecoder().decode(text);
    }

    private static String text(byte[] bytes) {
        return bytes == null ? null : Base64.getEncoder().encodeToString(bytes);
    }
}
