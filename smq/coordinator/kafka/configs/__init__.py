"""Configuration of topics, nodes and the cluster as Kafka clients see and change it."""
