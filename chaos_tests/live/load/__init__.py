"""The clients of a live run: gRPC, Kafka, consumer groups and Spark."""
