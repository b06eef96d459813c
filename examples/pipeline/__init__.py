"""Flights of a topic, counted by day and airport in Spark Structured Streaming, into Parquet: exactly once."""
