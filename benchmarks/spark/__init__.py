"""Spark on smq: what reads and writes cost, beside Spark's Kafka connector and sources that do nothing."""
