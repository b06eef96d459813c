"""Counts a topic's flights by day and airport with Spark Structured Streaming, into Parquet, exactly once."""
