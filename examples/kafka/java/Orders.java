// Writes ten orders and reads ten, from its group's commit on.
//
//     mvn -q dependency:copy-dependencies -DoutputDirectory=jars
//     java -cp 'jars/*' Orders.java 127.0.0.1:9092 orders
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Future;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

public final class Orders {
    private static final int COUNT = 10;
    private static final List<String> CUSTOMERS = List.of("ada", "ben", "cleo");
    private static final Duration IDLE = Duration.ofSeconds(30);

    public static void main(String[] arguments) throws Exception {
        write(arguments[0], arguments[1]);
        read(arguments[0], arguments[1]);
    }

    private static void write(String servers, String topic) throws Exception {
        Map<String, Object> settings = Map.of("bootstrap.servers", servers);
        try (var producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer())) {
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            for (int number = 0; number < COUNT; number++) {
                String customer = CUSTOMERS.get(number % CUSTOMERS.size());
                sent.add(producer.send(new ProducerRecord<>(topic, customer, "order " + number)));
            }
            for (Future<RecordMetadata> one : sent) {
                one.get();
            }
        }
    }

    private static void read(String servers, String topic) {
        Map<String, Object> settings = Map.of(
                "bootstrap.servers", servers, "group.id", topic + "-java", "auto.offset.reset", "earliest",
                "enable.auto.commit", "false");
        try (var consumer = new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer())) {
            consumer.subscribe(List.of(topic));
            for (int count = 0; count < COUNT; ) {
                var orders = consumer.poll(IDLE);
                if (orders.isEmpty()) {
                    throw new IllegalStateException("no order has come for " + IDLE.toSeconds() + " s");
                }
                for (var order : orders) {
                    System.out.printf(
                            "%d/%d %s: %s%n", order.partition(), order.offset(), order.key(), order.value());
                }
                count += orders.count();
                consumer.commitSync();
            }
        }
    }
}
