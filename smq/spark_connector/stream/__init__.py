"""Structured Streaming: the stream reader, its offsets, admission and lag."""
