"""Judges of histories: one checker a family of anomalies."""
