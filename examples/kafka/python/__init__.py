"""With confluent-kafka."""
