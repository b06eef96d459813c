import java.util.TreeMap;
import org.apache.kafka.common.config.ConfigDef;
import org.apache.kafka.server.config.ServerTopicConfigSynonyms;
import org.apache.kafka.storage.internals.log.LogConfig;

/** One line for each key of a topic that Kafka documents: name, type, the broker's name for its default, default. */
public class Keys {
    public static void main(String[] args) {
        for (var key : new TreeMap<>(LogConfig.configKeys()).values()) {
            if (!key.internalConfig) {
                var names = ServerTopicConfigSynonyms.ALL_TOPIC_CONFIG_SYNONYMS.get(key.name);
                var name = names == null ? "" : names.get(0).name();
                var text = ConfigDef.convertToString(key.defaultValue, key.type);
                System.out.println(String.join("|", key.name, key.type.name(), name, text));
            }
        }
    }
}
