"""Compaction of one partition: the leader's passes, and the segments that all replicas end with."""
